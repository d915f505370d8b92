"""HTML for notebooks.

The report imports results, so a result cannot import the report that draws it. Instead the package registers a renderer
for each class here, and the object looks it up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_RENDERERS: dict[str, Callable[[Any], str]] = {}


def register(kind: str, renderer: Callable[[Any], str]) -> None:
    """Use `renderer` for objects of class name `kind`."""
    _RENDERERS[kind] = renderer


def as_html(thing: Any) -> str | None:
    """The object as HTML; None, for which a notebook shows plain text, if its class has no renderer."""
    renderer = _RENDERERS.get(type(thing).__name__)
    return None if renderer is None else renderer(thing)
