"""The store's SQLite index: which cells there are, found at once. It holds nothing that cells and packs do not.

It uses WAL, so readers and a writer never wait for each other, and short transactions, so several processes can share
it. A lost or damaged index is made again from the cells and the packs.

With a million cells nothing may read a whole table: cells that are not in a pack, and cells that no options lead to any
more, have indexes of their own, and the cells of a sweep are looked up some thousands at a time, most of them in one
table: `current` holds the plan key too.
"""

from __future__ import annotations

import errno
import json
import re
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dualview.io.hashing import file_stamp, sha256_of

VERSION = 2
_WAIT_SECONDS = 60.0
_CACHE_KB, _CACHE_KB_FOR_PACKS = 4 << 10, 64 << 10
"""Pages are looked up all over the index, so a large cache saves few reads; entering a pack changes many at once."""
_CHECK_AT_MOST = 64 << 20
"""Readers check an index of at most so many bytes; a sweep checks any."""
_PACKS = r"""
CREATE TABLE packs (pack TEXT PRIMARY KEY, stamp TEXT NOT NULL, cells INTEGER NOT NULL, bytes INTEGER NOT NULL)
WITHOUT ROWID;
CREATE TABLE ghosts (key TEXT NOT NULL, pack TEXT NOT NULL, PRIMARY KEY (key, pack)) WITHOUT ROWID;
CREATE INDEX loose ON cells (key, stamp) WHERE pack IS NULL;
CREATE INDEX superseded ON cells (key) WHERE answers = 0;
CREATE TRIGGER answers_more AFTER INSERT ON current
BEGIN UPDATE cells SET answers = answers + 1 WHERE key = NEW.key\; END;
CREATE TRIGGER answers_less AFTER DELETE ON current
BEGIN UPDATE cells SET answers = answers - 1 WHERE key = OLD.key\; END;
CREATE TRIGGER answers_other AFTER UPDATE OF key ON current WHEN NEW.key != OLD.key
BEGIN UPDATE cells SET answers = answers + (key = NEW.key) - (key = OLD.key) WHERE key IN (NEW.key, OLD.key)\; END;
"""
_TABLES = f"""
CREATE TABLE cells (key TEXT PRIMARY KEY, stamp TEXT NOT NULL, records INTEGER NOT NULL, pack TEXT,
                    date TEXT NOT NULL, host TEXT NOT NULL, seconds REAL NOT NULL,
                    answers INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE current (asked TEXT PRIMARY KEY, key TEXT NOT NULL, plan TEXT) WITHOUT ROWID;
CREATE TABLE plans (plan TEXT PRIMARY KEY, key TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE failures (asked TEXT PRIMARY KEY, options TEXT NOT NULL, reason TEXT NOT NULL, run TEXT NOT NULL)
WITHOUT ROWID;
CREATE TABLE files (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, sha256 TEXT NOT NULL) WITHOUT ROWID;
{_PACKS}"""
# Version 1 had packs that only copied the rows of cells; they are removed when the next pack is made.
_FROM_1 = f"""
DROP TABLE packs;
ALTER TABLE cells ADD COLUMN answers INTEGER NOT NULL DEFAULT 0;
ALTER TABLE current ADD COLUMN plan TEXT;
DELETE FROM current WHERE key NOT IN (SELECT key FROM cells);
UPDATE cells SET pack = NULL;
UPDATE cells SET answers = found.n FROM (SELECT key, count(*) AS n FROM current GROUP BY key) AS found
WHERE cells.key = found.key;
{_PACKS}"""


class Unusable(Exception):
    """An index that cannot be read: damaged, or of another version."""


@dataclass(frozen=True)
class Entry:
    """What the index holds about a cell."""

    key: str
    stamp: str
    records: bool
    """Whether it has its tensors."""
    pack: str | None
    date: str
    host: str
    seconds: float
    plan: str | None = None
    asked: str = ""
    """The plan that finds it and the options it answers: stated when it is entered, and not read back."""


@dataclass(frozen=True)
class PackNote:
    """A pack, and its size."""

    pack: str
    stamp: str
    cells: int
    """How many are read from it."""
    bytes: int
    """Of its results, before compression."""


@dataclass(frozen=True)
class Failure:
    """A cell that failed, and why."""

    asked: str
    options: str
    """As JSON."""
    reason: str
    run: str
    """When and where, as JSON."""


# Makes a cell (id of options, key, plan key) current. Not INSERT OR REPLACE: it deletes without firing the trigger that
# counts.
_CURRENT = (
    "INSERT INTO current VALUES (?, ?, ?) ON CONFLICT (asked) DO UPDATE SET key = excluded.key, plan = excluded.plan"
)
_COLUMNS = "key, stamp, records, pack, date, host, seconds"
_LISTED = "(SELECT value FROM json_each(?))"


