"""How things are shown: tables of text, and HTML for notebooks.

The report imports results, so a result cannot import the report that draws it. Instead the package registers a renderer
for each class here, and the object looks it up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_RENDERERS: dict[str, Callable[[Any], str]] = {}


def register(kind: str, renderer: Callable[[Any], str]) -> None:
    """Use `renderer` for objects of class name `kind`."""
    _RENDERERS[kind] = renderer


def as_html(thing: Any) -> str | None:
    """The object as HTML; None, for which a notebook shows plain text, if its class has no renderer."""
    renderer = _RENDERERS.get(type(thing).__name__)
    return None if renderer is None else renderer(thing)


@dataclass(frozen=True)
class TextTable:
    """Rows of text, built once and drawn on a terminal, as Markdown, or as HTML (`report/html/templates/tables.html`).

    The first cell of a row is its heading.
    """

    label: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Collection[int] = ()
    """The columns that are aligned to the right."""
    note: str = ""

    def rich(self, *, style: str = "", named: bool = True) -> Table:
        """For a terminal; with `named` False, the column of row headings has no heading itself."""
        from rich.table import Table
        from rich.text import Text

        made = Table(box=None, pad_edge=False, header_style="bold", style=style)
        for index, text in enumerate(self.head):
            side = "right" if index in self.numeric else "left"
            made.add_column(Text(text if index or named else ""), justify=side, overflow="fold")
        for row in self.rows:
            made.add_row(*map(Text, row))  # rich reads a bare string as markup: `m[v2]` would be a style
        return made

    def markdown(self) -> str:
        ruler = ["---:" if index in self.numeric else "---" for index in range(len(self.head))]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (self.head, ruler, *self.rows)]
        return "\n".join(f"| {line} |" for line in lines) + f"\n\n{self.note}"
