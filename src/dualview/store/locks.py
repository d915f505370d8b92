"""Which process computes which cell: an advisory lock per cell, which the system releases when its holder dies."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dualview.store.signals import uninterrupted


class CellLock:
    """A cell locked by this process; without a file, a stand-in where no lock can be written."""

    def __init__(self, path: Path | None = None, lock: FileLock | None = None) -> None:
        self._path, self._lock = path, lock

    def release(self) -> None:
        """Remove the lock's file, then release it. A second call does nothing: the file may be another process's."""
        with uninterrupted():
            path, self._path = self._path, None
            if path is not None:
                with suppress(OSError):
                    # A process that has this file open finds it removed once it locks it, and opens a new one.
                    path.unlink(missing_ok=True)
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> CellLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(folder: Path, name: str) -> CellLock | None:
    """Lock `name`, or None if another process holds it.

    Call it inside `uninterrupted`, together with whatever will release it: an interrupt between the two would leave a
    file that no process holds.
    """
    path = folder / f"{name}.lock"
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return CellLock(path, lock)


@contextmanager
def locked(folder: Path, name: str) -> Generator[bool]:
    """Lock `name` for the length of the block; False if another process holds it."""
    with ExitStack() as stack:
        with uninterrupted():
            lock = acquire(folder, name)
            if lock is not None:
                stack.enter_context(lock)
        yield lock is not None


def clear(folder: Path) -> None:
    """Remove the lock files of processes that were killed."""
    for path in folder.glob("*.lock"):
        with suppress(OSError), locked(folder, path.stem):
            pass
