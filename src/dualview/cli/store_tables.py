"""A store's rows as tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dualview.io.display import TextTable
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
    """One line for each cell: what was run and what it found, and which were computed again since."""
    titles = [title for title, _, _ in _SHOWN]
    cells = [[_written(row[column], style) for _, column, style in _SHOWN] for row in rows]
    if not all(row["current"] for row in rows):
        titles.append("notes")
        for line, row in zip(cells, rows, strict=True):
            line.append("" if row["current"] else "superseded")
    numeric = {place for place, (title, _, style) in enumerate(_SHOWN) if style and title != "key"}
    table = TextTable("Cells", titles, cells, numeric).rich()
    table.columns[0].no_wrap = True  # a key is to be copied
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
    cells = [
        [_written(value, ".6g" if isinstance(value, float) else "") for value in row]
        for row in zip(*(column.to_pylist() for column in rows.columns), strict=True)
    ]
    return TextTable("Answer", rows.column_names, cells).rich()


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
    rows: list[list[str]] = []
    for each in found:
        style = ".6g" if each.by is not None else ""
        by = "" if each.by is None else f"{each.by:+.3g}"
        rows.append([each.name, _written(each.left, style), _written(each.right, style), by])
    return TextTable("Differences", ("", left, right, "difference"), rows).rich()


def _written(value: Any, style: str) -> str:
    return "" if value is None else format(value, style) if style else str(value)
