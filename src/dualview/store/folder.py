"""A store's folder: finished cells, an index to find them, and the quarantine.

The cells' folders are the truth. The index and the packs are made from them, and made again when they are lost.
`repair`, `compaction` and `query` work on this class; `Store` puts all of it under one name.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from filelock import FileLock

from dualview.io.atomic import write_json
from dualview.io.errors import UserError
from dualview.options import RunOptions
from dualview.store.cell import (
    RECORDS,
    RESULT,
    Damage,
    Manifest,
    NewCell,
    checked,
    is_newer,
    read_manifest,
    stamp_of,
    write_cell,
)
from dualview.store.cell_key import asked_id
from dualview.store.index import Entry, Failure, Index, Unusable
from dualview.store.locks import Claim, take
from dualview.store.paths import Places

if TYPE_CHECKING:
    from dualview.comparison.result import Result
    from dualview.records import Records

SCHEMA = "dualview.store/1"


@dataclass(frozen=True)
class Problem:
    """Something in a store that is not as it should be, and what was done about it."""

    what: str
    why: str
    moved_to: str | None = None
    """Where in the store's quarantine it is now; None: it was left where it is."""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" + ("" if self.moved_to is None else f"; moved to {self.moved_to}")


@dataclass(frozen=True)
class Stored:
    """A cell's result under its key."""

    key: str
    result: Result


