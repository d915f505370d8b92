"""The store: what goes in comes out exactly, and what is damaged is found, named, set aside and computed again."""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dualview.errors import UserError
from dualview.metrics.prediction import accuracy
from dualview.options import RunOptions
from dualview.result import Result
from dualview.runs import claims, packs, places
from dualview.runs.index import Index
from dualview.runs.reading import load
from dualview.runs.runner import Summary, sweep
from dualview.runs.store import Store
from dualview.runs.tables import TABLES, at
from runs.study import grid, rows_by_query, rows_on_disk


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished store, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "store"))


@pytest.fixture
def again(base: dict[str, Any], store: Path) -> Callable[[], Summary]:
    """Runs the finished store's grid again."""
    return lambda: sweep(grid(base, seed=[1, 2], controls=["none", "quick"]), store)


def cell_of(store: Path, *, controls: str = "quick", seed: int = 1) -> Path:
    with Store(store) as opened:
        frame = opened.frame()
        [key] = frame.loc[(frame.controls == controls) & (frame.seed == seed), "key"]
        return opened.places.cell(key)


# ------------------------------------------------------------------------------------------------------ what is kept


def test_rows_say_what_the_results_say(finished: Path) -> None:
    with Store(finished) as store:
        results = {stored.key: stored.result.to_json() for stored in store.results()}
    rows = rows_by_query(finished)
    assert {row["key"] for row in rows["cells"]} == set(results) and len(results) == 4
    for row in rows["cells"]:
        content = results[row["key"]]
        for name in ("accuracy.zsl", "rec2ftp.value", "rec2ftp.n_ft", "sim_aou.raw", "sim_am.delta", "update_norm.ft"):
            assert row[name.replace(".", "_")] == at(content, name)
        assert (row["lr"], row["seed"], row["verdict"]) == (0.03, row["seed"], at(content, "verdict.overall"))
        assert row["sim_aou_raw_floor"] == at(content, "verdict.by_metric.sim_aou.floor")
        assert row["sim_am_delta_ci_low"] == (at(content, "controls.sim_am.ci") or [None])[0]
        layers = [layer for layer in rows["layers"] if layer["key"] == row["key"]]
        assert [layer["sim_aou_raw"] for layer in layers] == content["sim_aou"]["raw_per_layer"]
        queries = [query for query in rows["queries"] if query["key"] == row["key"]]
        assert [query["icl_log_probs"] for query in queries] == [query["icl"] for query in content["queries"]]
        right = [query["ft_predicted"] == query["gold"] for query in queries]
        assert sum(right) / len(right) == content["accuracy"]["ft"]
        floors = {(c["metric"], c["name"]): c["value"] for c in rows["controls"] if c["key"] == row["key"]}
        for metric, found in (content.get("controls") or {}).items():
            for name, value in found["floors"].items():
                assert floors[metric, name] == value


def test_a_result_comes_back_as_the_run_gave_it(base: dict[str, Any], finished: Path) -> None:
    from dualview.comparison import run

    with Store(finished) as store:
        for stored in store.results():
            manifest = store.manifest(stored.key)
            asked = {name: value for name, value in manifest.options.items() if value is not None}
            fresh = run(RunOptions.make(**asked)).to_json()
            kept = stored.result.to_json()
            del fresh["provenance"]["run"], kept["provenance"]["run"]
            assert kept == fresh
            assert Result.model_validate(store.result(stored.key).to_json()) == stored.result


def test_records_are_kept_if_asked_for(base: dict[str, Any], tmp_path: Path) -> None:
    plain = sweep(base, tmp_path / "store")
    asked = sweep(grid(base, save_records=True), tmp_path / "store")
    assert plain.computed == asked.computed == 1  # it was there, but without its tensors
    with Store(tmp_path / "store") as store:
        [stored] = store.results(current=False)
        records = store.records(stored.key)
        assert records is not None and records["icl"].h is not None
        assert accuracy(records["icl"].log_probs, records.gold) == stored.result.accuracy.icl
    assert sweep(grid(base, save_records=True), tmp_path / "store").computed == 0
    assert sweep(base, tmp_path / "store").computed == 0


def test_load_gives_a_frame(finished: Path) -> None:
    frame = load(finished)
    assert len(frame) == 4 and frame.current.all() and frame.accuracy_icl.between(0, 1).all()
    assert frame.sim_aou_raw.dtype == "float64" and frame.seed.dtype == "int64"


# ------------------------------------------------------------------------------------------------------ what is lost


def truncated(cell: Path) -> str:
    path = cell / "queries.parquet"
    path.write_bytes(path.read_bytes()[:100])
    return "queries.parquet has 100 bytes instead of"


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
    assert (aside / "why.txt").is_file() and (aside / Path(problem.what).name).is_dir()  # nothing is thrown away
    assert rows_on_disk(store) == rows_on_disk(finished)
    assert rows_by_query(store) == rows_by_query(finished)
    assert again().problems == ()


