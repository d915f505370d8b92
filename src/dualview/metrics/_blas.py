"""numpy's products on one thread each, where several threads already compute side by side."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import threadpoolctl  # pyright: ignore[reportMissingTypeStubs]

_threadpoolctl = cast("Any", threadpoolctl)


def one_thread_each() -> AbstractContextManager[Any]:
    """While it lasts, no product of numpy's is divided among threads, in the whole process.

    The statistics are thousands of small products on several threads (`Backend.each`). OpenBLAS would divide each among
    as many threads again, which wait for each other by spinning: twice the processor's time, and where other programs
    have the cores, too, ten times as long.
    """
    return _threadpoolctl.threadpool_limits(1, user_api="blas")
