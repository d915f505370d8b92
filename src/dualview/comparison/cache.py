"""Runs of one model that share work: what one made, the next may take.

A comparison asks for each of its passes through a `Recall`. Alone it makes them all; in a sweep the zero-shot pass of
a task, the in-context pass of a list of demonstrations and their like are made once and taken again by every cell
that differs in something else. What is taken is the very same arrays, so sharing never changes a number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Recall(Protocol):
    """What was made of this kind under an equal key, or else what `make` makes now."""

    def __call__(self, kind: str, key: Hashable, make: Callable[[], T]) -> T: ...


def afresh(kind: str, key: Hashable, make: Callable[[], T]) -> T:
    """Share nothing."""
    return make()


class LastOfEach:
    """Remembers the last of each kind: enough for cells run in order, and memory stays bounded."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Hashable, Any]] = {}

    def __call__(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        known = self._last.get(kind)
        if known is not None and known[0] == key:
            return known[1]
        self._last.pop(kind, None)  # before the next is made, so that both are never held at once
        made = make()
        self._last[kind] = (key, made)
        return made
