"""Looking at a store: `ls`, `show`, `diff`, `export`, `query` and `load`, each a function and a verb."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualview.errors import UserError
from dualview.files import must_be_writable, whole
from dualview.runs import query as sql_query
from dualview.runs.store import Store, Stored
from dualview.runs.tables import TABLES

if TYPE_CHECKING:
    from dualview.runs.index import Failure

Where = str | os.PathLike[str]
FORMATS = (".csv", ".parquet", ".json")


def load(store: Where, *, current: bool = True) -> Any:
    """One row a cell, as a pandas frame; `current` leaves out cells that were computed again since (other weights)."""
    with Store(store) as opened:
        return opened.frame(current=current)


@dataclass(frozen=True)
class Listing:
    """What `dualview ls` shows."""

    cells: list[dict[str, Any]]
    failures: list[Failure]
    problems: list[str]
    """What could not be read."""


def ls(store: Where, *, all: bool = False) -> Listing:
    """The cells of a store, as rows, and what failed; `all`: those that were computed again since, too."""
    with Store(store) as opened:
        rows = sql_query.table(opened, "cells", current=not all).to_pylist()
        return Listing(rows, opened.failures(), [str(problem) for problem in opened.problems])


def show(cell: str, store: Where) -> Stored:
    """One cell's result, by the beginning of its key."""
    with Store(store) as opened:
        key = opened.find(cell)
        return Stored(key, opened.result(key))


def query(sql: str, store: Where) -> Any:
    """The answer to a SELECT over the views `cells`, `layers`, `queries`, `controls`, `runs` and `failures`."""
    with Store(store) as opened:
        return sql_query.query(opened, sql)


def export(out: Where, store: Where, *, table: str = "cells", all: bool = False) -> Path:
    """Write a table to a .csv, .parquet or .json file, whole or not at all."""
    path = Path(out)
    if path.suffix not in FORMATS:
        raise UserError(f"{path} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, which says how to write it.")
    must_be_writable(path)
    with Store(store) as opened:
        rows = sql_query.table(opened, table, current=not all)
    with whole(path) as temporary:
        temporary.write_bytes(_encoded(rows, path.suffix))
    return path


def _encoded(rows: Any, suffix: str) -> bytes:
    if suffix == ".json":
        return (json.dumps(rows.to_pylist(), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    if suffix == ".csv":
        return rows.to_pandas().to_csv(index=False).encode()
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]

    sink = io.BytesIO()
    pq.write_table(rows, sink, compression="zstd")
    return sink.getvalue()


# ------------------------------------------------------------------------------------------------------------- diff


@dataclass(frozen=True)
class Difference:
    """A column in which two cells differ."""

    name: str
    left: Any
    right: Any

    @property
    def by(self) -> float | None:
        """right − left, of numbers."""
        both = (self.left, self.right)
        numbers = [x for x in both if isinstance(x, int | float) and not isinstance(x, bool)]
        return numbers[1] - numbers[0] if len(numbers) == 2 else None


@dataclass(frozen=True)
class StoreDifference:
    """What two stores do not share, by what was asked for."""

    only_left: list[str]
    only_right: list[str]
    """Keys of cells that the other store has no counterpart of."""
    differing: dict[str, list[Difference]]
    """Left keys of cells that answer the same options with other numbers (or come of other weights or code)."""
    same: int

    @property
    def equal(self) -> bool:
        return not (self.only_left or self.only_right or self.differing)


def diff(left: str, right: str, store: Where | None = None) -> list[Difference] | StoreDifference:
    """How two cells of a store differ, by the beginnings of their keys; or, without `store`, two whole stores."""
    if store is None:
        return _diff_stores(Path(left), Path(right))
    with Store(store) as opened:
        rows = {row["key"]: row for row in sql_query.table(opened, "cells").to_pylist()}
        return _differences(rows[opened.find(left)], rows[opened.find(right)])


_NAMES_ONLY = ("key", "asked", "current")


def _differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(name, left[name], right[name])
        for name in left
        if name not in _NAMES_ONLY and left[name] != right[name]
    ]


def _diff_stores(left: Path, right: Path) -> StoreDifference:
    with Store(left) as first, Store(right) as second:
        rows = [
            {row["asked"]: row for row in sql_query.table(store, "cells", current=True).to_pylist()}
            for store in (first, second)
        ]
        differing: dict[str, list[Difference]] = {}
        same = 0
        for asked in rows[0].keys() & rows[1].keys():
            ours, theirs = rows[0][asked], rows[1][asked]
            found = _differences(ours, theirs) + _other_tables(first, second, ours["key"], theirs["key"])
            if found:
                differing[ours["key"]] = found
            else:
                same += 1
    return StoreDifference(
        only_left=sorted(rows[0][asked]["key"] for asked in rows[0].keys() - rows[1].keys()),
        only_right=sorted(rows[1][asked]["key"] for asked in rows[1].keys() - rows[0].keys()),
        differing=dict(sorted(differing.items())),
        same=same,
    )


def _other_tables(first: Store, second: Store, left: str, right: str) -> list[Difference]:
    """The further tables that differ, told by their files' sha256."""
    ours, theirs = first.manifest(left).files, second.manifest(right).files
    names = [f"{table}.parquet" for table in TABLES[1:]]
    if left != right:  # their keys stand in the rows
        return []
    return [
        Difference(name, ours[name].sha256[:12], theirs[name].sha256[:12])
        for name in names
        if ours[name].sha256 != theirs[name].sha256
    ]
