"""Where a task's rows come from: a jsonl, csv or parquet file, a dataset on the hub, a task of lm-evaluation-harness,
or the embedded collections.

A reader yields raw rows, each with its place ("data/train.jsonl, line 3"), and checks only the file itself; `rows`
checks the content of a row.
"""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dualview.io.errors import UserError, first_line
from dualview.tasks.embedded import embedded_rows
from dualview.tasks.hub import read_hub
from dualview.tasks.lm_eval import PREFIX, read_documents


@dataclass(frozen=True)
class RawRow:
    """One row as read, not yet checked."""

    where: str
    values: Mapping[str, object]
    textual: bool = False
    """Every value is text (csv), so an integer label arrives as digits."""


def read_source(source: str, folder: Path, commits: dict[str, str] | None = None) -> list[RawRow]:
    """All rows of `source` (paths are relative to `folder`); a source without any is a UserError.

    The commit of a data set on the hub is added to `commits`.
    """
    if source.startswith("hf:"):
        found, commit = read_hub(source)
        rows = _numbered(source, found)
        if commits is not None:
            commits[source] = commit
    elif source.startswith("embedded:"):
        match = re.fullmatch(r"embedded:(\w+):(train|selection|validation)", source)
        if match is None:
            raise UserError(
                f"{source!r} is not an embedded source; write embedded:NAME:train, :selection or :validation."
            )
        rows = _numbered(source, map(vars, embedded_rows(match[1], match[2])))
    elif source.startswith(PREFIX):
        rows = _numbered(source, read_documents(source))
    else:
        return read_file(folder / source)
    if not rows:
        raise UserError(f"{source} has no rows; name a dataset and split that has some.")
    return rows


def _numbered(source: object, rows: Iterable[Mapping[str, object]]) -> list[RawRow]:
    return [RawRow(f"{source}, row {number}", values) for number, values in enumerate(rows, start=1)]


def read_file(path: Path) -> list[RawRow]:
    """All rows of a jsonl, csv or parquet file, by the ending of its name."""
    reader = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path} is not a row file; its name must end in .jsonl, .csv or .parquet.")
    try:
        rows = list(reader(path))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; check the path.") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8."
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); check the path.") from error
    if not rows:
        raise UserError(f"{path} is empty; it needs at least one row.")
    return rows


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{where} is not valid JSON ({_json_problem(error)}); write one JSON object a line."
                ) from error
            if not isinstance(values, dict):
                raise UserError(f"{where} is not a JSON object; write one object with named fields a line.")
            yield RawRow(where, cast(dict[str, object], values))


def _json_problem(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else "a number of too many digits"


def _read_csv(path: Path) -> Iterator[RawRow]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, None)
            if header is None:
                return
            if len(set(header)) != len(header):
                raise UserError(f"{path}, line 1 names a column twice; give every column its own name.")
            for cells in reader:
                if not cells:
                    continue
                where = f"{path}, line {reader.line_num}"
                if len(cells) != len(header):
                    raise UserError(f"{where} has {len(cells)} cells for {len(header)} columns; quote commas in text.")
                yield RawRow(where, dict(zip(header, cells, strict=True)), textual=True)
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num} is not valid CSV ({error}); correct that line.") from error


def _read_parquet(path: Path) -> list[RawRow]:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        with path.open("rb") as stream:
            table = parquet.read_table(stream)
    except arrow.ArrowException as error:
        raise UserError(f"{path} is not a readable parquet file ({first_line(error)}); write it again.") from error
    return _numbered(path, table.to_pylist())
