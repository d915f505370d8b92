"""Moves finished cells from folders of their own into packs, and merges small packs into larger ones.

A new pack takes the loose cells, and every pack no larger than what it has already. So packs double, a cell is written
a few times in all, and a million cells are some hundred packs.

A pack is written under a temporary name, renamed, and entered in the index in one transaction; only then are the cells'
folders and the merged packs removed. A process that is killed before that leaves a second copy, never none.
"""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]

from dualview.io.errors import UserError
from dualview.io.hashing import FileNote, notes_of
from dualview.store.cell import (
    MANIFEST,
    RECORDS,
    RESULT,
    Damage,
    Manifest,
    checked,
    link,
    stamp_of,
    sync,
)
from dualview.store.cell_key import OPTIONS_VERSION
from dualview.store.folder import StoreFolder, StoreProblem
from dualview.store.index import Entry, PackNote
from dualview.store.locks import locked
from dualview.store.marker import mark_packed
from dualview.store.packs.pack import (
    FILES,
    FILES_SCHEMA,
    PACK,
    ROW_GROUP,
    PackManifest,
    earlier_ids,
    is_pack,
    note_of,
    read_pack,
    records_file,
    rows_of,
    texts_of,
)
from dualview.store.tables import TABLES, TableName

AT_LEAST = 64
AT_MOST = 10_000
BYTES_AT_MOST = 256 << 20
"""Results in a pack, before compression: packing holds a few times as much in memory."""


@dataclass
class _Gathered:
    """What goes into a new pack."""

    loose: dict[str, tuple[str, Manifest]] = field(default_factory=dict[str, tuple[str, Manifest]])
    """Stamp and manifest of each loose cell."""
    packs: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The keys that are taken from each pack."""
    cells: int = 0
    bytes: int = 0

    def takes(self, cells: int, size: int) -> bool:
        return not self.cells or (self.cells + cells <= AT_MOST and self.bytes + size <= BYTES_AT_MOST)


def pack(store: StoreFolder, *, at_least: int = AT_LEAST) -> int:
    """Pack the cells that have folders of their own, if there are enough of them; returns how many.

    Nothing is lost if it stops half-way or fails.
    """
    if not store.writable:
        return 0
    with locked(store.paths.locks, "pack") as ours:
        if not ours:
            return 0
        _remove_unfinished(store)
        loose = store.index.entries("pack IS NULL")
        if len(loose) < at_least:
            return 0
        return sum(_write(store, gathered) for gathered in _batches(store, loose.values()))


def _remove_unfinished(store: StoreFolder) -> None:
    """Remove packs that a killed process left half-written, and the copies of rows that an earlier dualview made."""
    foreign = {path.name for path in store.paths.strangers()}
    if store.paths.packs.is_dir():
        for folder in store.paths.packs.iterdir():
            if folder.name not in foreign and (folder.name.startswith(".") or not is_pack(folder)):
                shutil.rmtree(folder, ignore_errors=True)


def _batches(store: StoreFolder, entries: Iterable[Entry]) -> Iterator[_Gathered]:
    """The loose cells in parts of the size of a pack, without those that changed: the next sweep checks them."""
    gathered = _Gathered()
    for entry in entries:
        folder = store.paths.cell(entry.key)
        try:
            if stamp_of(str(folder)) != entry.stamp:
                continue
            manifest = checked(folder)
        except (Damage, OSError):
            continue
        size = manifest.files[RESULT].size
        if not gathered.takes(1, size):
            yield gathered
            gathered = _Gathered()
        gathered.loose[entry.key] = entry.stamp, manifest
        gathered.cells, gathered.bytes = gathered.cells + 1, gathered.bytes + size
    if gathered.cells:
        yield gathered


def _absorb(store: StoreFolder, gathered: _Gathered) -> None:
    """Add the packs that are no larger than what is gathered, the smallest first."""
    ghosts = store.index.ghosts()
    for note in sorted(store.index.packs(), key=lambda note: (note.cells, note.pack)):
        if note.cells > gathered.cells or not gathered.takes(note.cells, note.bytes):
            break
        gone = set(ghosts.get(note.pack, ()))
        gathered.packs[note.pack] = [row.key for row in rows_of(store.paths.packs / note.pack) if row.key not in gone]
        gathered.cells += len(gathered.packs[note.pack])
        gathered.bytes += note.bytes


def _write(store: StoreFolder, gathered: _Gathered) -> int:
    """Write a pack, enter it, and remove what it replaces; returns how many loose cells it took."""
    name = secrets.token_hex(8)
    temporary, final = store.paths.packs / f".{name}", store.paths.packs / name
    duckdb: Any = importlib.import_module("duckdb")
    try:
        _absorb(store, gathered)
        temporary.mkdir(parents=True)
        manifest = _fill(store, gathered, temporary)
        mark_packed(store.paths)
        temporary.rename(final)
        _sync_folder(store.paths.packs)
        stamps = {key: stamp for key, (stamp, _) in gathered.loose.items()}
        try:
            store.index.replace_packs(note_of(final, manifest), stamps, gathered.packs)
        except Exception:
            shutil.rmtree(final, ignore_errors=True)
            raise
    except (duckdb.Error, pa.ArrowException, LookupError, Damage):  # a cell or a pack changed: left for the next time
        return 0
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for key, stamp in stamps.items():
        store.remove_packed(key, stamp)
    for each in gathered.packs:
        shutil.rmtree(store.paths.packs / each, ignore_errors=True)
    return len(stamps)


def _sync_folder(folder: Path) -> None:
    """Make a rename in a folder survive a power cut, where the system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _fill(store: StoreFolder, gathered: _Gathered, folder: Path) -> PackManifest:
    """Write every file of a pack."""
    duckdb: Any = importlib.import_module("duckdb")
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET enable_progress_bar = false")
        for table in TABLES:
            whole, partly = packed(store, gathered.packs, f"{table}.parquet")
            rows = union([own_file(store, key, table) for key in gathered.loose] + whole, partly)
            target = quoted(folder / f"{table}.parquet")
            connection.execute(f"COPY (SELECT * FROM ({rows}) ORDER BY key) TO {target} (COMPRESSION zstd)")
    with pq.ParquetWriter(folder / FILES, FILES_SCHEMA, compression="zstd") as writer:
        for part in _texts(store, gathered):
            writer.write_table(pa.Table.from_pylist(part, schema=FILES_SCHEMA), row_group_size=ROW_GROUP)
    notes = notes_of(folder)
    return finish_pack(folder, gathered.cells, gathered.bytes, {**notes, **_link_records(store, gathered, folder)})


