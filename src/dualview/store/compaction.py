"""Many cells' rows in a few large files, so that a query opens dozens of files and not tens of thousands.

A pack is a folder with one Parquet file per table that holds the rows of some hundred cells. It is written under a
temporary name, renamed, and only then entered in the index: a pack that is not in the index is removed.
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
from dualview.store.folder import StoreFolder, StoreProblem
from dualview.store.index import Entry, PackNote
from dualview.store.locks import locked
from dualview.store.tables import TABLES, TableName

AT_LEAST = 64
AT_MOST = 1000


def pack(store: StoreFolder, *, at_least: int = AT_LEAST) -> int:
    """Pack the cells that are in no pack yet, if there are enough of them; returns how many.

    Nothing is lost if it stops half-way or fails: the cells' own files remain.
    """
    if not store.writable:
        return 0
    with locked(store.paths.locks, f"pack{store.paths.own}") as ours:
        if not ours:
            return 0
        _remove_unnamed(store)
        loose = list(store.index.entries("pack IS NULL").values())
        if len(loose) < at_least:
            return 0
        return sum(_write(store, loose[start : start + AT_MOST]) for start in range(0, len(loose), AT_MOST))


def _write(store: StoreFolder, entries: Sequence[Entry]) -> int:
    """One pack of cells, without those that changed on disk: the next sweep checks them."""
    keys = [entry.key for entry in entries if _is_unchanged(store, entry)]
    if not keys:
        return 0
    name = secrets.token_hex(8)
    temporary, final = store.paths.packs / f".{name}", store.paths.packs / name
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
    except (duckdb.Error, LookupError):  # an unreadable file, or a cell set aside meanwhile: left for the next time
        shutil.rmtree(final, ignore_errors=True)
        return 0
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return len(keys)


def _is_unchanged(store: StoreFolder, entry: Entry) -> bool:
    try:
        return stamp_of(str(store.paths.cell(entry.key))) == entry.stamp
    except FileNotFoundError:
        return False


def read_files(files: Iterable[Path]) -> str:
    """Parquet files as a table of DuckDB; columns that only some of them have are null in the others."""
    return f"read_parquet([{', '.join(map(quoted, files))}], union_by_name = true)"


def quoted(path: Path) -> str:
    return "'" + str(path.absolute()).replace("'", "''") + "'"


def _remove_unnamed(store: StoreFolder) -> None:
    """Remove packs that dualview made and the index does not hold; other files stay."""
    kept = {note.pack for note in store.index.packs()} | {path.name for path in store.paths.strangers()}
    if store.paths.packs.is_dir():
        for folder in store.paths.packs.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def check_packs(store: StoreFolder) -> None:
    """Forget packs that changed on disk; their cells are read from their own files until they are packed again."""
    for note in store.index.packs():
        folder = store.paths.packs / note.pack
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
    """Cells in no pack with damaged files: listed among the store's problems, and not to be read."""
    found: set[str] = set()
    for entry in store.index.entries("pack IS NULL").values():
        folder = store.paths.cell(entry.key)
        if (why := _damage(store, entry, folder)) is not None:
            found.add(entry.key)
            problem = StoreProblem(store.shown(folder), why)
            if folder.is_dir() and problem not in store.problems:  # a missing one was set aside just now
                store.problems.append(problem)
    return found


def _damage(store: StoreFolder, entry: Entry, folder: Path) -> str | None:
    """What is wrong with a cell; its files are read only if their sizes or times changed."""
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
    """The Parquet files that hold every row of a table once, without the loose cells in `but`."""
    packs = [store.paths.packs / note.pack / f"{table}.parquet" for note in store.index.packs()]
    return packs + [own_file(store, key, table) for key in store.index.entries("pack IS NULL") if key not in but]


def own_file(store: StoreFolder, key: str, table: TableName) -> Path:
    return store.paths.cell(key) / f"{table}.parquet"
