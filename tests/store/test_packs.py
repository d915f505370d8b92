"""Packs: a cell is the same in a pack as in a folder of its own, and none is lost on the way."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualview.io.errors import UserError
from dualview.store.api import diff, load, query, show
from dualview.store.folder import StoreFolder
from dualview.store.index import Index
from dualview.store.packs import compaction
from dualview.store.packs.compaction import pack
from dualview.store.store import Store
from dualview.sweep.runner import Summary, sweep
from sweep.study import grid, rows_by_query, rows_on_disk


class Killed(BaseException):
    """The process ends here: nothing that would have followed happens."""


def killed(*_: object, **__: object) -> None:
    raise Killed


_rmtree = shutil.rmtree


def half_of(path: Path, **given: Any) -> None:
    """Removes what is left of a packed cell as a process does that is killed in the middle of it."""
    if path.suffix == ".old":
        next(path.iterdir()).unlink()
    else:
        _rmtree(path, **given)


def packed(store: Path) -> Path:
    with Store(store) as opened:
        assert pack(opened, at_least=1) == 4
    assert not list(store.glob("cells/*/*")) and len(list(store.glob("packs/*"))) == 1
    return store


def test_a_packed_cell_reads_as_it_was(store: Path, finished: Path, again: Callable[[], Summary]) -> None:
    packed(store)
    assert json.loads((store / "store.json").read_text()) == {"schema": "dualview.store/2"}  # an older one refuses it
    assert rows_by_query(store) == rows_by_query(finished)
    with Store(store) as opened, Store(finished) as other:
        assert opened.keys() == other.keys() and opened.problems == []
        assert list(opened.results()) == list(other.results())
        for key in (stored.key for stored in other.results()):
            assert opened.manifest(key) == other.manifest(key) and opened.result(key) == other.result(key)
            assert show(key[:10], store).key == key
    assert diff(str(store), str(finished)).equal  # pyright: ignore[reportAttributeAccessIssue]
    runs = "SELECT * FROM runs ORDER BY key"
    assert query(runs, store).equals(query(runs, finished))
    summary = again()
    assert (summary.done_before, summary.computed, summary.problems) == (4, 0, ())


@pytest.mark.parametrize("lost", ["index.sqlite", "store.json"])
def test_what_is_lost_is_made_again(lost: str, store: Path, finished: Path, again: Callable[[], Summary]) -> None:
    for path in packed(store).glob(f"{lost}*"):
        path.unlink()
    summary = again()
    assert (summary.done_before, summary.computed) == (4, 0)
    assert rows_by_query(store) == rows_by_query(finished)
    assert json.loads((store / "store.json").read_text()) == {"schema": "dualview.store/2"}


@pytest.mark.parametrize("step", ["fill", "rename", "index", "loose"])
def test_a_kill_while_packing_loses_nothing(
    step: str, store: Path, finished: Path, again: Callable[[], Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, Store(store) as opened:
        if step == "fill":
            patched.setattr(compaction, "finish_pack", killed)
            patched.setattr(compaction.shutil, "rmtree", lambda *_, **__: None)
        elif step == "rename":
            patched.setattr(compaction, "note_of", killed)
        elif step == "index":
            patched.setattr(StoreFolder, "remove_packed", killed)
        else:  # half of a cell's files are gone
            patched.setattr(shutil, "rmtree", half_of)
        if step == "loose":
            pack(opened, at_least=1)
        else:
            with pytest.raises(Killed):
                pack(opened, at_least=1)
    assert rows_by_query(store) == rows_by_query(finished)
    summary = again()
    assert (summary.done_before, summary.computed, summary.problems) == (4, 0, ())
    with Store(store) as opened:
        pack(opened, at_least=1)
    assert rows_by_query(store) == rows_by_query(finished)
    assert not list(store.glob("cells/*/*")) and not list(store.glob("unfinished/*"))
    assert len(list(store.glob("packs/*"))) == len(list(store.glob("packs/.*"))) + 1 == 1


def test_tensors_are_packed_too_and_a_cell_may_come_again_with_them(base: dict[str, Any], store: Path) -> None:
    packed(store)
    before = rows_by_query(store)
    with_tensors = grid(base, seed=[1, 2], save_records=True)
    assert sweep(with_tensors, store).computed == 2  # they were there, without their tensors
    assert rows_by_query(store)["layers"] == before["layers"]  # the cells of the pack are not read twice
    for path in store.glob("index.sqlite*"):
        path.unlink()
    with Store(store) as opened:
        assert rows_by_query(store)["layers"] == before["layers"]
        assert sorted(map(len, opened.index.ghosts().values())) == [2]
        assert pack(opened, at_least=1) == 2  # merges the smaller pack
        assert opened.index.ghosts() == {} or len(opened.index.packs()) == 2
        kept = [key for key in opened.keys(current=False) if opened.records(key) is not None]
        assert len(kept) == 2
    again = sweep(with_tensors, store)
    assert (again.done_before, again.computed, again.problems) == (2, 0, ())
    assert rows_by_query(store)["layers"] == before["layers"]
    damaged = next(store.glob("packs/*/*.safetensors"))
    damaged.write_bytes(b"gone")
    assert sweep(with_tensors, store).computed == 1  # only the tensors are lost
    assert rows_by_query(store)["layers"] == before["layers"]


def test_small_packs_are_merged(store: Path, finished: Path) -> None:
    with Store(store) as opened:
        for count in (1, 1, 2):
            loose = opened.index.loose()
            hidden = list(loose)[count:]
            with opened.index.writing():
                opened.index.connection.executemany("UPDATE cells SET pack = '-' WHERE key = ?", [(k,) for k in hidden])
            assert pack(opened, at_least=1) == count
            with opened.index.writing():
                opened.index.connection.execute("UPDATE cells SET pack = NULL WHERE pack = '-'")
        assert [note.cells for note in opened.index.packs()] == [4]
    assert len(list(store.glob("packs/*"))) == 1
    assert rows_by_query(store) == rows_by_query(finished)


def test_a_damaged_pack_costs_only_the_cells_with_damaged_results(
    store: Path, finished: Path, again: Callable[[], Summary]
) -> None:
    file = next(packed(store).glob("packs/*/files.parquet"))
    file.write_bytes(file.read_bytes()[:-200])  # nothing can be read from it
    summary = again()
    assert (summary.done_before, summary.computed) == (0, 4)
    [problem] = summary.problems
    assert "4 of its cells will be computed again" in str(problem) and problem.moved_to is not None
    assert (store / problem.moved_to / "why.txt").is_file()
    assert rows_by_query(store) == rows_by_query(finished)
    assert rows_on_disk(store) == rows_on_disk(finished)


def test_a_pack_without_its_rows_is_taken_apart(store: Path, finished: Path, again: Callable[[], Summary]) -> None:
    next(packed(store).glob("packs/*/layers.parquet")).unlink()
    summary = again()
    assert (summary.done_before, summary.computed, len(summary.problems)) == (4, 0, 1)
    assert rows_on_disk(store) == rows_on_disk(finished)  # byte for byte what they were


def test_a_pack_of_a_later_dualview_is_refused(store: Path) -> None:
    path = next(packed(store).glob("packs/*/pack.json"))
    path.write_text(path.read_text().replace("dualview.pack/1", "dualview.pack/2"))
    with pytest.raises(UserError, match="update dualview"):
        load(store)
    assert path.is_file()


def test_a_pack_that_goes_takes_its_cells_with_it(store: Path, again: Callable[[], Summary]) -> None:
    shutil.rmtree(packed(store) / "packs")
    assert len(load(store)) == 0
    assert again().computed == 4


OLD = """
CREATE TABLE cells (key TEXT PRIMARY KEY, stamp TEXT NOT NULL, records INTEGER NOT NULL, pack TEXT,
                    date TEXT NOT NULL, host TEXT NOT NULL, seconds REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE current (asked TEXT PRIMARY KEY, key TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE packs (pack TEXT PRIMARY KEY, stamp TEXT NOT NULL, sha256 TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE plans (plan TEXT PRIMARY KEY, key TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE failures (asked TEXT PRIMARY KEY, options TEXT NOT NULL, reason TEXT NOT NULL, run TEXT NOT NULL)
WITHOUT ROWID;
CREATE TABLE files (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, sha256 TEXT NOT NULL) WITHOUT ROWID;
PRAGMA user_version=1;
"""


def test_an_index_of_the_first_version_is_taken_over(store: Path, finished: Path, again: Callable[[], Summary]) -> None:
    """With its packs, which were copies, its failures, and cells that are not current."""
    index = store / "index.sqlite"
    with Store(store) as opened:
        rows = {
            name: opened.index.connection.execute(f"SELECT {columns} FROM {name}").fetchall()
            for name, columns in {
                "cells": "key, stamp, records, '0123456789abcdef', date, host, seconds",
                "current": "asked, key",
                "plans": "*",
            }.items()
        }
    index.unlink()
    connection = sqlite3.connect(index)
    connection.executescript(OLD)
    connection.execute("INSERT INTO packs VALUES ('0123456789abcdef', 'stamp', 'hash')")
    connection.execute("INSERT INTO failures VALUES ('x', '{\"model\": \"m\", \"task\": \"t\"}', 'why', '{}')")
    for name, found in rows.items():
        marks = ", ".join("?" for _ in found[0])
        connection.executemany(f"INSERT INTO {name} VALUES ({marks})", found)
    superseded = rows["current"][0][1]
    connection.execute("DELETE FROM current WHERE key = ?", (superseded,))
    connection.commit()
    connection.close()
    (store / "packs" / "0123456789abcdef").mkdir(parents=True)
    (store / "packs" / "0123456789abcdef" / "cells.parquet").write_text("a copy")
    with Store(store) as opened:
        assert opened.problems == [] and [failure.reason for failure in opened.failures()] == ["why"]
        assert opened.index.superseded() == [superseded] and len(opened.keys()) == 3
    assert len(load(store)) == 3 and len(load(store, current=False)) == 4
    assert again().done_before == 4
    assert rows_by_query(store) == rows_by_query(finished)
    packed(store)
    assert rows_by_query(store) == rows_by_query(finished)


def test_a_large_index_is_checked_by_sweeps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Index(tmp_path / "index.sqlite").close()
    content = (tmp_path / "index.sqlite").read_bytes()
    (tmp_path / "index.sqlite").write_bytes(content[:-4096] + bytes(4096))
    monkeypatch.setattr("dualview.store.index._CHECK_AT_MOST", 100)
    Index(tmp_path / "index.sqlite", check=False).close()
    with pytest.raises(Exception, match=r"check|malformed"):
        Index(tmp_path / "index.sqlite")
