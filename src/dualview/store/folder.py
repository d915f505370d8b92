"""A store's folder: finished cells, an index to find them, and the quarantine.

    store.json             what it is
    cells/KEY[:2]/KEY/     one finished cell each, until it is packed (`cell`)
    packs/NAME/            some thousand finished cells each (`packs`)
    index.sqlite           where each cell is, and which cell answers which options (`index`)
    claims/                a lock for each cell that is being computed (`locks`)
    unfinished/            cells that are being written
    quarantine/            what was damaged or foreign, each with a note

A new cell gets a folder of its own: any process writes it whole or not at all, by one rename. A million folders are
seven million files, so every thousand cells (and before a query that would open many files) the folders are moved into
packs. Each cell is in one place, its folder or a pack. These are the truth: the index is made from them, and made again
if it is lost. A store of an earlier dualview has folders only; the next sweep packs them.

`repair`, `compaction` and `query` work on this class; `Store` joins them.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from filelock import FileLock
from pydantic import ValidationError

from dualview.io.errors import UserError, first_problem
from dualview.options import RunOptions
from dualview.store.cell import (
    MANIFEST,
    RECORDS,
    Damage,
    Manifest,
    NewCell,
    checked,
    parse_as,
    read_manifest,
    stamp_of,
    write_cell,
)
from dualview.store.cell_key import OPTIONS_VERSION, asked_id
from dualview.store.index import Entry, Failure, Index, Unusable
from dualview.store.locks import CellLock, acquire
from dualview.store.marker import must_be_a_store, write_marker
from dualview.store.packs.pack import checked_pack, earlier_ids, is_pack, note_of, records_file, rows_of, texts_of
from dualview.store.paths import StorePaths

if TYPE_CHECKING:
    from dualview.comparison.result import Result
    from dualview.records import Records

_RESULTS_AT_ONCE = 1000


@dataclass(frozen=True)
class StoreProblem:
    """Something wrong in a store, and what was done about it."""

    what: str
    why: str
    moved_to: str | None = None
    """Its place in the store's quarantine; None: it stays where it is."""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" + ("" if self.moved_to is None else f"; moved to {self.moved_to}")


@dataclass(frozen=True)
class Stored:
    """A cell's result and its key."""

    key: str
    result: Result


