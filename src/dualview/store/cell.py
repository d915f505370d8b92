"""One cell on disk: a folder named by its key, complete or absent.

    manifest.json          what the cell is, and the size and sha256 of every other file
    result.json            the result, as `dualview run --json` writes it
    cells.parquet          its row; layers.parquet, queries.parquet and controls.parquet: its further rows
    records.safetensors    the tensors, with --save-records

It is written under a temporary name and renamed, so a folder under its final name is complete. Later damage (a disk
error, an incomplete copy, an editor) is found by comparing it with its manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dualview.io.errors import UserError, first_problem
from dualview.io.hashing import FileNote, notes_of
from dualview.options import RunOptions, plain
from dualview.records import Records, save_records
from dualview.store.cell_key import CellIdentity, asked_id, asked_now
from dualview.store.tables import TABLES, KeyedResult, tables_of

SCHEMA = "dualview.cell/1"
Kind = TypeVar("Kind", bound=BaseModel)
MANIFEST, RESULT, RECORDS = "manifest.json", "result.json", "records.safetensors"


class RunTimes(BaseModel):
    """When and where a cell was computed, and how long each part took."""

    model_config = ConfigDict(frozen=True)

    date: str
    host: str
    seconds: dict[str, float]


class Manifest(BaseModel):
    """What a cell is, and what its files must be."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    schema_: str = Field(SCHEMA, alias="schema")
    key: str
    plan: str | None
    """The plan key it was computed under."""
    asked: str
    options: dict[str, Any]
    """All of them, as given."""
    identity: dict[str, Any]
    run: RunTimes
    files: dict[str, FileNote]

    @property
    def records(self) -> bool:
        return RECORDS in self.files

    @property
    def answers(self) -> str:
        """The id of its options today; `asked` is that of the dualview that stored it, which may have had fewer."""
        return asked_now(self.options, self.asked)


class Damage(Exception):
    """What is wrong with a cell's folder."""


class NoRecords(Exception):
    """A cell's tensors cannot be written; the rest of it may be."""


@dataclass(frozen=True)
class NewCell:
    """A finished cell to be stored."""

    identity: CellIdentity
    plan: str | None
    options: RunOptions
    result: Mapping[str, Any]
    """The result's JSON."""
    records: bytes | Records | None = None
    """Its tensors, or the content of their file."""


def write_cell(cell: NewCell, folder: Path) -> Manifest:
    """Write every file of a cell into a new folder; an OSError leaves it half-written under its temporary name."""
    key, asked = cell.identity.key, asked_id(cell.options)
    folder.mkdir(parents=True)
    _write(folder / RESULT, json.dumps(cell.result, ensure_ascii=False, allow_nan=False).encode())
    _write_rows(folder, KeyedResult(key, asked, cell.identity.code, cell.options, cell.result))
    _write_records(cell, folder / RECORDS)
    manifest = Manifest.model_validate(
        {
            "key": key,
            "plan": cell.plan,
            "asked": asked,
            "options": {name: plain(value) for name, value in vars(cell.options).items()},
            "identity": asdict(cell.identity),
            "run": cell.result["provenance"]["run"],
            "files": notes_of(folder),
        }
    )
    _finish(folder, manifest)
    return manifest


def restore_cell(manifest: Manifest, result: str, records: Path | None, folder: Path) -> Manifest:
    """Write every file of a cell again, from its manifest and its result; raises `Damage` if they do not fit."""
    if hashlib.sha256(result.encode()).hexdigest() != manifest.files[RESULT].sha256:
        raise Damage(f"{RESULT} is not what was written (its sha256 differs)")
    try:
        options = RunOptions.make(**{name: value for name, value in manifest.options.items() if value is not None})
        if asked_id(manifest.options) != manifest.asked:
            raise Damage("its options are not those it was stored under")
        folder.mkdir(parents=True)
        _write(folder / RESULT, result.encode())
        code = str(manifest.identity["code"])
        _write_rows(folder, KeyedResult(manifest.key, manifest.asked, code, options, json.loads(result)))
    except (UserError, LookupError, TypeError, ValueError) as error:
        raise Damage(f"its rows cannot be made again ({error})") from error
    if records is not None:
        link(records, folder / RECORDS)
    restored = manifest.model_copy(update={"files": notes_of(folder)})
    _finish(folder, restored)
    return restored


