"""Many cells' rows in a few large files, so that a query opens dozens of files and not tens of thousands.

A pack is a folder with one Parquet file for each table, holding the rows of some hundred cells. It is written under a
temporary name, renamed, and only then named in the index: a pack that the index does not name is nobody's, and goes.
"""

from __future__ import annotations

import importlib
import secrets
import shutil
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dualview.io.download import sha256_of
from dualview.io.errors import UserError
from dualview.store.cell import ROWS, Damage, checked, stamp_of
from dualview.store.cell_key import digest
from dualview.store.folder import Problem, StoreFolder
from dualview.store.index import Entry, PackNote
from dualview.store.locks import held
from dualview.store.tables import TABLES, TableName

AT_LEAST = 64
AT_MOST = 1000


def pack(store: StoreFolder, *, at_least: int = AT_LEAST) -> int:
    """Pack the cells that are in no pack yet, if there are enough of them; how many were packed.

    Nothing is lost if it stops half-way or cannot be done: the cells' own files remain.
    """
    if not store.writable:
        return 0
    with held(store.places.claims, f"pack{store.places.own}") as ours:
        if not ours:
            return 0
        _remove_unnamed(store)
        loose = [entry for entry in store.index.entries().values() if entry.pack is None]
        if len(loose) < at_least:
            return 0
        return sum(_write(store, loose[start : start + AT_MOST]) for start in range(0, len(loose), AT_MOST))


def _write(store: StoreFolder, entries: Sequence[Entry]) -> int:
    """One pack of cells; one whose files are not as they were is left to the next sweep, which looks into it."""
    keys = [entry.key for entry in entries if _is_as_it_was(store, entry)]
    if not keys:
        return 0
    name = secrets.token_hex(8)
    temporary, final = store.places.packs / f".{name}", store.places.packs / name
    duckdb: Any = importlib.import_module("duckdb")
    try:
        temporary.mkdir(parents=True)
        with duckdb.connect(":memory:") as connection:
            connection.execute("SET enable_progress_bar = false")
            for table in TABLES:
                rows = f"SELECT * FROM {read_files(own_file(store, key, table) for key in keys)} ORDER BY key"
                connection.execute(f"COPY ({rows}) TO {quoted(temporary / f'{table}.parquet')} (COMPRESSION zstd)")
        temporary.rename(final)
        store.index.add_pack(note_of(final), keys)
    except (duckdb.Error, LookupError):  # an unreadable file, or a cell set aside meanwhile: another time
        shutil.rmtree(final, ignore_errors=True)
        return 0
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return len(keys)


def _is_as_it_was(store: StoreFolder, entry: Entry) -> bool:
    try:
        return stamp_of(str(store.places.cell(entry.key))) == entry.stamp
    except FileNotFoundError:
        return False


def read_files(files: Iterable[Path]) -> str:
    """Parquet files as a table of DuckDB; columns that only some of them have are null in the others."""
    return f"read_parquet([{', '.join(map(quoted, files))}], union_by_name = true)"


def quoted(path: Path) -> str:
    return "'" + str(path.absolute()).replace("'", "''") + "'"


def _remove_unnamed(store: StoreFolder) -> None:
    """Remove packs of our making that nobody knows of; whatever else lies there is not ours to remove."""
    kept = {note.pack for note in store.index.packs()} | {path.name for path in store.places.strangers()}
    if store.places.packs.is_dir():
        for folder in store.places.packs.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def check_packs(store: StoreFolder) -> None:
    """Forget packs that are not what was written; their cells are read from their own files until they are packed."""
    for note in store.index.packs():
        folder = store.places.packs / note.pack
        try:
            if (stamp := _stamp(folder)) != note.stamp:
                if _sha256(folder) != note.sha256:
                    raise OSError("its files changed")
                store.index.restamp_pack(note.pack, stamp)
        except OSError:
            store.index.remove_pack(note.pack)


def note_of(folder: Path) -> PackNote:
    return PackNote(folder.name, _stamp(folder), _sha256(folder))


def _stamp(folder: Path) -> str:
    return stamp_of(str(folder), ROWS)


def _sha256(folder: Path) -> str:
    return digest(*(sha256_of(folder / name) for name in ROWS))


def damaged_loose(store: StoreFolder) -> set[str]:
    """Cells in no pack whose files are not what was written: named among the store's problems, and not to be read."""
    found: set[str] = set()
    for entry in store.index.entries().values():
        folder = store.places.cell(entry.key)
        if entry.pack is None and (why := _damage(store, entry, folder)) is not None:
            found.add(entry.key)
            problem = Problem(store.shown(folder), why)
            if folder.is_dir() and problem not in store.problems:  # one that has gone was set aside this very moment
                store.problems.append(problem)
    return found


def _damage(store: StoreFolder, entry: Entry, folder: Path) -> str | None:
    """What is wrong with a cell; it is looked into only if its files' sizes or times have changed."""
    try:
        stamp = stamp_of(str(folder))
        if stamp == entry.stamp:
            return None
        checked(folder)
    except (Damage, UserError) as error:
        return str(error)
    except OSError as error:
        return str(error.strerror or error)
    with suppress(OSError):
        store.index.restamp(entry.key, stamp)
    return None


def files_of(store: StoreFolder, table: TableName, *, but: Collection[str] = ()) -> list[Path]:
    """The Parquet files that hold every row of a table once, `but` those of some loose cells."""
    entries = store.index.entries()
    packs = sorted({entry.pack for entry in entries.values() if entry.pack is not None})
    loose = [own_file(store, key, table) for key, entry in entries.items() if entry.pack is None and key not in but]
    return [*(store.places.packs / pack / f"{table}.parquet" for pack in packs), *loose]


def own_file(store: StoreFolder, key: str, table: TableName) -> Path:
    return store.places.cell(key) / f"{table}.parquet"