def finish_pack(folder: Path, cells: int, size: int, files: Mapping[str, FileNote]) -> PackManifest:
    """Write a pack's manifest and everything to the disk."""
    manifest = PackManifest.model_validate({"cells": cells, "bytes": size, "options": OPTIONS_VERSION, "files": files})
    (folder / PACK).write_text(manifest.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
    sync(folder)
    return manifest


def packed(store: StoreFolder, packs: Iterable[str], name: str) -> tuple[list[Path], dict[Path, list[str]]]:
    """A file of some packs: where all of it is read, and where all but some keys are."""
    ghosts, files = store.index.ghosts(), {pack: store.paths.packs / pack / name for pack in packs}
    whole = [file for pack, file in files.items() if pack not in ghosts]
    return whole, {file: ghosts[pack] for pack, file in files.items() if pack in ghosts}


def union(files: Sequence[Path], partly: Mapping[Path, Sequence[str]]) -> str:
    """A SELECT of the rows of Parquet files, and of further ones without some keys."""
    parts = [f"SELECT * FROM {read_files(files)}"] if files else []
    for file, gone in partly.items():
        listed = ", ".join(f"'{key}'" for key in gone)
        parts.append(f"SELECT * FROM {read_files([file])} WHERE key NOT IN ({listed})")
    return " UNION ALL BY NAME ".join(parts)


def _texts(store: StoreFolder, gathered: _Gathered) -> Iterator[list[dict[str, Any]]]:
    """The rows of `files.parquet`, sorted by key, a row group at a time."""
    place: dict[str, str | None] = dict.fromkeys(gathered.loose)
    for name, keys in gathered.packs.items():
        place.update(dict.fromkeys(keys, name))
    earlier = {key: now for name in gathered.packs for key, _, now in earlier_ids(store.paths.packs / name)}
    ordered = sorted(place)
    for start in range(0, len(ordered), ROW_GROUP):
        part = ordered[start : start + ROW_GROUP]
        found = {key: _loose_row(store, gathered.loose[key][1]) for key in part if place[key] is None}
        for name in {place[key] for key in part} - {None}:
            keys = [key for key in part if place[key] == name]
            found |= texts_of(store.paths.packs / str(name), keys, *FILES_SCHEMA.names[1:])
            for key in keys:
                if (now := earlier.get(key)) is not None:
                    found[key]["asked"] = now
        if len(found) != len(part):
            raise LookupError("a pack lacks some of its cells")
        yield [found[key] for key in part]


def _loose_row(store: StoreFolder, manifest: Manifest) -> dict[str, Any]:
    folder, run = store.paths.cell(manifest.key), manifest.run
    return {
        "key": manifest.key,
        "plan": manifest.plan,
        "asked": manifest.answers,
        "records": manifest.records,
        "date": run.date,
        "host": run.host,
        "seconds": sum(run.seconds.values()),
        "manifest": (folder / MANIFEST).read_text(encoding="utf-8"),
        "result": (folder / RESULT).read_text(encoding="utf-8"),
    }


def _link_records(store: StoreFolder, gathered: _Gathered, folder: Path) -> dict[str, FileNote]:
    """Link the cells' tensors into a pack; their hashes are known already."""
    found: dict[str, FileNote] = {}
    for key, (_, manifest) in gathered.loose.items():
        if manifest.records:
            link(store.paths.cell(key) / RECORDS, target := records_file(folder, key))
            found[target.name] = manifest.files[RECORDS]
    for name, keys in gathered.packs.items():
        notes = read_pack(store.paths.packs / name).files
        for file in (records_file(folder, key) for key in keys):
            if file.name in notes:
                link(store.paths.packs / name / file.name, file)
                found[file.name] = notes[file.name]
    return found


def read_files(files: Iterable[Path]) -> str:
    """Parquet files as a table of DuckDB; columns that only some of them have are null in the others."""
    return f"read_parquet([{', '.join(map(quoted, files))}], union_by_name = true)"


def quoted(path: Path) -> str:
    return "'" + str(path.absolute()).replace("'", "''") + "'"


def damaged_loose(store: StoreFolder) -> set[str]:
    """Cells in no pack with damaged files: listed among the store's problems, and not to be read."""
    found: set[str] = set()
    for key, stamp in store.index.loose().items():
        folder = store.paths.cell(key)
        if (why := _damage(store, key, stamp)) is not None:
            found.add(key)
            problem = StoreProblem(store.shown(folder), why)
            if folder.is_dir() and problem not in store.problems:  # a missing one was packed or set aside just now
                store.problems.append(problem)
    return found


def _damage(store: StoreFolder, key: str, known: str) -> str | None:
    """What is wrong with a cell; its files are read only if their sizes or times changed."""
    folder = store.paths.cell(key)
    try:
        stamp = stamp_of(str(folder))
        if stamp == known:
            return None
        checked(folder)
    except (Damage, UserError) as error:
        return str(error)
    except OSError as error:
        return str(error.strerror or error)
    with suppress(OSError):
        store.index.restamp(key, stamp)
    return None


def sources(
    store: StoreFolder, table: TableName, *, but: Collection[str], packs: Sequence[PackNote]
) -> tuple[list[Path], dict[Path, list[str]]]:
    """The Parquet files that hold a table without the loose cells in `but`: whole ones, and packs less some keys."""
    whole, partly = packed(store, [note.pack for note in packs if note.cells], f"{table}.parquet")
    return whole + [own_file(store, key, table) for key in store.index.loose() if key not in but], partly


def own_file(store: StoreFolder, key: str, table: TableName) -> Path:
    return store.paths.cell(key) / f"{table}.parquet"
