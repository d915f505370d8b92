"""A pack: some thousand finished cells in one folder of a few files, in place of a folder for each cell.

    pack.json              the number of cells, and the size and sha256 of every other file
    files.parquet          a row for each cell: its key, what the index holds about it, and the exact text of its
                           manifest.json and result.json
    cells.parquet          the rows of all cells; layers, queries and controls.parquet: their further rows
    KEY.safetensors        a cell's tensors, if it has them

Every table is sorted by key in small row groups, so one cell is read without reading the others. A pack never changes:
a cell that is stored again leaves a ghost in its pack, and merging packs makes a new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]
from pydantic import BaseModel, ConfigDict, Field

from dualview.io.hashing import FileNote, digest
from dualview.store.cell import ROWS, Damage, check_file, read_as
from dualview.store.cell_key import OPTIONS_VERSION, asked_now
from dualview.store.index import Entry, PackNote

SCHEMA = "dualview.pack/1"
PACK, FILES = "pack.json", "files.parquet"
ROW_GROUP = 256
"""Cells in a row group of `files.parquet`."""
_TEXT = pa.string()
FILES_SCHEMA = pa.schema(
    [
        *(pa.field(name, _TEXT) for name in ("key", "plan", "asked")),
        ("records", pa.bool_()),
        *(pa.field(name, _TEXT) for name in ("date", "host")),
        ("seconds", pa.float64()),
        *(pa.field(name, _TEXT) for name in ("manifest", "result")),
    ]
)
_ABOUT = FILES_SCHEMA.names[:-2]


class PackManifest(BaseModel):
    """What a pack's files must be."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    schema_: str = Field(SCHEMA, alias="schema")
    cells: int
    bytes: int
    """Of all results, before compression."""
    options: int = 0
    """The `OPTIONS_VERSION` of the ids in `asked`."""
    files: dict[str, FileNote]


def records_file(folder: Path, key: str) -> Path:
    return folder / f"{key}.safetensors"


def is_pack(folder: Path) -> bool:
    """Whether a folder holds cells; packs of an earlier dualview held only copies of their rows."""
    return (folder / PACK).exists() or (folder / FILES).exists()


def read_pack(folder: Path) -> PackManifest:
    """A pack's manifest; raises `Damage` if it cannot be read, and a UserError if a later dualview wrote it."""
    found = read_as(PackManifest, folder / PACK)
    if any(name not in found.files for name in (FILES, *ROWS)):
        raise Damage(f"{PACK} is not that of a pack")
    return found


def checked_pack(folder: Path) -> PackManifest:
    """The manifest of a pack that matches it; raises `Damage` that says what is wrong."""
    found = read_pack(folder)
    for name, note in found.files.items():
        check_file(folder / name, note)
    return found


def note_of(folder: Path, manifest: PackManifest) -> PackNote:
    """What the index holds about a pack."""
    return PackNote(folder.name, pack_stamp(folder), manifest.cells, manifest.bytes)


def pack_stamp(folder: Path) -> str:
    """Sizes and times of a pack's files; it changes when they do."""
    with os.scandir(folder) as files:
        found = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return digest(*(f"{name} {size} {time}" for name, size, time in found))


def rows_of(folder: Path) -> Iterator[Entry]:
    """What the index holds about each cell of a pack, sorted by key."""
    for batch in pq.ParquetFile(folder / FILES).iter_batches(columns=_ABOUT):
        for row in batch.to_pylist():
            yield Entry(stamp="", pack=folder.name, **row)


def earlier_ids(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Cells whose options have another id today than when they were packed: their key and both ids."""
    if read_pack(folder).options == OPTIONS_VERSION:
        return
    for batch in pq.ParquetFile(folder / FILES).iter_batches(columns=["key", "asked", "manifest"]):
        for row in batch.to_pylist():
            now = asked_now(json.loads(row["manifest"])["options"], row["asked"])
            if now != row["asked"]:
                yield row["key"], row["asked"], now


def texts_of(folder: Path, keys: Sequence[str], *columns: str) -> dict[str, dict[str, Any]]:
    """Columns of `files.parquet` of some cells, by key; reads only the row groups that may hold them."""
    try:
        found = pq.read_table(folder / FILES, columns=["key", *columns], filters=[("key", "in", list(keys))])
    except (OSError, pa.ArrowException) as error:
        raise Damage(f"{folder.name}/{FILES} cannot be read ({error})") from error
    return {row["key"]: row for row in found.to_pylist()}