def test_a_damaged_cell_is_named_by_readers_too(store: Path) -> None:
    cell = cell_of(store)
    (store / "index.sqlite").unlink()
    said = truncated(cell)
    with Store(store) as opened:
        assert [said in str(problem) for problem in opened.problems] == [True]
        assert len(opened.frame()) == 3


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
    assert (store / "study.yaml").read_text() == "a: 1"  # beside the cells it does no harm, and stays
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
    for name in ("0123456789abcdef", ".0123456789abcdef"):  # packs that nobody knows of
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


# ------------------------------------------------------------------------------------- a cell in place of another


@pytest.fixture
def with_tensors(base: dict[str, Any], store: Path) -> Callable[[], Summary]:
    """Asks for the tensors of two cells that are there without them."""
    return lambda: sweep(grid(base, seed=[1, 2], save_records=True), store)


def test_a_cell_that_cannot_be_replaced_stays(
    store: Path, with_tensors: Callable[[], Summary], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, failures = Path.rename, [errno.EIO, errno.ENOSPC]

    def failing(self: Path, target: Path) -> Path:
        if self.parent.name == "unfinished" and self.suffix == "" and failures:
            raise OSError(failures.pop(), "not now")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    summary = with_tensors()
    assert summary.computed == 0 and ["not now" in given_up.reason for given_up in summary.failed] == [True, True]
    assert rows_on_disk(store) == rows_on_disk(finished) and list((store / "unfinished").iterdir()) == []
    assert with_tensors().computed == 2


class Killed(BaseException):
    """The process ends here: nothing that would have followed happens."""


def test_a_kill_between_two_renames_loses_no_cell(
    store: Path,
    again: Callable[[], Summary],
    with_tensors: Callable[[], Summary],
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        found = rename(self, target)
        if Path(target).suffix == ".old":
            raise Killed
        return found

    def nothing(*_: object) -> None: ...

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        patched.setattr("dualview.runs.store.put_back", nothing)
        with pytest.raises(Killed):
            with_tensors()
    [aside] = (store / "unfinished").glob("*.old")
    assert len(list(store.glob("cells/*/*"))) == 3
    with Store(store) as opened, claims.take(opened.places.claims, aside.stem) as claim:  # pyright: ignore[reportOptionalContextManager]
        assert claim is not None
        opened.mend()
        assert aside.is_dir()  # while its process lives, it is not touched
    summary = again()
    assert (summary.done_before, summary.computed, summary.problems) == (4, 0, ())
    assert not aside.exists() and rows_on_disk(store) == rows_on_disk(finished)
    assert with_tensors().computed == 2


# ----------------------------------------------------------------------------------------------------------- folders


def test_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no store"):
        Store(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        Store(tmp_path / "file", create=True)
    with pytest.raises(UserError, match="is not a store"):
        Store(tmp_path, create=True)  # it holds somebody's file


def test_a_store_that_cannot_be_written_can_be_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, to whom no folder is read-only: the system's refusal is put in its way."""
    truncated(cell_of(store))

    def refuse(self: object, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    before = sorted(store.rglob("*"))
    with Store(store) as opened:
        assert not opened.writable
        assert len(opened.problems) == 1 and len(opened.frame()) == 3 and len(list(opened.results())) == 3
    assert sorted(store.rglob("*")) == before
    with pytest.raises(UserError, match="cannot be written"):
        Store(store, create=True)


def test_no_room_for_the_index(store: Path, again: Callable[[], Summary], monkeypatch: pytest.MonkeyPatch) -> None:
    (store / "index.sqlite").unlink()
    add = Index.add

    def full(self: Index, *given: Any) -> None:
        if self.path is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, *given)

    monkeypatch.setattr(Index, "add", full)
    with Store(store) as opened:
        assert not opened.writable and len(opened.frame()) == 4
    with pytest.raises(UserError, match=r"cannot be written .*No space left"):
        again()


def test_machines_on_a_network_disk_have_their_own_index(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, again: Callable[[], Summary]
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 2 0:1 / / rw - ext4 /dev/x rw\n2 3 0:2 / {tmp_path} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr(places, "_MOUNTS", mounts)
    for host in ("one", "two"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert again().done_before == 4
        assert (store / f"index-{host}.sqlite").is_file()


def test_row_files_are_plain_parquet(finished: Path) -> None:
    for table in TABLES:
        for path in finished.glob(f"cells/*/*/{table}.parquet"):
            assert pq.read_table(path).num_columns > 4
    assert not [path for path in finished.rglob("*") if path.suffix in (".pkl", ".pickle", ".pt", ".bin")]
    connection = sqlite3.connect(finished / "index.sqlite")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()
