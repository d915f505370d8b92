"""The store's SQLite index: which cells there are, found at once. It holds nothing that the cells' folders do not.

It uses WAL, so readers and a writer never wait for each other, and short transactions, so several processes can share
it. A lost or damaged index is made again from the cells.
"""

from __future__ import annotations

import errno
import sqlite3
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dualview.io.download import sha256_of
from dualview.store.cell_key import file_stamp

VERSION = 1
_WAIT_SECONDS = 60.0
_TABLES = """
CREATE TABLE cells (key TEXT PRIMARY KEY, stamp TEXT NOT NULL, records INTEGER NOT NULL, pack TEXT,
                    date TEXT NOT NULL, host TEXT NOT NULL, seconds REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE current (asked TEXT PRIMARY KEY, key TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE packs (pack TEXT PRIMARY KEY, stamp TEXT NOT NULL, sha256 TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE plans (plan TEXT PRIMARY KEY, key TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE failures (asked TEXT PRIMARY KEY, options TEXT NOT NULL, reason TEXT NOT NULL, run TEXT NOT NULL)
WITHOUT ROWID;
CREATE TABLE files (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, sha256 TEXT NOT NULL) WITHOUT ROWID;
"""


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


@dataclass(frozen=True)
class PackNote:
    """A pack, and what its files must be."""

    pack: str
    stamp: str
    sha256: str


@dataclass(frozen=True)
class Failure:
    """A cell that failed, and why."""

    asked: str
    options: str
    """As JSON."""
    reason: str
    run: str
    """When and where, as JSON."""


_COLUMNS = "key, stamp, records, pack, date, host, seconds"


