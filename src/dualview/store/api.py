"""Reading a store: `ls`, `show`, `diff`, `export`, `query` and `load`; all but `load` are verbs too.

Cells that cannot be read are left out and named: to `say`, or as warnings. `json` is a file, or "-" for standard
output.
"""

from __future__ import annotations

import json as jsonlib
import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dualview.io.atomic import must_be_writable, whole
from dualview.io.errors import UserError
from dualview.io.json_files import Place, check_place, plain, save_json
from dualview.io.netcdf import write_netcdf
from dualview.io.progress import Say
from dualview.records.files import load_records
from dualview.store.as_dataset import to_dataset
from dualview.store.folder import Stored
from dualview.store.query import query as query_sql
from dualview.store.query import table as view
from dualview.store.store import Store
from dualview.store.tables import TABLES, TableName

if TYPE_CHECKING:
    from dualview.store.index import Failure

Where = str | os.PathLike[str]
FORMATS = {"csv": ".csv", "parquet": ".parquet", "json": ".json", "netcdf": ".nc"}


def _warn(problem: str) -> None:
    warnings.warn(problem, stacklevel=5)  # the caller of `load`, past `_opened`


def load(store: Where, *, current: bool = True) -> Any:
    """One row per cell, as a pandas frame; `current` leaves out cells that were computed again since."""
    with _opened(store, _warn) as opened:
        return opened.to_frame(current=current)


@contextmanager
def _opened(store: Where, say: Say) -> Generator[Store]:
    """A store; afterwards, also after an error, `say` what could not be read."""
    with Store(store) as opened:
        try:
            yield opened
        finally:
            for problem in opened.problems:
                say(str(problem))


@dataclass(frozen=True)
class Listing:
    """What `dualview ls` shows."""

    cells: list[dict[str, Any]]
    failures: list[Failure]
    problems: list[str]
    """What could not be read."""


def ls(store: Where, *, all: bool = False, json: Place = None) -> Listing:
    """The cells of a store, as rows, and what failed; `all` includes cells that were computed again since."""
    check_place(json)
    with Store(store) as opened:
        rows = view(opened, "cells", current=not all).to_pylist()
        found = Listing(rows, opened.failures(), [str(problem) for problem in opened.problems])
    failures = [{**vars(failure), "options": jsonlib.loads(failure.options)} for failure in found.failures]
    save_json(json, plain({"cells": found.cells, "failures": failures}))
    return found


def show(cell: str, store: Where, *, json: Place = None) -> Stored:
    """One cell's result, by its key or the beginning of it."""
    check_place(json)
    with Store(store) as opened:
        key = opened.find(cell)
        found = Stored(key, opened.result(key))
    save_json(json, plain({"key": key, **found.result.to_json()}))
    return found


def query(sql: str, store: Where, *, json: Place = None, say: Say = _warn) -> Any:
    """The answer, an Arrow table, to a SELECT over `cells`, `layers`, `queries`, `controls`, `runs` and `failures`.

    Columns of the same name are numbered: `seed`, `seed_2`.
    """
    check_place(json)
    with _opened(store, say) as opened:
        rows = query_sql(opened, sql)
    if json is not None:
        save_json(json, plain(rows.to_pylist()))
    return rows


def export(
    out: Where,
    store: Where | None = None,
    *,
    run: Where | None = None,
    table: str = "cells",
    format: str | None = None,
    all: bool = False,
    json: Place = None,
    say: Say = _warn,
) -> Path:
    """Write a table of a store, or the numbers of one run, to a file, whole or not at all.

    format   csv, parquet, json or netcdf; by default the ending of the file's name decides (.nc is NetCDF)
    run      a folder that `run --out` wrote: its numbers, or as NetCDF its records (`--save-records`)
    json     a file for what was written where, or "-" for standard output
    """
    check_place(json)
    path = Path(out)
    if (store is None) == (run is None):
        raise UserError("Export takes either a store or a run; give one of --store and --run.")
    if format is not None and format not in FORMATS:
        raise UserError(f"--format is {format!r}; choose one of {', '.join(FORMATS)}.")
    suffix = path.suffix if format is None else FORMATS[format]
    if suffix not in FORMATS.values():
        raise UserError(f"{path} must end in {', '.join(FORMATS.values())}, or give --format.")
    must_be_writable(path)
    if run is not None and suffix == ".nc":
        table, rows = "records", load_records(Path(run) / "records.safetensors").to_xarray()
    elif run is not None:
        from dualview.comparison.result import Result  # imports scipy, which reading a store does not need

        table, rows = "numbers", _arrow(Result.load(Path(run) / "result.json").to_frame())
    else:
        with _opened(cast(Where, store), say) as opened:
            rows = view(opened, table, current=not all)
    count = rows.sizes["query"] if table == "records" else rows.num_rows
    if suffix == ".nc":
        write_netcdf(rows if table == "records" else to_dataset(rows, table), path)
    else:
        with whole(path) as temporary:
            _write_rows(rows, suffix, temporary)
    save_json(json, {"table": table, "rows": count, "written": [str(path)]})
    return path