class Index:
    """One connection to the index; `path` None keeps it in memory, for a store that cannot be written."""

    def __init__(self, path: Path | None, *, check: bool = True) -> None:
        """`check` looks for damage in all of an index; without it, only if that is quick."""
        self.path = path
        self._check = check or path is None or not path.exists() or path.stat().st_size <= _CHECK_AT_MOST
        try:
            self.connection = sqlite3.connect(path or ":memory:", timeout=_WAIT_SECONDS, isolation_level=None)
            self._execute, self._many = self.connection.execute, self.connection.executemany
            try:
                self._prepare()
            except BaseException:
                self.connection.close()
                raise
        except sqlite3.OperationalError as error:  # locked, read-only, no room: not the index's fault
            raise OSError(errno.EIO, str(error)) from error
        except sqlite3.DatabaseError as error:
            raise Unusable(str(error)) from error

    def _prepare(self) -> None:
        for setting in ("journal_mode=WAL", "synchronous=NORMAL", f"cache_size={-_CACHE_KB}"):
            self._execute(f"PRAGMA {setting}")
        if self._check and self._execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise Unusable("it fails SQLite's own check")
        with self.writing():
            found = self._execute("PRAGMA user_version").fetchone()[0]
            if found == 0 and not self._execute("SELECT 1 FROM sqlite_master").fetchone():
                self._make(_TABLES)
            elif found == 1:
                self._make(_FROM_1)
            elif found != VERSION:
                raise Unusable(f"it has version {found}, not {VERSION}")

    def _make(self, statements: str) -> None:
        for statement in re.split(r"(?<!\\);", statements):  # the ends inside a trigger are escaped
            self._execute(statement.replace("\\;", ";"))
        self._execute(f"PRAGMA user_version={VERSION}")

    @contextmanager
    def writing(self) -> Generator[None]:
        """One transaction, all or nothing; a full or read-only disk is an OSError, as for any other file."""
        if self.connection.in_transaction:  # a part of a larger one
            yield
            return
        try:
            self._execute("BEGIN IMMEDIATE")
            yield
            self._execute("COMMIT")
        except BaseException as error:
            if self.connection.in_transaction:
                self._execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                code = errno.ENOSPC if "full" in str(error) else errno.EIO
                raise OSError(code, f"{self.path}: {error}") from error
            raise

    @contextmanager
    def _changing_much(self) -> Generator[None]:
        self._execute(f"PRAGMA cache_size={-_CACHE_KB_FOR_PACKS}")
        try:
            yield
        finally:
            self._execute(f"PRAGMA cache_size={-_CACHE_KB}")

    def _change(self, sql: str, *values: object) -> None:
        with self.writing():
            self._execute(sql, values)

    def close(self) -> None:
        self.connection.close()

    # ------------------------------------------------------------------------------------------------------- cells

    def entries(self, where: str = "TRUE", *values: str) -> dict[str, Entry]:
        """The cells by their keys, sorted."""
        rows = self._execute(f"SELECT {_COLUMNS} FROM cells WHERE {where} ORDER BY key", values)
        return {row[0]: Entry(row[0], row[1], bool(row[2]), *row[3:]) for row in rows}

    def loose(self) -> dict[str, str]:
        """Every cell with a folder of its own: its key and its files' stamp."""
        return dict(self._execute("SELECT key, stamp FROM cells WHERE pack IS NULL ORDER BY key"))

    def keys(self, where: str = "TRUE", *values: object) -> list[str]:
        """Keys of cells, sorted."""
        return [row[0] for row in self._execute(f"SELECT key FROM cells WHERE {where} ORDER BY key", values)]

    def entry(self, key: str) -> Entry | None:
        return self.entries("key = ?", key).get(key)

    def add(self, entry: Entry) -> None:
        """Enter a cell with a folder of its own; an earlier failure of the same options is forgotten.

        If a pack holds the same cell, it is a ghost there from now on: not read, and left out when packs are merged.
        """
        with self.writing():
            self._leave_pack(entry.key)
            self._execute(
                f"INSERT INTO cells ({_COLUMNS}) VALUES (?, ?, ?, NULL, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                "stamp = excluded.stamp, records = excluded.records, pack = NULL, date = excluded.date, "
                "host = excluded.host, seconds = excluded.seconds",
                (entry.key, entry.stamp, entry.records, entry.date, entry.host, entry.seconds),
            )
            self.remember(entry.plan, entry.asked, entry.key)

    def remember(self, plan: str | None, asked: str, key: str) -> None:
        """Note that a cell also answers this plan and these options."""
        with self.writing():
            if plan is not None:
                self._execute("INSERT OR REPLACE INTO plans VALUES (?, ?)", (plan, key))
            self._execute(_CURRENT, (asked, key, plan))
            self._execute("DELETE FROM failures WHERE asked = ?", (asked,))

    def _make_latest(self, cells: Iterable[tuple[str, str, str | None, str]]) -> None:
        """Make cells (id of options, key, plan key, date) current unless a later one is."""
        later = "(SELECT date FROM cells WHERE key = current.key) < ?"
        self._many(f"{_CURRENT} WHERE {later}", cells)

    def restamp(self, key: str, stamp: str) -> None:
        self._change("UPDATE cells SET stamp = ? WHERE key = ?", stamp, key)

    def remove(self, keys: Iterable[str], pack: str | None = None) -> None:
        """Forget cells that are in this pack, or loose; one that another pack still holds is read from there.

        Cells that another process has moved meanwhile stay.
        """
        gone: list[str] = []
        with self.writing():
            for key in keys:
                if not self._execute("SELECT 1 FROM cells WHERE key = ? AND pack IS ?", (key, pack)).fetchone():
                    continue
                if (ghost := self._execute("SELECT pack FROM ghosts WHERE key = ?", (key,)).fetchone()) is None:
                    gone.append(key)
                    continue
                # Its tensors are looked for by the next sweep that needs them.
                self._execute("UPDATE cells SET pack = ?, stamp = '', records = 0 WHERE key = ?", (*ghost, key))
                self._execute("DELETE FROM ghosts WHERE key = ? AND pack = ?", (key, *ghost))
                self._execute("UPDATE packs SET cells = cells + 1 WHERE pack = ?", ghost)
            for table in ("current", "cells"):
                self._execute(f"DELETE FROM {table} WHERE key IN {_LISTED}", (json.dumps(gone),))

    def superseded(self) -> list[str]:
        """The cells that are not current: others, of other weights or versions, answer their options now."""
        return self.keys("answers = 0")

    def set_current(self, cells: Mapping[str, tuple[str, str | None]]) -> None:
        """Make cells current, by the ids of their options: keys and plan keys."""
        with self.writing():
            self._many(_CURRENT, ((asked, *cell) for asked, cell in cells.items()))

    @property
    def options_version(self) -> int:
        """The `OPTIONS_VERSION` of the ids in `current`."""
        return self._execute("PRAGMA application_id").fetchone()[0]

    @options_version.setter
    def options_version(self, version: int) -> None:
        self._change(f"PRAGMA application_id={version}")

    def renew(self, moved: Iterable[tuple[str, str, str]]) -> None:
        """Give the options of current cells another id: key, id before, id now. A later cell of that id stays."""
        with self.writing():
            for key, before, now in moved:
                gone = self._execute("DELETE FROM current WHERE asked = ? AND key = ?", (before, key))
                if gone.rowcount:
                    self._make_latest([(now, key, None, self.entries("key = ?", key)[key].date)])

    def planned(self, plan: str) -> str | None:
        row = self._execute("SELECT key FROM plans JOIN cells USING (key) WHERE plan = ?", (plan,)).fetchone()
        return None if row is None else str(row[0])

    def current_plans(self, asked: Sequence[str]) -> dict[str, str | None]:
        """The plan keys of the current cells of some options, by the options' ids."""
        given = json.dumps(sorted(asked))  # in this order the pages of the table are read one after another
        return dict(self._execute("SELECT asked, plan FROM json_each(?) JOIN current ON asked = value", (given,)))

    def look_up(self, asked: Sequence[str], plans: Sequence[str | None]) -> list[tuple[int, str, bool, bool]]:
        """Of some options and their plan keys, those with a finished cell.

        For each its number, the cell's key, whether the cell has its tensors, and whether it is the current one.
        """
        pairs = [[number, *pair] for number, pair in enumerate(zip(asked, plans, strict=True))]
        rows = self._execute(
            "SELECT value ->> 0, cells.key, records, current.key IS cells.key FROM json_each(?) "
            "JOIN plans ON plans.plan = value ->> 2 JOIN cells ON cells.key = plans.key "
            "LEFT JOIN current ON asked = value ->> 1",
            (json.dumps(pairs),),
        )
        return [(row[0], row[1], bool(row[2]), bool(row[3])) for row in rows]

    # ------------------------------------------------------------------------------------------------------- packs

    def packs(self) -> list[PackNote]:
        return [PackNote(*row) for row in self._execute("SELECT pack, stamp, cells, bytes FROM packs ORDER BY pack")]

    def ghosts(self) -> dict[str, list[str]]:
        """Cells that packs hold and that are read from elsewhere, by pack."""
        found: dict[str, list[str]] = {}
        for pack, key in self._execute("SELECT pack, key FROM ghosts ORDER BY pack, key"):
            found.setdefault(pack, []).append(key)
        return found

    def replace_packs(self, note: PackNote, stamps: Mapping[str, str], absorbed: Mapping[str, Sequence[str]]) -> None:
        """Enter a new pack of loose cells (keys and stamps) and of the cells of other packs, which are forgotten.

        A LookupError, and no change, if a cell has changed meanwhile.
        """
        with self._changing_much(), self.writing():
            self._forget_pack(note.pack)  # another process may have found it before this one entered it
            update = "UPDATE cells SET pack = ?, stamp = '' WHERE key = ? AND"
            given = ((note.pack, key, stamp) for key, stamp in stamps.items())
            moved = self._many(f"{update} pack IS NULL AND stamp = ?", given).rowcount if stamps else 0
            for pack, keys in absorbed.items():
                given = ((note.pack, key, pack) for key in keys)
                moved += self._many(f"{update} pack = ?", given).rowcount if keys else 0
                self._forget_pack(pack)
            if moved != note.cells:
                raise LookupError(f"{note.cells} cells were packed, {moved} are still there")
            self._execute("INSERT INTO packs VALUES (?, ?, ?, ?)", tuple(vars(note).values()))

    def enter_pack(self, note: PackNote, rows: Sequence[Entry], ours: Callable[[Entry, bool], bool]) -> None:
        """Enter a pack that was found on disk, unless another process just did.

        `ours` says whether a cell that is in the index already is to be read from this pack: its entry, and whether
        the pack has its tensors. The latest cell of some options is their current one.
        """
        with self._changing_much(), self.writing():
            if self._execute("SELECT 1 FROM packs WHERE pack = ?", (note.pack,)).fetchone():
                return
            keys = json.dumps([row.key for row in rows])
            known = self.entries(f"key IN {_LISTED}", keys)
            ghosts = {row.key for row in rows if row.key in known and not ours(known[row.key], row.records)}
            self._many("INSERT OR IGNORE INTO ghosts VALUES (?, ?)", ((key, note.pack) for key in sorted(ghosts)))
            for key in known.keys() - ghosts:
                self._leave_pack(key)
            kept = [row for row in rows if row.key not in ghosts]
            self._execute("INSERT INTO packs VALUES (?, ?, ?, ?)", (note.pack, note.stamp, len(kept), note.bytes))
            self._many(
                f"INSERT INTO cells ({_COLUMNS}) VALUES (?, '', ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                "stamp = '', records = excluded.records, pack = excluded.pack",
                ((row.key, row.records, note.pack, row.date, row.host, row.seconds) for row in kept),
            )
            plans = sorted((row.plan, row.key) for row in kept if row.plan is not None)
            self._many("INSERT OR REPLACE INTO plans VALUES (?, ?)", plans)
            self._make_latest(
                [(row.asked, row.key, row.plan, row.date) for row in sorted(kept, key=lambda row: row.asked)]
            )

    def _leave_pack(self, key: str) -> None:
        row = self._execute("SELECT pack FROM cells WHERE key = ? AND pack IS NOT NULL", (key,)).fetchone()
        if row is not None:
            self._execute("INSERT OR IGNORE INTO ghosts VALUES (?, ?)", (key, row[0]))
            self._execute("UPDATE packs SET cells = cells - 1 WHERE pack = ?", row)

    def restamp_pack(self, pack: str, stamp: str) -> None:
        self._change("UPDATE packs SET stamp = ? WHERE pack = ?", stamp, pack)

    def remove_pack(self, pack: str) -> None:
        """Forget a pack and its cells."""
        with self.writing():
            self._forget_pack(pack)
            self.remove(self.keys("pack = ?", pack), pack)

    def _forget_pack(self, pack: str) -> None:
        for table in ("ghosts", "packs"):
            self._execute(f"DELETE FROM {table} WHERE pack = ?", (pack,))

    # ------------------------------------------------------------------------------------------ failures and files

    def fail(self, failure: Failure) -> None:
        self._change("INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?)", *vars(failure).values())

    def failures(self) -> list[Failure]:
        rows = self._execute("SELECT asked, options, reason, run FROM failures ORDER BY asked")
        return [Failure(*row) for row in rows]

    def sha256(self, path: Path) -> str:
        """A file's sha256, remembered while its size, times and inode stay the same."""
        path = path.absolute()
        found, stamp = path.stat(), file_stamp(path)
        row = self._execute("SELECT stamp, sha256 FROM files WHERE path = ?", (str(path),)).fetchone()
        if row is not None and row[0] == stamp:
            return str(row[1])
        made = sha256_of(path)
        # A file that changed just now may change again within one tick of its clock.
        if time.time() - max(found.st_mtime, found.st_ctime) > 2:
            with suppress(OSError):
                self._change("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", str(path), stamp, made)
        return made
