"""A store's rows as tables for a terminal.

Values are wrapped in `Text`, because rich reads a bare string as markup: `m[v2]` would be a style.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dualview.store.api import Difference, StoreDifference
from dualview.store.index import Failure

# Title in the table, column of the row, and its format. A similarity is followed by its floor.
_SHOWN = (
    ("key", "key", ".12"),
    ("model", "model", ""),
    ("task", "task", ""),
    ("labels", "labels", ""),
    ("shots", "shots_used", ""),
    ("seed", "seed", ""),
    ("rule", "ft_rule", ""),
    ("lr", "lr", "g"),
    ("zsl", "accuracy_zsl", ".3f"),
    ("icl", "accuracy_icl", ".3f"),
    ("ft", "accuracy_ft", ".3f"),
    ("SimAOU raw", "sim_aou_raw", "+.3f"),
    ("its floor", "sim_aou_raw_floor", "+.3f"),
    ("Rec2FTP", "rec2ftp_value", ".3f"),
    ("chance", "rec2ftp_chance", ".3f"),
    ("verdict", "verdict", ""),
)


def cells_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each cell: what was run and what it found."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, _, style in _SHOWN:
        table.add_column(title, justify="right" if style and title != "key" else "left", no_wrap=title == "key")
    for row in rows:
        table.add_row(*(Text(_written(row[column], style)) for _, column, style in _SHOWN))
    return table


def failure_lines(failures: Sequence[Failure]) -> list[str]:
    """Each reason with the cells that failed for it."""
    by_reason: dict[str, list[str]] = {}
    for failure in failures:
        options = json.loads(failure.options)
        by_reason.setdefault(failure.reason, []).append(f"{options['model']} on {options['task']}")
    return [f"failed: {len(cells)} × {cells[0]}: {reason}" for reason, cells in by_reason.items()]


def rows_table(rows: Any) -> Table:
    """The answer to a query."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows.column_names:
        table.add_column(Text(name))
    for row in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        table.add_row(*(Text(_written(value, ".6g" if isinstance(value, float) else "")) for value in row))
    return table


def diff_table(found: list[Difference] | StoreDifference, left: str, right: str) -> Any:
    if isinstance(found, list):
        return _differences_table(found, left, right) if found else Text("the two cells have the same row")
    lines = [f"{found.same} cells are the same in both"]
    for where, keys in ((left, found.only_left), (right, found.only_right)):
        lines += [f"{len(keys)} only in {where}: {', '.join(key[:12] for key in keys[:8])}"] if keys else []
    for key, differences in found.differing.items():
        lines.append(f"{key[:12]} differs in {', '.join(d.name for d in differences[:8])}")
    return Text("\n".join(lines))


def _differences_table(found: Sequence[Difference], left: str, right: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", left, right, "difference"):
        table.add_column(Text(title), overflow="fold")
    for each in found:
        style = ".6g" if each.by is not None else ""
        by = "" if each.by is None else f"{each.by:+.3g}"
        table.add_row(*map(Text, (each.name, _written(each.left, style), _written(each.right, style), by)))
    return table


def _written(value: Any, style: str) -> str:
    return "" if value is None else format(value, style) if style else str(value)