def link(source: Path, target: Path) -> None:
    """The same file under a second name; a copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write_rows(folder: Path, cell: KeyedResult) -> None:
    for name, table in tables_of(cell).items():
        _write(folder / f"{name}.parquet", _parquet(table))


def _finish(folder: Path, manifest: Manifest) -> None:
    _write(folder / MANIFEST, (manifest.model_dump_json(by_alias=True, indent=1) + "\n").encode())
    sync(folder)


def sync(folder: Path) -> None:
    """Write every file of a folder to the disk, so that they survive a power cut after the folder is renamed."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _write_records(cell: NewCell, path: Path) -> None:
    try:
        if isinstance(cell.records, bytes):
            _write(path, cell.records)
        elif cell.records is not None:
            save_records(cell.records, path)
    except Exception as error:
        raise NoRecords(f"The records cannot be written ({error}).") from error


def _parquet(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    # A row or a few: statistics and dictionaries would be most of the file.
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, write_statistics=False)
    return cast(bytes, sink.getvalue().to_pybytes())


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)


ROWS = tuple(f"{table}.parquet" for table in TABLES)


def stamp_of(folder: str, names: Sequence[str] = (MANIFEST, RESULT, RECORDS, *ROWS)) -> str:
    """Sizes and times of a cell's files, and the time of the last file added; it changes when they do."""
    parts = [os.stat(folder).st_mtime_ns]  # noqa: PTH116 - a Path each is too slow for ten thousand folders
    for name in names:
        try:
            found = os.stat(f"{folder}/{name}")  # noqa: PTH116
        except FileNotFoundError:
            parts.append(-1)
        else:
            parts += (found.st_size, found.st_mtime_ns)
    return " ".join(map(str, parts))


def read_manifest(folder: Path) -> Manifest:
    """What a cell is; raises as `read_as`."""
    return read_as(Manifest, folder / MANIFEST)


def read_as(kind: type[Kind], path: Path) -> Kind:
    """The manifest in a file; raises `Damage` if it cannot be read, and a UserError if a later dualview wrote it."""
    try:
        return parse_as(kind, path.read_bytes(), path)
    except FileNotFoundError:
        raise Damage(f"{path.name} is missing") from None
    except OSError as error:
        raise Damage(f"{path.name} cannot be read ({error})") from error


def parse_as(kind: type[Kind], text: bytes | str, path: Path) -> Kind:
    """The same from its text, which was found at `path`."""
    known = kind.model_fields["schema_"].default
    try:
        content = json.loads(text)
        schema = content.get("schema")
    except (ValueError, AttributeError) as error:
        raise Damage(f"{path.name} cannot be read ({error})") from error
    if is_newer(schema, known):
        raise UserError(f"{path.parent} has schema {schema}, this dualview knows {known}; update dualview to use it.")
    if schema != known:
        raise Damage(f"{path.name} has schema {schema!r} instead of {known!r}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise Damage(f"{path.name}: {': '.join(first_problem(error))}") from error


def checked(folder: Path) -> Manifest:
    """The manifest of a cell that matches it; raises `Damage` that says what is wrong."""
    manifest = read_manifest(folder)
    if manifest.key != folder.name:
        raise Damage(f"{MANIFEST} is that of cell {manifest.key[:12]}")
    for name in (RESULT, *ROWS):
        if name not in manifest.files:
            raise Damage(f"{MANIFEST} does not list {name}")
    for name, note in manifest.files.items():
        check_file(folder / name, note)
    return manifest


def check_file(path: Path, note: FileNote) -> None:
    """Raise `Damage` if a file is not what its note says."""
    if (problem := note.problem(path)) is not None:
        raise Damage(problem)


def foreign_files(folder: Path, manifest: Manifest) -> list[Path]:
    """Files in a cell's folder that are not part of it."""
    return sorted(path for path in folder.iterdir() if path.name != MANIFEST and path.name not in manifest.files)


def is_newer(schema: object, known: str) -> bool:
    """Whether a schema is a later version of a known one.

    >>> is_newer("dualview.cell/10", "dualview.cell/9"), is_newer("something/10", "dualview.cell/9")
    (True, False)
    """
    name, _, number = str(schema).partition("/")
    known_name, _, known_number = known.partition("/")
    return name == known_name and number.isdecimal() and int(number) > int(known_number)