def _arrow(frame: Any) -> Any:
    import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]

    return pa.Table.from_pandas(frame.reset_index(), preserve_index=False)


def _write_rows(rows: Any, suffix: str, place: Path) -> None:
    if suffix == ".json":
        text = jsonlib.dumps(rows.to_pylist(), indent=1, ensure_ascii=False, allow_nan=False)
        place.write_text(f"{text}\n", encoding="utf-8")
    elif suffix == ".csv":
        rows.to_pandas().to_csv(place, index=False)
    else:
        import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]

        pq.write_table(rows, place, compression="zstd")


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
    """How two stores differ, by the options of their cells."""

    only_left: list[str]
    only_right: list[str]
    """Keys of cells with options that the other store lacks."""
    differing: dict[str, list[Difference]]
    """Left keys of cells with the same options and other numbers (or other weights or versions)."""
    same: int

    @property
    def equal(self) -> bool:
        return not (self.only_left or self.only_right or self.differing)


def diff(
    left: str, right: str, store: Where | None = None, *, json: Place = None, say: Say = _warn
) -> list[Difference] | StoreDifference:
    """How two cells of a store differ, by the beginnings of their keys; without `store`, how two stores differ."""
    check_place(json)
    if store is None:
        between = _diff_stores(Path(left), Path(right), say)
        save_json(json, plain({**asdict(between), "equal": between.equal}))
        return between
    with _opened(store, say) as opened:
        rows = {row["key"]: row for row in view(opened, "cells").to_pylist()}
        found = _differences(*(_row_of(rows, opened, each) for each in (left, right)))
    save_json(json, plain([asdict(each) for each in found]))
    return found


def _row_of(rows: Mapping[str, Any], store: Store, start: str) -> Mapping[str, Any]:
    key = store.find(start)
    if key not in rows:
        raise UserError(f"The cell {key[:12]} cannot be read; run the sweep again, which computes it again.")
    return rows[key]


_NAMES_ONLY = ("key", "asked", "current")


def _differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(name, left[name], right[name])
        for name in left
        if name not in _NAMES_ONLY and left[name] != right[name]
    ]


def _diff_stores(left: Path, right: Path, say: Say) -> StoreDifference:
    with _opened(left, say) as first, _opened(right, say) as second:
        rows = [
            {row["asked"]: row for row in view(store, "cells", current=True).to_pylist()} for store in (first, second)
        ]
        differing: dict[str, list[Difference]] = {}
        same = 0
        for asked in rows[0].keys() & rows[1].keys():
            ours, theirs = rows[0][asked], rows[1][asked]
            found = _differences(ours, theirs) + _beyond_the_row(first, second, ours["key"], theirs["key"])
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


def _beyond_the_row(first: Store, second: Store, left: str, right: str) -> list[Difference]:
    """The further tables that differ, and the parts of the key that differ: weights, tokenizer, versions and so on."""
    ours, theirs = first.manifest(left), second.manifest(right)
    names = ours.identity.keys() | theirs.identity.keys()
    parts = {name: (ours.identity.get(name), theirs.identity.get(name)) for name in sorted(names)}
    found = [Difference(f"identity.{name}", *pair) for name, pair in parts.items() if pair[0] != pair[1]]
    for table in TABLES[1:]:
        notes = [manifest.files[f"{table}.parquet"].sha256 for manifest in (ours, theirs)]
        if notes[0] != notes[1] and _rows(first, left, table) != _rows(second, right, table):
            found.append(Difference(f"{table}.parquet", notes[0][:12], notes[1][:12]))
    return found


def _rows(store: Store, key: str, table: TableName) -> list[dict[str, Any]]:
    """A cell's rows of a table, without the key column."""
    return query_sql(store, f"SELECT * EXCLUDE (key) FROM {table} WHERE key = '{key}'").to_pylist()
