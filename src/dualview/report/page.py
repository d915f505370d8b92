"""One HTML file that needs nothing else: markup that is escaped by default, the style, the script and the data inside.

Text from a run (demonstrations, labels, model names) may hold anything. It reaches the page in two ways only: as
children or attributes of `tag`, which escapes them, and as JSON in a data block, in which `<` is written as an escape.
The page's own policy allows the one script and the one style sheet, by their hashes, and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


_VOID = {"meta", "input", "br", "hr", "col", "img", "link"}


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. Children that are not `Markup` are escaped; None is left out, and a list is taken apart.

    `class_` and `for_` are written without their underscore, others with a hyphen for it; True stands for an attribute
    without a value, None or False for none.

    >>> tag("p", "a < b", class_="x", data_n=3)
    '<p class="x" data-n="3">a &lt; b</p>'
    """
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Pieces one after another, escaped unless they are `Markup`."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, list | tuple):
            parts.append(join(*child))  # pyright: ignore[reportUnknownArgumentType]
        elif child is not None:
            parts.append(html.escape(str(child)))
    return Markup("".join(parts))


def table(
    head: Sequence[object],
    rows: Sequence[Sequence[object]],
    *,
    label: str,
    numeric: set[int] | None = None,
    caption: object = None,
    class_: str | None = None,
) -> Markup:
    """A table that scrolls by itself where it is too wide; the first cell of a row heads it."""
    right = set(range(1, len(head))) if numeric is None else numeric

    def cell(index: int, content: object, *, heads: bool) -> Markup:
        side = "num" if index in right else None
        if heads:
            return tag("th", content, scope="col", class_=side)
        return tag("td" if index else "th", content, scope=None if index else "row", class_=side)

    inner = tag(
        "table",
        None if caption is None else tag("caption", caption),
        tag("thead", tag("tr", *(cell(i, text, heads=True) for i, text in enumerate(head)))),
        tag("tbody", *(tag("tr", *(cell(i, text, heads=False) for i, text in enumerate(row))) for row in rows)),
        class_=class_,
    )
    return scrolling(inner, label)


def scrolling(content: Markup, label: str) -> Markup:
    """A part that can be scrolled sideways, by keyboard as well."""
    return tag("div", content, class_="scroll", tabindex=0, role="group", aria_label=label)


def data_block(content: Any, name: str) -> Markup:
    """JSON for the script to read. With `<` escaped, nothing in it can end the element."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for bad in "<>&\u2028\u2029":
        text = text.replace(bad, f"\\u{ord(bad):04x}")
    return tag("script", Markup(text), type="application/json", id=name)


@cache
def static(name: str) -> str:
    """One of the package's own files: the style sheet or a script."""
    return (files("dualview.report") / "static" / name).read_text(encoding="utf-8")


def _style() -> str:
    return static("dualview.css")


def _script() -> str:
    return static("frame.js") + static("charts.js") + static("report.js")


def policy() -> str:
    """The content-security policy of every report: its own script and style, images in the page, no connections."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (_script(), _style())]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def document(title: str, body: Markup, data: Any) -> str:
    """The whole page."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy()),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(_style())),
    )
    whole = tag("body", tag("a", "To the content", class_="skip", href="#content"), body, data_block(data, "data"))
    script = tag("script", Markup(_script()))
    page = f'<!doctype html>\n<html lang="en">{head}{whole.removesuffix("</body>")}{script}</body></html>\n'
    return page.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate in a text could not be written
