"""Finding what is wrong with a store, and setting it aside so that it is computed again."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualview.runs import claims
from dualview.runs.cell import Damage, checked, foreign_files, stamp_of

if TYPE_CHECKING:
    from dualview.runs.store import Store


@dataclass(frozen=True)
class Problem:
    """Something in a store that is not as it should be, and what was done about it."""

    what: str
    why: str
    moved_to: str | None = None
    """Where in the store's quarantine it is now; None: it was left where it is."""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" + ("" if self.moved_to is None else f"; moved to {self.moved_to}")


def mend(store: Store) -> None:
    """Move what is damaged or foreign to the quarantine; what is good stays where it is.

    A cell whose files have the sizes and times they had is taken as it is; any other is compared with the sha256s of
    its manifest.
    """
    store.problems[:] = [problem for problem in store.problems if problem.moved_to is not None]
    _clear_unfinished(store)
    found, entries, cells = store.places.listing(), store.index.entries(), os.fspath(store.places.cells)
    for path in found.strangers:
        store.set_aside(path, "it is no part of a store")
    for key in found.keys:
        entry = entries.get(key)
        if entry is None or stamp_of(f"{cells}/{key[:2]}/{key}") != entry.stamp:
            _examine(store, key, known=entry is not None)
    store.problems += [Problem(path.name, "it is no part of a store; left alone") for path in store.places.foreign()]


def _examine(store: Store, key: str, *, known: bool) -> None:
    folder = store.places.cell(key)
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


def _clear_unfinished(store: Store) -> None:
    """Remove what a killed process left half-written; what a living one is writing is under its claim."""
    for path in store.places.unfinished.iterdir():
        claim = claims.take(store.places.claims, path.name)
        if claim is not None:
            with claim:
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True)
