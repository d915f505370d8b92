"""How objects show themselves in a notebook.

A result does not know the report that can draw it: the report is built on results, not the other way round. So the
package registers what draws each kind of object, and the object asks for it here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_RENDERERS: dict[str, Callable[[Any], str]] = {}


def register(kind: str, renderer: Callable[[Any], str]) -> None:
    """Use `renderer` for objects of class name `kind`."""
    _RENDERERS[kind] = renderer


def as_html(thing: Any) -> str | None:
    """The object as HTML; None, for which a notebook shows the plain text, where nothing draws its kind."""
    renderer = _RENDERERS.get(type(thing).__name__)
    return None if renderer is None else renderer(thing)
