"""Who computes which cell: an advisory lock a cell, which the system itself lets go when its holder dies."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dualview.store.signals import uninterrupted


class Claim:
    """A cell held by this process; without a lock, one that nobody can hold."""

    def __init__(self, path: Path | None = None, lock: FileLock | None = None) -> None:
        self._path, self._lock = path, lock

    @classmethod
    def nominal(cls) -> Claim:
        return cls()

    def release(self) -> None:
        """Remove the lock's file, then let go. The second time it does nothing: the file may be another process's."""
        with uninterrupted():
            path, self._path = self._path, None
            if path is not None:
                with suppress(OSError):
                    # A process that has this file open finds it removed once it locks it, and opens a new one.
                    path.unlink(missing_ok=True)
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def take(folder: Path, name: str) -> Claim | None:
    """Hold `name`, or None if another process does.

    Call it inside of `uninterrupted` together with whatever will release it: an interrupt between the two would leave
    a file that nobody holds.
    """
    path = folder / f"{name}.lock"
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return Claim(path, lock)


@contextmanager
def held(folder: Path, name: str) -> Generator[bool]:
    """Hold `name` for the length of the block; False if another process does."""
    with ExitStack() as stack:
        with uninterrupted():
            claim = take(folder, name)
            if claim is not None:
                stack.enter_context(claim)
        yield claim is not None


def clear(folder: Path) -> None:
    """Remove the files of locks that nobody holds: those of processes that were killed."""
    for path in folder.glob("*.lock"):
        with suppress(OSError), held(folder, path.stem):
            pass