class StoreFolder:
    """A store opened for reading or, with `create`, for writing too (and made if it is not there)."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False) -> None:
        self.path = Path(path)
        self.paths = StorePaths.of(self.path)
        self.problems: list[StoreProblem] = []
        """What was found wrong since the store was opened."""
        self._open_folder(create)
        self.index = self._open_index(must_write=create)
        try:
            self.refresh()
        except OSError as error:
            self.index.close()
            if create:
                raise UserError(f"The store {self.path} cannot be written ({error}).") from error
            self.index = Index(None)  # no room for an index on disk; the cells can still be read
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

    def _open_folder(self, create: bool) -> None:
        why, marker = must_be_a_store(self.paths, create=create), self.paths.marker
        if not create:
            self.problems += [StoreProblem(marker.name, why)] if why else []
            return
        try:
            for folder in (self.paths.cells, self.paths.locks, self.paths.unfinished):
                folder.mkdir(parents=True, exist_ok=True)
            if why and marker.exists():
                self.set_aside(marker, why)
        except OSError as error:
            raise UserError(f"The store {self.path} cannot be written ({error.strerror}).") from error
        write_marker(self.paths)

    def _open_index(self, *, must_write: bool) -> Index:
        path = self.paths.index
        try:
            with FileLock(self.path / f".{path.name}.lock"):  # one process at a time finds it damaged
                try:
                    return Index(path, check=must_write)
                except Unusable as error:
                    for part in sorted(self.path.glob(f"{path.name}*")):
                        self.set_aside(part, f"the index cannot be used ({error}); it is made again")
                    return Index(path)
        except OSError as error:
            if must_write:
                raise UserError(f"The store {self.path} cannot be written ({error}).") from error
            return Index(None)

    def refresh(self) -> None:
        """Bring the index up to date with the cells and packs, which kills, copies and other machines change."""
        self._refresh_packs()
        known, there = self.index.loose(), set(self.paths.cell_folders()[0])
        gone = known.keys() - there
        if gone:
            self.index.remove(gone)
        found: list[Manifest] = []
        for key in sorted(there - known.keys()):
            try:
                manifest = checked(self.paths.cell(key))
                found += [] if self.is_packed(key, records=manifest.records) else [manifest]
            except Damage as error:
                if self.paths.cell(key).is_dir():  # or it was packed just now
                    self.problems.append(StoreProblem(self.shown(self.paths.cell(key)), str(error)))
        for manifest in sorted(found, key=lambda manifest: manifest.run.date):  # the last of equal options is current
            with suppress(FileNotFoundError):  # another process set it aside just now
                self.enter(manifest)
        if self.index.options_version != OPTIONS_VERSION:
            self._renew_ids()

    def _renew_ids(self) -> None:
        """Make cells that a dualview with fewer options stored answer today's, where no later cell does."""
        for note in self.index.packs():
            with suppress(Damage, OSError):  # a damaged pack is found by the next check
                self.index.renew(earlier_ids(self.paths.packs / note.pack))
        loose: list[Manifest] = []
        for key in self.index.loose():
            with suppress(Damage, OSError):
                loose.append(read_manifest(self.paths.cell(key)))
        self.index.renew([(each.key, each.asked, each.answers) for each in loose if each.answers != each.asked])
        self.index.options_version = OPTIONS_VERSION

    def _refresh_packs(self) -> None:
        known = {note.pack for note in self.index.packs()}
        there = {folder.name: folder for folder in self.paths.pack_folders() if folder.name in known or is_pack(folder)}
        for name in sorted(there.keys() - known):
            try:
                note = note_of(there[name], checked_pack(there[name]))
                self.index.enter_pack(note, list(rows_of(there[name])), self._is_better_packed)
            except (Damage, FileNotFoundError) as error:
                if there[name].is_dir():  # or it was merged just now
                    self.problems.append(StoreProblem(self.shown(there[name]), str(error)))
        for name in sorted(known - there.keys()):
            self.index.remove_pack(name)

    def _is_better_packed(self, known: Entry, records: bool) -> bool:
        """Whether a cell that is found in a further place is to be read from there."""
        place = self.paths.cell(known.key) if known.pack is None else self.paths.packs / known.pack
        return not place.is_dir() or (records and not known.records)

    def is_packed(self, key: str, *, records: bool) -> bool:
        """Whether a pack holds a cell, with its tensors if they are wanted."""
        entry = self.index.entry(key)
        return entry is not None and entry.pack is not None and (entry.records or not records)

    def enter(self, manifest: Manifest, plan: str | None = None, asked: str | None = None) -> None:
        """Enter a cell in the index, with the plan that finds it and the options it answers, by default its own."""
        run = manifest.run
        stamp = stamp_of(os.fspath(self.paths.cell(manifest.key)))
        found = (plan or manifest.plan, asked or manifest.answers)
        seconds = sum(run.seconds.values())
        self.index.add(Entry(manifest.key, stamp, manifest.records, None, run.date, run.host, seconds, *found))

    # ----------------------------------------------------------------------------------------------------- writing

    def lock(self, options: RunOptions) -> CellLock | None:
        """Lock a cell while it is computed; None if another process holds it."""
        return acquire(self.paths.locks, asked_id(options))

    def has(self, key: str, *, records: bool = False) -> bool:
        """Whether a cell is there (with its tensors)."""
        entry = self.index.entry(key)
        if entry is None and self.paths.cell(key).is_dir():  # another machine's, or not indexed for lack of room
            with suppress(Damage, OSError):
                manifest = checked(self.paths.cell(key))
                self.enter(manifest)
                entry = self.index.entry(key)
        return entry is not None and (entry.records or not records)

    def put(self, cell: NewCell) -> bool:
        """Add a finished cell, whole or not at all; False if it was there already. The caller holds its lock."""
        key, asked = cell.identity.key, asked_id(cell.options)
        if self.is_packed(key, records=cell.records is not None):
            self.index.remember(cell.plan, asked, key)
            return False
        temporary = self.paths.unfinished / asked
        put_back(self.paths.replaced(asked), self.paths.cell(key))
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            manifest = write_cell(cell, temporary)
            added = self._move_in(temporary, key, records=manifest.records)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # no room for the index: the cell is there, and the next reader finds it
            self.enter(manifest if added else self.manifest(key), cell.plan, asked)
        return added

    def _move_in(self, temporary: Path, key: str, *, records: bool) -> bool:
        final, replaced = self.paths.cell(key), self.paths.replaced(temporary.name)
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
                return False  # another process wrote the same cell, under other options
            raise
        finally:
            put_back(replaced, final)
        return True

    def remove_packed(self, key: str, stamp: str) -> None:
        """Remove the folder of a cell that is in a pack now, unless it changed since it was packed."""
        final, aside = self.paths.cell(key), self.paths.replaced(key)
        with suppress(OSError):  # what stays is removed by the next sweep
            final.rename(aside)  # first, so that what is checked is what is removed
            if stamp_of(os.fspath(aside)) == stamp:
                shutil.rmtree(aside)
            else:
                put_back(aside, final)

    def set_aside(self, path: Path, why: str) -> None:
        """Move something to the quarantine, with a note that says why, unless another process just did."""
        shown = self.shown(path)
        place = self.paths.quarantine / f"{path.name}.{secrets.token_hex(4)}"
        place.mkdir(parents=True)
        try:
            path.rename(place / path.name)
        except FileNotFoundError:
            place.rmdir()
            return
        (place / "why.txt").write_text(f"{shown}: {why}\n", encoding="utf-8")
        self.problems.append(StoreProblem(shown, why, self.shown(place)))

    def fail(self, options: RunOptions, reason: str, run: dict[str, Any]) -> None:
        """Note why a cell failed; the next sweep tries it again."""
        asked = json.dumps(vars(options), default=str)
        with suppress(OSError):
            self.index.fail(Failure(asked_id(options), asked, reason, json.dumps(run)))

    # ----------------------------------------------------------------------------------------------------- reading

    def keys(self, *, current: bool = True) -> list[str]:
        """The keys of all cells; `current`: only the latest for each set of options."""
        return self.index.keys("answers > 0" if current else "TRUE")

    def find(self, start: str) -> str:
        """The one key that begins with `start`."""
        found = self.index.keys("key >= ? AND key < ?", start, f"{start}g")  # g: after every hexadecimal digit
        if len(found) != 1:
            how_many = f"{len(found)} cells begin" if found else "No cell begins"
            raise UserError(f"{how_many} with {start!r} in {self.path}; see `dualview ls --store {self.path}`.")
        return found[0]

    def manifest(self, key: str) -> Manifest:
        """What a cell is, by its manifest."""
        try:
            return parse_as(Manifest, self._text(key, "manifest"), self._place(key) / MANIFEST)
        except Damage as error:
            raise UserError(self._unreadable(key, str(error))) from error

    def result(self, key: str) -> Result:
        """A cell's result."""
        [stored] = self.results(keys=[key])
        return stored.result

    def results(self, *, keys: Iterable[str] | None = None, current: bool = True) -> Iterator[Stored]:
        """The cells' results with their keys, in the order of the keys."""
        from dualview.comparison.result import Result

        wanted = self.keys(current=current) if keys is None else list(keys)
        for start in range(0, len(wanted), _RESULTS_AT_ONCE):
            part = wanted[start : start + _RESULTS_AT_ONCE]
            packed = self._packed_texts(part, "result")
            for key in part:
                try:
                    yield Stored(key, Result.model_validate_json(packed.get(key) or self._text(key, "result")))
                except ValidationError as error:
                    raise UserError(self._unreadable(key, ": ".join(first_problem(error)))) from error
                except Damage as error:
                    raise UserError(self._unreadable(key, str(error))) from error

    def _packed_texts(self, keys: Sequence[str], column: str) -> dict[str, str]:
        """A column of `files.parquet` for those of the cells that are in packs."""
        by_pack: dict[str, list[str]] = {}
        for key, entry in self.index.entries("key IN (SELECT value FROM json_each(?))", json.dumps(keys)).items():
            if entry.pack is not None:
                by_pack.setdefault(entry.pack, []).append(key)
        found: dict[str, str] = {}
        for name, some in by_pack.items():
            with suppress(Damage):  # merged just now, or damaged: reading one cell says which
                found |= {key: row[column] for key, row in texts_of(self.paths.packs / name, some, column).items()}
        return found

    def _text(self, key: str, column: str) -> str:
        """The manifest or the result of a cell, wherever it is; another process may move it meanwhile."""
        problem = ""
        for _ in range(3):
            entry = self.index.entry(key)
            try:
                if entry is not None and entry.pack is not None:
                    return str(texts_of(self.paths.packs / entry.pack, [key], column)[key][column])
                return (self.paths.cell(key) / f"{column}.json").read_text(encoding="utf-8")
            except FileNotFoundError:
                problem = f"{column}.json is missing"
            except LookupError:
                problem = f"{entry and entry.pack} does not hold it"
            except (Damage, OSError, ValueError) as error:
                problem = str(error)
        raise Damage(problem)

    def records(self, key: str) -> Records | None:
        """A cell's tensors, if they were kept."""
        from dualview.records import load_records

        place = self._place(key)
        path = place / RECORDS if place == self.paths.cell(key) else records_file(place, key)
        return load_records(path) if path.is_file() else None

    def _place(self, key: str) -> Path:
        entry = self.index.entry(key)
        return self.paths.cell(key) if entry is None or entry.pack is None else self.paths.packs / entry.pack

    def failures(self) -> list[Failure]:
        return self.index.failures()

    def shown(self, path: Path) -> str:
        """A path relative to the store."""
        return str(path.relative_to(self.path))

    def _unreadable(self, key: str, why: str) -> str:
        where, why = self.shown(self._place(key)), " ".join(why.split()).rstrip(".")
        return f"{where} cannot be read ({why}); run the sweep again, which sets it aside and computes it again."


def put_back(replaced: Path, final: Path) -> None:
    """Finish replacing a cell: remove the old one, or put it back if the new one is missing."""
    if final.is_dir():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        with suppress(OSError):  # the old one is kept, and the next sweep tries again
            final.parent.mkdir(exist_ok=True)
            replaced.rename(final)
