"""Python's garbage collector, kept out of the start."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """Run without the garbage collector: what imports and a tokenizer's files define is not garbage, and the collector
    searches it again and again, for about a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
