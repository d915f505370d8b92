"""Short steps that no interrupt may split."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_KINDS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Generator[None]:
    """Delay Ctrl-C and SIGTERM until the block is done.

    Python runs signal handlers in the main thread only, between any two of its instructions: a lock that was just
    taken may not be noted yet. Blocking the signals would not help, since another thread would receive them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None: a handler that was not set from Python, which cannot be restored.
    before: dict[int, Any] = {kind: handler for kind in _KINDS if (handler := signal.getsignal(kind)) is not None}
    arrived: list[int] = []
    deferring = True

    def note(kind: int, frame: FrameType | None) -> None:
        if deferring:
            arrived.append(kind)
        elif callable(before[kind]):  # it arrived while the handlers were being restored
            before[kind](kind, frame)

    try:
        for kind in before:
            signal.signal(kind, note)
        yield
    finally:
        deferring = False
        for kind, handler in before.items():
            signal.signal(kind, handler)
    for kind in dict.fromkeys(arrived):
        signal.raise_signal(kind)
