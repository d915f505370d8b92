"""numpy's products on one thread each, where several threads already compute side by side."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import threadpoolctl  # pyright: ignore[reportMissingTypeStubs]

_threadpoolctl = cast("Any", threadpoolctl)


class _Limit:
    """The limit is the whole process's: the first who needs it sets it, and the last restores what was before."""

    def __init__(self) -> None:
        self._lock, self._users, self._set = Lock(), 0, cast("Any", None)

    def enter(self) -> None:
        with self._lock:
            if not self._users:
                self._set = _threadpoolctl.threadpool_limits(1, user_api="blas")
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._set.restore_original_limits()


_limit = _Limit()


@contextmanager
def one_thread_each() -> Generator[None]:
    """While it lasts, no product of numpy's is divided among threads, in the whole process.

    The statistics are thousands of small products on several threads (`Backend.each`). OpenBLAS would divide each among
    as many threads again, which wait for each other by spinning: twice the processor's time, and where other programs
    have the cores, too, ten times as long.
    """
    _limit.enter()
    try:
        yield
    finally:
        _limit.leave()
