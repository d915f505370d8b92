"""Finds what is wrong with a store, and sets it aside so that it is computed again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dualview.store.cell import Damage, checked, foreign_files, read_manifest, stamp_of
from dualview.store.folder import StoreFolder, StoreProblem, put_back
from dualview.store.locks import clear, locked


def repair(store: StoreFolder) -> None:
    """Move what is damaged or foreign to the quarantine; what is good stays where it is.

    A cell is compared with the sha256s of its manifest if the size or time of one of its files has changed.
    """
    store.problems[:] = [problem for problem in store.problems if problem.moved_to is not None]
    named = {note.pack for note in store.index.packs()}
    for path in store.paths.strangers():
        if path.parent != store.paths.packs or path.name not in named:
            store.set_aside(path, "it is no part of a store")
    _clear_unfinished(store)
    clear(store.paths.locks)
    found, stamps, cells = store.paths.cell_folders(), store.index.stamps(), os.fspath(store.paths.cells)
    for path in found.strangers:
        store.set_aside(path, "it is no part of a store")
    for key in found.keys:
        stamp = stamps.get(key)
        if stamp is None or stamp_of(f"{cells}/{key[:2]}/{key}") != stamp:
            _examine(store, key, known=stamp is not None)
    store.problems += [
        StoreProblem(path.name, "it is no part of a store; left alone") for path in store.paths.foreign()
    ]


def _examine(store: StoreFolder, key: str, *, known: bool) -> None:
    folder = store.paths.cell(key)
    try:
        manifest = checked(folder)
    except Damage as error:
        store.index.remove([key])
        store.set_aside(folder, f"{error}; it will be computed again")
        return
    for stranger in foreign_files(folder, manifest):
        store.set_aside(stranger, "it is no part of its cell")
    if known:
        store.index.restamp(key, stamp_of(os.fspath(folder)))
    else:
        store.enter(manifest, manifest.plan, manifest.asked)


def _clear_unfinished(store: StoreFolder) -> None:
    """Remove what a killed process left half-written; a running process holds the lock of what it writes."""
    for path in store.paths.unfinished.iterdir():
        with locked(store.paths.locks, store.paths.lock_name(path)) as ours:
            if not ours:
                continue
            if store.paths.is_replaced(path):
                _restore(store, path)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _restore(store: StoreFolder, path: Path) -> None:
    """Put back a cell if the process that was replacing it was killed before it finished."""
    try:
        put_back(path, store.paths.cell(read_manifest(path).key))
    except Damage as error:
        store.set_aside(path, str(error))