class StoreFolder:
    """A store opened for reading or, with `create`, for writing too (and made if it is not there)."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False) -> None:
        self.path = Path(path)
        self.places = Places.of(self.path)
        self.problems: list[Problem] = []
        """What was found amiss since the store was opened."""
        self._must_be_a_store(create)
        self.index = self._open_index(must_write=create)
        try:
            self.refresh()
        except OSError as error:
            self.index.close()
            if create:
                raise UserError(f"The store {self.path} cannot be written ({error}).") from error
            self.index = Index(None)  # no room to write down what is there; it can still be read
            self.refresh()

    def close(self) -> None:
        self.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def writable(self) -> bool:
        return self.index.path is not None

    # ----------------------------------------------------------------------------------------------------- opening

    def _must_be_a_store(self, create: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"The store {self.path} is a file; name a folder.")
        if not self.path.is_dir() and not create:
            raise UserError(f"There is no store {self.path}; `dualview sweep SPEC --store {self.path}` makes one.")
        marker, cells = self.places.marker, self.places.cells
        if not marker.exists() and not cells.is_dir() and (not create or not is_nothing(self.path)):
            raise UserError(self._no_store(create))
        why = _unknown(marker)
        if not create:
            self.problems += [Problem(marker.name, why)] if why else []
            return
        try:
            for folder in (cells, self.places.claims, self.places.unfinished):
                folder.mkdir(parents=True, exist_ok=True)
            if why and marker.exists():
                self.set_aside(marker, why)
        except OSError as error:
            raise UserError(f"The store {self.path} cannot be written ({error.strerror}).") from error
        if not marker.exists():
            write_json(marker, {"schema": SCHEMA})

    def _no_store(self, create: bool) -> str:
        if create:
            return f"{self.path} is not a store: it has no {self.places.marker.name}; name a store or an empty folder."
        why = "the folder is empty" if is_nothing(self.path) else f"it has no {self.places.marker.name}"
        return f"{self.path} is not a store: {why}; name a folder that `dualview sweep` wrote to."

    def _open_index(self, *, must_write: bool) -> Index:
        path = self.places.index
        try:
            with FileLock(self.path / f".{path.name}.lock"):  # one process at a time finds it damaged
                try:
                    return Index(path)
                except Unusable as error:
                    for part in sorted(self.path.glob(f"{path.name}*")):
                        self.set_aside(part, f"the index cannot be used ({error}); it is made again")
                    return Index(path)
        except OSError as error:
            if must_write:
                raise UserError(f"The store {self.path} cannot be written ({error}).") from error
            return Index(None)

    def refresh(self) -> None:
        """Bring the index up to date with the cells' folders: kills, copies and other machines go past it."""
        known, there = self.index.stamps(), set(self.places.listing().keys)
        gone = known.keys() - there
        if gone:
            self.index.remove(gone)
        found: list[Manifest] = []
        for key in sorted(there - known.keys()):
            try:
                found.append(checked(self.places.cell(key)))
            except Damage as error:
                self.problems.append(Problem(self.shown(self.places.cell(key)), str(error)))
        for manifest in sorted(found, key=lambda manifest: manifest.run.date):  # of equal options the last one answers
            with suppress(FileNotFoundError):  # set aside this very moment
                self.enter(manifest, manifest.plan, manifest.asked)

    def enter(self, manifest: Manifest, plan: str | None, asked: str) -> None:
        """Tell the index of a cell, by which plan it is found and which options it answers."""
        run = manifest.run
        stamp = stamp_of(os.fspath(self.places.cell(manifest.key)))
        entry = Entry(manifest.key, stamp, manifest.records, None, run.date, run.host, sum(run.seconds.values()))
        self.index.add(entry, plan, asked)

    # ----------------------------------------------------------------------------------------------------- writing

    def claim(self, options: RunOptions) -> Claim | None:
        """Hold a cell while it is computed; None if another process does."""
        return take(self.places.claims, asked_id(options))

    def has(self, key: str, *, records: bool = False) -> bool:
        """Whether a cell is there (with its tensors)."""
        entry = self.index.entry(key)
        if entry is None and self.places.cell(key).is_dir():  # another machine's, or one the index had no room for
            with suppress(Damage, OSError):
                manifest = checked(self.places.cell(key))
                self.enter(manifest, manifest.plan, manifest.asked)
                entry = self.index.entry(key)
        return entry is not None and (entry.records or not records)

    def put(self, cell: NewCell) -> bool:
        """Add a finished cell, whole or not at all; False if it was there already. The caller holds its claim."""
        key, asked = cell.identity.key, asked_id(cell.options)
        temporary = self.places.unfinished / asked
        put_back(self.places.replaced(asked), self.places.cell(key))
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            manifest = write_cell(cell, temporary)
            added = self._move_in(temporary, key, records=manifest.records)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # no room for the index: the cell is there, and found when it is read
            self.enter(manifest if added else self.manifest(key), cell.plan, asked)
        return added

    def _move_in(self, temporary: Path, key: str, *, records: bool) -> bool:
        final, replaced = self.places.cell(key), self.places.replaced(temporary.name)
        final.parent.mkdir(exist_ok=True)
        try:
            if final.is_dir():
                try:
                    if checked(final).records or not records:
                        return False
                    final.rename(replaced)
                except Damage as error:
                    self.set_aside(final, str(error))
            temporary.rename(final)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and final.is_dir():
                return False  # another process, under another name for the same thing, was faster
            raise
        finally:
            put_back(replaced, final)
        return True

    def set_aside(self, path: Path, why: str) -> None:
        """Move something to the quarantine, with a note that says why; nothing to do if another process just did."""
        shown = self.shown(path)
        place = self.places.quarantine / f"{path.name}.{secrets.token_hex(4)}"
        place.mkdir(parents=True)
        try:
            path.rename(place / path.name)
        except FileNotFoundError:
            place.rmdir()
            return
        (place / "why.txt").write_text(f"{shown}: {why}\n", encoding="utf-8")
        self.problems.append(Problem(shown, why, self.shown(place)))

    def fail(self, options: RunOptions, reason: str, run: dict[str, Any]) -> None:
        """Keep why a cell was given up; it is tried again by the next sweep."""
        asked = {field.name: getattr(options, field.name) for field in fields(options)}
        said = Failure(asked_id(options), json.dumps(asked, default=str), reason, json.dumps(run))
        with suppress(OSError):
            self.index.fail(said)

    # ----------------------------------------------------------------------------------------------------- reading

    def keys(self, *, current: bool = True) -> list[str]:
        """The keys of all cells; `current`: only those that answer what was asked last under the same options."""
        return sorted(set(self.index.current().values()) if current else self.index.stamps())

    def find(self, start: str) -> str:
        """The one key that begins so."""
        found = [key for key in self.index.stamps() if key.startswith(start)]
        if len(found) != 1:
            how_many = f"{len(found)} cells begin" if found else "No cell begins"
            raise UserError(f"{how_many} with {start!r} in {self.path}; see `dualview ls --store {self.path}`.")
        return found[0]

    def manifest(self, key: str) -> Manifest:
        """What a cell is, as it says itself."""
        try:
            return read_manifest(self.places.cell(key))
        except Damage as error:
            raise UserError(self._unreadable(key, error)) from error

    def result(self, key: str) -> Result:
        """A cell's result, exactly as the run gave it."""
        from dualview.comparison.result import Result

        try:
            return Result.load(self.places.cell(key) / RESULT)
        except (UserError, ValueError) as error:
            raise UserError(self._unreadable(key, error)) from error

    def results(self, *, keys: Iterable[str] | None = None, current: bool = True) -> Iterator[Stored]:
        """Every cell's result with its key, one after another."""
        for key in self.keys(current=current) if keys is None else keys:
            yield Stored(key, self.result(key))

    def records(self, key: str) -> Records | None:
        """A cell's tensors, if they were kept."""
        from dualview.records import load_records

        path = self.places.cell(key) / RECORDS
        return load_records(path) if path.is_file() else None

    def failures(self) -> list[Failure]:
        return self.index.failures()

    def shown(self, path: Path) -> str:
        """A path as seen from the store."""
        return str(path.relative_to(self.path))

    def _unreadable(self, key: str, error: Exception) -> str:
        where, why = self.shown(self.places.cell(key)), " ".join(str(error).split()).rstrip(".")
        return f"{where} cannot be read ({why}); run the sweep again, which sets it aside and computes it anew."


def is_nothing(path: Path) -> bool:
    """Whether a store may be made here: there is nothing yet, or an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _unknown(marker: Path) -> str | None:
    """Why a store's marker cannot be trusted; None if it can, and a refusal if a later dualview wrote it."""
    try:
        schema = json.loads(marker.read_bytes()).get("schema")
    except FileNotFoundError:
        return "it is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"it cannot be read ({error})"
    if is_newer(schema, SCHEMA):
        raise UserError(f"{marker} has schema {schema}, this dualview knows {SCHEMA}; update dualview to use it.")
    return None if schema == SCHEMA else f"it has schema {schema!r} instead of {SCHEMA!r}"


def put_back(replaced: Path, final: Path) -> None:
    """Settle the replacement of a cell: the old one goes, or goes back where the new one did not come."""
    if final.is_dir():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        with suppress(OSError):  # whatever is in the way, it is kept, and tried again by the next sweep
            final.parent.mkdir(exist_ok=True)
            replaced.rename(final)
