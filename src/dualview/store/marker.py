"""`store.json`, which says that a folder is a store, and of which kind."""

from __future__ import annotations

import json
from pathlib import Path

from dualview.io.atomic import write_json
from dualview.io.errors import UserError
from dualview.store.cell import is_newer
from dualview.store.packs.pack import is_pack
from dualview.store.paths import StorePaths

SCHEMA, PACKED = "dualview.store/1", "dualview.store/2"
"""The second is that of a store with packs, which an earlier dualview would not find."""


def must_be_a_store(paths: StorePaths, *, create: bool) -> str | None:
    """Refuse a folder that is no store (and, with `create`, cannot become one); why its marker cannot be trusted."""
    path, marker = paths.root, paths.marker.name
    if path.exists() and not path.is_dir():
        raise UserError(f"The store {path} is a file; name a folder.")
    if not path.is_dir() and not create:
        raise UserError(f"There is no store {path}; `dualview sweep SPEC --store {path}` makes one.")
    if not paths.marker.exists() and not paths.cells.is_dir() and (not create or not is_nothing(path)):
        if create:
            raise UserError(f"{path} is not a store: it has no {marker}; name a store or an empty folder.")
        why = "the folder is empty" if is_nothing(path) else f"it has no {marker}"
        raise UserError(f"{path} is not a store: {why}; name a folder that `dualview sweep` wrote to.")
    return _unknown(paths.marker)


def write_marker(paths: StorePaths) -> None:
    """Mark a folder as a store, unless it is."""
    if not paths.marker.exists():
        write_json(paths.marker, {"schema": PACKED if any(map(is_pack, paths.pack_folders())) else SCHEMA})


def mark_packed(paths: StorePaths) -> None:
    """Note that a store has packs."""
    if json.loads(paths.marker.read_bytes()).get("schema") != PACKED:
        write_json(paths.marker, {"schema": PACKED})


def is_nothing(path: Path) -> bool:
    """Whether a store may be made here: there is nothing yet, or an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _unknown(marker: Path) -> str | None:
    """Why a store's marker cannot be trusted, None if it can; a UserError if a later dualview wrote it."""
    try:
        schema = json.loads(marker.read_bytes()).get("schema")
    except FileNotFoundError:
        return "it is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"it cannot be read ({error})"
    if is_newer(schema, PACKED):
        raise UserError(f"{marker} has schema {schema}, this dualview knows {PACKED}; update dualview to use it.")
    return None if schema in (SCHEMA, PACKED) else f"it has schema {schema!r} instead of {SCHEMA!r}"
