"""Finds what is wrong with a store, and sets it aside so that it is computed again.

A damaged pack is taken apart: every cell with a good result gets a folder of its own again, with rows made from the
result, so a damaged file costs at most the cells whose results it holds.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]

from dualview.io.errors import UserError
from dualview.store.cell import (
    MANIFEST,
    RECORDS,
    Damage,
    Manifest,
    check_file,
    checked,
    foreign_files,
    parse_as,
    read_manifest,
    restore_cell,
    stamp_of,
)
from dualview.store.folder import StoreFolder, StoreProblem, put_back
from dualview.store.index import PackNote
from dualview.store.locks import clear, locked
from dualview.store.packs.pack import FILES, checked_pack, is_pack, pack_stamp, records_file


def repair(store: StoreFolder) -> None:
    """Move what is damaged or foreign to the quarantine; what is good stays where it is.

    A cell is compared with the sha256s of its manifest if the size or time of one of its files has changed.
    """
    store.problems[:] = [problem for problem in store.problems if problem.moved_to is not None]
    for path in store.paths.strangers():
        store.set_aside(path, "it is not part of a store")
    _clear_unfinished(store)
    clear(store.paths.locks)
    check_packs(store)
    known = {note.pack for note in store.index.packs()}
    for folder in store.paths.pack_folders():
        if folder.name not in known and is_pack(folder):
            _check_pack(store, folder)
    (keys, strangers), stamps, cells = store.paths.cell_folders(), store.index.loose(), os.fspath(store.paths.cells)
    for path in strangers:
        store.set_aside(path, "it is not part of a store")
    for key in keys:
        stamp = stamps.get(key)
        if stamp is None or stamp_of(f"{cells}/{key[:2]}/{key}") != stamp:
            _examine(store, key, known=stamp is not None)
    store.problems += [
        StoreProblem(path.name, "it is not part of a store; left alone") for path in store.paths.foreign()
    ]


def _examine(store: StoreFolder, key: str, *, known: bool) -> None:
    folder = store.paths.cell(key)
    try:
        manifest = checked(folder)
        if store.is_packed(key, records=manifest.records):  # its process was killed before it removed the folder
            store.remove_packed(key, stamp_of(os.fspath(folder)))
            return
    except Damage as error:
        if not folder.is_dir():  # packed just now
            return
        store.index.remove([key])
        store.set_aside(folder, f"{error}; it will be computed again")
        return
    for stranger in foreign_files(folder, manifest):
        store.set_aside(stranger, "it is not part of its cell")
    if known:
        store.index.restamp(key, stamp_of(os.fspath(folder)))
    else:
        store.enter(manifest)


def check_packs(store: StoreFolder) -> list[PackNote]:
    """The packs that are what was written; others are taken apart, or left out where the store cannot be written."""
    good: list[PackNote] = []
    for note in store.index.packs():
        folder = store.paths.packs / note.pack
        try:
            stamp = pack_stamp(folder)
        except OSError:  # merged by another process just now
            continue
        if stamp == note.stamp or _check_pack(store, folder):
            good.append(note)
    return good


def _check_pack(store: StoreFolder, folder: Path) -> bool:
    """Whether a pack is what was written, by the sha256s of its files; if not, it is taken apart."""
    try:
        stamp = pack_stamp(folder)
        checked_pack(folder)
        store.index.restamp_pack(folder.name, stamp)
        return True
    except (Damage, OSError) as error:
        if not folder.is_dir():
            return False
        if store.writable:
            _take_apart(store, folder, str(error))
        else:
            problem = StoreProblem(store.shown(folder), str(error))
            store.problems += [] if problem in store.problems else [problem]
        return False


def _take_apart(store: StoreFolder, folder: Path, why: str) -> None:
    """Give the cells of a damaged pack folders of their own, and move the pack to the quarantine."""
    with locked(store.paths.locks, "pack") as ours:
        if not ours:
            store.problems.append(StoreProblem(store.shown(folder), f"{why}; another process is packing"))
            return
        ghosts = set(store.index.ghosts().get(folder.name, ()))
        restored: list[Manifest] = []
        for row in _readable(folder):
            if row["key"] not in ghosts and (manifest := _restored(store, folder, row)) is not None:
                restored.append(manifest)
        lost = len(store.index.keys("pack = ?", folder.name)) - len(restored)
        what = (
            f"{lost} of its cells will be computed again" if lost > 0 else "its cells have folders of their own again"
        )
        store.set_aside(folder, f"{why}; {what}")
        store.index.remove_pack(folder.name)
        for manifest in sorted(restored, key=lambda manifest: manifest.run.date):
            store.enter(manifest)


def _readable(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of `files.parquet` that can be read, row group by row group."""
    try:
        file: Any = pq.ParquetFile(folder / FILES)
    except (OSError, pa.ArrowException):
        return
    for number in range(file.num_row_groups):
        try:
            yield from file.read_row_group(number, columns=["key", "manifest", "result"]).to_pylist()
        except (OSError, ValueError, pa.ArrowException):
            continue


def _restored(store: StoreFolder, folder: Path, row: dict[str, Any]) -> Manifest | None:
    """Write a cell of a pack to a folder of its own, unless it is there; None if its result is damaged."""
    key = row["key"]
    final, temporary = store.paths.cell(key), store.paths.packs / f".{secrets.token_hex(8)}"
    try:
        if final.is_dir():  # left by a process that was killed
            return checked(final)
        manifest = parse_as(Manifest, row["manifest"], folder / MANIFEST)
        records = _good_records(folder, manifest)
        restored = restore_cell(manifest, row["result"], records, temporary)
        final.parent.mkdir(exist_ok=True)
        temporary.rename(final)
        return restored
    except (Damage, UserError):
        return None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _good_records(folder: Path, manifest: Manifest) -> Path | None:
    path = records_file(folder, manifest.key)
    try:
        if manifest.records:
            check_file(path, manifest.files[RECORDS])
            return path
    except Damage:
        pass
    return None


def _clear_unfinished(store: StoreFolder) -> None:
    """Remove what a killed process left half-written; a running process holds the lock of what it writes."""
    for path in store.paths.unfinished.iterdir():
        name = store.paths.lock_name(path)
        # A cell that was being removed because it is in a pack now is named by its key, and "pack" is its lock.
        packed = store.paths.is_replaced(path) and store.index.entry(name) is not None
        with locked(store.paths.locks, "pack" if packed else name) as ours:
            if not ours:
                continue
            if store.paths.is_replaced(path):
                _restore(store, path)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _restore(store: StoreFolder, path: Path) -> None:
    """Put back a cell if the process that was replacing or packing it was killed before it finished."""
    try:
        manifest = read_manifest(path)
    except Damage as error:
        if store.is_packed(store.paths.lock_name(path), records=False):
            shutil.rmtree(path, ignore_errors=True)
        else:
            store.set_aside(path, str(error))
        return
    if store.is_packed(manifest.key, records=manifest.records):
        shutil.rmtree(path, ignore_errors=True)
    else:
        put_back(path, store.paths.cell(manifest.key))