class Index:
    """One connection to the index; `path` None keeps it in memory, for a store that cannot be written."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        try:
            where = ":memory:" if path is None else path
            self.connection = sqlite3.connect(where, timeout=_WAIT_SECONDS, isolation_level=None)
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
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=NORMAL")
        if self.connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise Unusable("it fails SQLite's own check")
        with self.writing():
            found = self.connection.execute("PRAGMA user_version").fetchone()[0]
            if found == 0 and not self.connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in _TABLES.split(";"):
                    self.connection.execute(statement)
                self.connection.execute(f"PRAGMA user_version={VERSION}")
            elif found != VERSION:
                raise Unusable(f"it has version {found}, not {VERSION}")

    @contextmanager
    def writing(self) -> Generator[None]:
        """One transaction, all or nothing; a full or read-only disk is an OSError, as for any other file."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield
            self.connection.execute("COMMIT")
        except BaseException as error:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                code = errno.ENOSPC if "full" in str(error) else errno.EIO
                raise OSError(code, f"{self.path}: {error}") from error
            raise

    def _change(self, sql: str, *values: object) -> None:
        with self.writing():
            self.connection.execute(sql, values)

    def close(self) -> None:
        self.connection.close()

    # ------------------------------------------------------------------------------------------------------- cells

    def entries(self, where: str = "TRUE", *values: str) -> dict[str, Entry]:
        """The cells by their keys, sorted."""
        rows = self.connection.execute(f"SELECT {_COLUMNS} FROM cells WHERE {where} ORDER BY key", values)
        return {row[0]: Entry(row[0], row[1], bool(row[2]), *row[3:]) for row in rows}

    def stamps(self) -> dict[str, str]:
        """Every cell's key and its files' stamp: much faster than `entries` for ten thousand cells."""
        return dict(self.connection.execute("SELECT key, stamp FROM cells ORDER BY key"))

    def with_records(self) -> set[str]:
        """The keys of the cells that have their tensors."""
        return {row[0] for row in self.connection.execute("SELECT key FROM cells WHERE records")}

    def entry(self, key: str) -> Entry | None:
        return self.entries("key = ?", key).get(key)

    def add(self, entry: Entry, plan: str | None, asked: str) -> None:
        """Enter a cell, or what is new about it; an earlier failure of the same options is forgotten."""
        with self.writing():
            self.connection.execute(
                f"INSERT INTO cells ({_COLUMNS}) VALUES (?, ?, ?, NULL, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                "stamp = excluded.stamp, records = excluded.records, date = excluded.date, host = excluded.host, "
                "seconds = excluded.seconds",
                (entry.key, entry.stamp, entry.records, entry.date, entry.host, entry.seconds),
            )
            self._remember(plan, asked, entry.key)

    def remember(self, plan: str | None, asked: str, key: str) -> None:
        """Note that a cell also answers this plan and these options."""
        with self.writing():
            self._remember(plan, asked, key)

    def _remember(self, plan: str | None, asked: str, key: str) -> None:
        if plan is not None:
            self.connection.execute("INSERT OR REPLACE INTO plans VALUES (?, ?)", (plan, key))
        self.connection.execute("INSERT OR REPLACE INTO current VALUES (?, ?)", (asked, key))
        self.connection.execute("DELETE FROM failures WHERE asked = ?", (asked,))

    def restamp(self, key: str, stamp: str) -> None:
        self._change("UPDATE cells SET stamp = ? WHERE key = ?", stamp, key)

    def remove(self, keys: Iterable[str]) -> None:
        """Forget cells; a pack that held one of them is no longer used."""
        with self.writing():
            for key in keys:
                row = self.connection.execute("SELECT pack FROM cells WHERE key = ?", (key,)).fetchone()
                self.connection.execute("DELETE FROM cells WHERE key = ?", (key,))
                if row is not None and row[0] is not None:
                    self._remove_pack(row[0])

    def current(self) -> dict[str, str]:
        """What was asked for, and the cell that answers it now; an older one may be of other weights or versions."""
        return dict(self.connection.execute("SELECT asked, key FROM current JOIN cells USING (key)"))

    def set_current(self, cells: Mapping[str, str]) -> None:
        with self.writing():
            self.connection.executemany("INSERT OR REPLACE INTO current VALUES (?, ?)", cells.items())

    def plans(self) -> dict[str, str]:
        """Every plan key of a cell that is there, and the cell's key."""
        return dict(self.connection.execute("SELECT plan, key FROM plans JOIN cells USING (key)"))

    def planned(self, plan: str) -> str | None:
        row = self.connection.execute("SELECT key FROM plans JOIN cells USING (key) WHERE plan = ?", (plan,)).fetchone()
        return None if row is None else str(row[0])

    # ------------------------------------------------------------------------------------------------------- packs

    def packs(self) -> list[PackNote]:
        rows = self.connection.execute("SELECT pack, stamp, sha256 FROM packs ORDER BY pack")
        return [PackNote(*row) for row in rows]

    def add_pack(self, note: PackNote, keys: Iterable[str]) -> None:
        """Enter a pack of these cells; a LookupError, and no change, if one of them is gone or in another pack."""
        with self.writing():
            self.connection.execute("INSERT INTO packs VALUES (?, ?, ?)", (note.pack, note.stamp, note.sha256))
            for key in keys:
                row = (note.pack, key)
                done = self.connection.execute("UPDATE cells SET pack = ? WHERE key = ? AND pack IS NULL", row)
                if done.rowcount != 1:
                    raise LookupError(key)

    def restamp_pack(self, pack: str, stamp: str) -> None:
        self._change("UPDATE packs SET stamp = ? WHERE pack = ?", stamp, pack)

    def remove_pack(self, pack: str) -> None:
        with self.writing():
            self._remove_pack(pack)

    def _remove_pack(self, pack: str) -> None:
        self.connection.execute("UPDATE cells SET pack = NULL WHERE pack = ?", (pack,))
        self.connection.execute("DELETE FROM packs WHERE pack = ?", (pack,))

    # ------------------------------------------------------------------------------------------ failures and files

    def fail(self, failure: Failure) -> None:
        row = (failure.asked, failure.options, failure.reason, failure.run)
        self._change("INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?)", *row)

    def failures(self) -> list[Failure]:
        rows = self.connection.execute("SELECT asked, options, reason, run FROM failures ORDER BY asked")
        return [Failure(*row) for row in rows]

    def sha256(self, path: Path) -> str:
        """A file's sha256, remembered while its size, times and inode stay the same."""
        path = path.absolute()
        found, stamp = path.stat(), file_stamp(path)
        row = self.connection.execute("SELECT stamp, sha256 FROM files WHERE path = ?", (str(path),)).fetchone()
        if row is not None and row[0] == stamp:
            return str(row[1])
        made = sha256_of(path)
        # A file that changed just now may change again within one tick of its clock.
        if time.time() - max(found.st_mtime, found.st_ctime) > 2:
            with suppress(OSError):
                self._change("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", str(path), stamp, made)
        return made
