"""Hooks on a model that last as long as a block of code."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Generator[None]:
    """Remove the registered hooks when the block ends."""
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()
