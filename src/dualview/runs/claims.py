"""Who computes which cell: an advisory lock a cell, which the system itself lets go when its holder dies."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout


class Claim:
    """A cell held by this process; without a lock, one that nobody can hold."""

    def __init__(self, path: Path | None = None, lock: FileLock | None = None) -> None:
        self._path, self._lock = path, lock

    @classmethod
    def nominal(cls) -> Claim:
        return cls()

    def release(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                # Whoever has this file open and locks it now will look first whether the cell is done.
                self._path.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def take(folder: Path, name: str) -> Claim | None:
    """Hold `name`, or None if another process does."""
    path = folder / f"{name}.lock"
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return Claim(path, lock)
