"""A damaged store: what is damaged is found, named, set aside and computed again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from dualview.io.errors import UserError
from dualview.store.packs import compaction as packs
from dualview.store.store import Store
from dualview.sweep.runner import Summary
from sweep.study import cell_of, rows_by_query, rows_on_disk, truncated

# ------------------------------------------------------------------------------------------------------ what is lost


def flipped(cell: Path) -> str:
    path = cell / "layers.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return "layers.parquet is not what was written"


def without_manifest(cell: Path) -> str:
    (cell / "manifest.json").unlink()
    return "manifest.json is missing"


def half_a_manifest(cell: Path) -> str:
    path = cell / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")
    return "manifest.json cannot be read"


def of_an_older_schema(cell: Path) -> str:
    path = cell / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace("dualview.cell/1", "dualview.cell/0"), encoding="utf-8")
    return "has schema 'dualview.cell/0' instead of 'dualview.cell/1'"


def without_result(cell: Path) -> str:
    (cell / "result.json").unlink()
    return "result.json is missing"


def under_another_name(cell: Path) -> str:
    other = cell.with_name(cell.name[:-1] + ("0" if cell.name[-1] != "0" else "1"))
    cell.rename(other)
    return "manifest.json is that of cell"


@pytest.mark.parametrize(
    "damage",
    [truncated, flipped, without_manifest, half_a_manifest, of_an_older_schema, without_result, under_another_name],
)
def test_a_damaged_cell_is_set_aside_and_computed_again(
    damage: Callable[[Path], str], store: Path, again: Callable[[], Summary], finished: Path
) -> None:
    cell = cell_of(store)
    said = damage(cell)
    summary = again()
    assert (summary.done_before, summary.computed, summary.failed) == (3, 1, ())
    [problem] = summary.problems
    assert said in str(problem) and cell.name[:60] in problem.what and problem.moved_to is not None
    aside = store / problem.moved_to
    assert (aside / "why.txt").is_file() and (aside / Path(problem.what).name).is_dir()  # nothing is deleted
    assert rows_on_disk(store) == rows_on_disk(finished)
    assert rows_by_query(store) == rows_by_query(finished)
    assert again().problems == ()


def test_a_damaged_cell_is_named_by_readers_too(store: Path) -> None:
    cell = cell_of(store)
    (store / "index.sqlite").unlink()
    said = truncated(cell)
    with Store(store) as opened:
        assert [said in str(problem) for problem in opened.problems] == [True]
        assert len(opened.to_frame()) == 3


def test_foreign_files_are_set_aside(store: Path, again: Callable[[], Summary], finished: Path) -> None:
    cell = cell_of(store)
    (cell / "notes.txt").write_text("mine")
    (store / "cells" / "stray.parquet").write_text("?")
    (store / "cells" / "ab").mkdir(exist_ok=True)
    (store / "cells" / "ab" / "cde").mkdir()
    (store / "study.yaml").write_text("a: 1")
    summary = again()
    assert summary.computed == 0
    assert sorted(Path(problem.what).name for problem in summary.problems) == [
        "cde",
        "notes.txt",
        "stray.parquet",
        "study.yaml",
    ]
    assert (store / "study.yaml").read_text() == "a: 1"  # next to the cells it does no harm, and stays
    assert [p.read_text() for p in store.glob("quarantine/notes.txt.*/notes.txt")] == ["mine"]
    assert rows_on_disk(store) == rows_on_disk(finished)


def test_a_newer_store_is_refused_and_left_alone(store: Path, again: Callable[[], Summary]) -> None:
    manifest = cell_of(store) / "manifest.json"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace("dualview.cell/1", "dualview.cell/2"))
    with pytest.raises(UserError, match="update dualview"):
        again()
    assert manifest.is_file()
    (store / "store.json").write_text('{"schema": "dualview.store/9"}')
    with pytest.raises(UserError, match="this dualview knows"):
        Store(store)


def break_index(store: Path) -> None:
    (store / "index.sqlite").write_bytes(b"not a database at all, but long enough to be one" * 100)


def tear_index(store: Path) -> None:
    content = (store / "index.sqlite").read_bytes()
    (store / "index.sqlite").write_bytes(content[: len(content) // 2])


def lose_index(store: Path) -> None:
    for path in store.glob("index.sqlite*"):
        path.unlink()


def age_index(store: Path) -> None:
    connection = sqlite3.connect(store / "index.sqlite")
    connection.execute("PRAGMA user_version=99")
    connection.close()


def lose_marker(store: Path) -> None:
    (store / "store.json").unlink()


def age_marker(store: Path) -> None:
    (store / "store.json").write_text('{"schema": "dualview.store/0"}')


def break_marker(store: Path) -> None:
    (store / "store.json").write_text("{")


@pytest.mark.parametrize(
    "damage", [break_index, tear_index, lose_index, age_index, lose_marker, age_marker, break_marker]
)
def test_index_and_marker_are_made_again(
    damage: Callable[[Path], None], store: Path, again: Callable[[], Summary], finished: Path
) -> None:
    damage(store)
    summary = again()
    assert (summary.done_before, summary.computed) == (4, 0)  # every cell is found again, and none computed
    assert rows_by_query(store) == rows_by_query(finished)
    assert json.loads((store / "store.json").read_text()) == {"schema": "dualview.store/1"}


def test_a_copied_store_is_believed_only_after_a_look(store: Path, again: Callable[[], Summary]) -> None:
    """Copying changes every time stamp: the cells are compared with their manifests, found good, and kept."""
    for path in store.glob("cells/*/*/*"):
        path.touch()
    assert again().done_before == 4
    truncated(cell_of(store))
    assert again().computed == 1


def test_what_a_killed_process_left_is_cleared(store: Path, again: Callable[[], Summary]) -> None:
    left, probe, pack = store / "unfinished" / ("0123abcd" * 8), store / "unfinished" / "probe.77", store / "packs"
    left.mkdir(parents=True)
    (left / "result.json").write_text("{")
    probe.write_text("")
    for name in ("0123456789abcdef", ".0123456789abcdef"):  # packs that are not in the index
        (pack / name).mkdir(parents=True)
    assert again().problems == ()
    assert not left.exists() and not probe.exists()
    with Store(store) as opened:
        packs.pack(opened, at_least=1000)
    assert list(pack.iterdir()) == []


def test_foreign_files_among_packs_and_the_unfinished_are_kept(store: Path, again: Callable[[], Summary]) -> None:
    (store / "packs" / "mine").mkdir(parents=True)
    (store / "packs" / "mine" / "rows.parquet").write_text("mine")
    (store / "packs" / "notes.txt").write_text("mine")
    (store / "unfinished" / "draft").mkdir(parents=True)
    (store / "unfinished" / "draft" / "rows.parquet").write_text("mine")
    (store / "unfinished" / "notes.old").write_text("mine")
    with Store(store) as opened:
        assert packs.pack(opened, at_least=1) == 4  # a reader may pack: it removes nothing that is not its own
    assert (store / "packs" / "notes.txt").is_file()
    summary = again()
    assert sorted(problem.what for problem in summary.problems) == [
        "packs/mine",
        "packs/notes.txt",
        "unfinished/draft",
        "unfinished/notes.old",
    ]
    assert len([path for path in store.glob("quarantine/*/**/*") if path.is_file() and path.read_text() == "mine"]) == 4
