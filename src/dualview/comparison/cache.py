"""A cache of passes: cells of a sweep that share a model reuse each other's work.

A comparison asks for each of its passes through a `PassCache`. A single run computes them all. In a sweep the zero-shot
pass of a task or the in-context pass of a list of demonstrations is computed once and reused by every cell that differs
in something else. The same arrays are returned, so the cache never changes a number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class PassCache(Protocol):
    """Returns what was made of this kind under an equal key, or calls `make`."""

    def __call__(self, kind: str, key: Hashable, make: Callable[[], T]) -> T: ...


def no_cache(kind: str, key: Hashable, make: Callable[[], T]) -> T:
    """Share nothing."""
    return make()


class LastOfEach:
    """Keeps the last of each kind: enough for cells run in order, and memory stays bounded."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Hashable, Any]] = {}

    def __call__(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        known = self._last.get(kind)
        if known is not None and known[0] == key:
            return known[1]
        self._last.pop(kind, None)  # before the next is made, so that both are never in memory at once
        made = make()
        self._last[kind] = (key, made)
        return made


class _Missing(Exception):
    pass


def recall(cache: PassCache, kind: str, key: Hashable) -> Any | None:
    """What was made of this kind under an equal key; None if nothing was. For what is made a step at a time."""

    def missing() -> Any:
        raise _Missing

    try:
        return cache(kind, key, missing)
    except _Missing:
        return None
