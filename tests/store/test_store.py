"""The store: what goes in comes out exactly, and a cell takes another's place whole or not at all."""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualview.comparison.result import Result
from dualview.io.errors import UserError
from dualview.io.hashing import sha256_of
from dualview.metrics.predictions import accuracy
from dualview.options import RunOptions
from dualview.store import locks
from dualview.store import paths as places
from dualview.store.api import load, ls, query, show
from dualview.store.cell_key import asked_id
from dualview.store.index import Index
from dualview.store.packs.compaction import pack
from dualview.store.store import Store
from dualview.store.tables import TABLES, at, schema
from dualview.sweep.runner import Summary, sweep
from sweep.study import cell_of, grid, rows_by_query, rows_on_disk, truncated

# ------------------------------------------------------------------------------------------------------ what is kept


def as_before(cell: Path) -> str:
    """Rewrite a cell as it was stored before NUMERICS_VERSION: under a hash of the source code. Returns its key."""
    key, code = "0" + "ab" * 31 + "1", "c0de" * 16
    folder = cell.parent.parent / key[:2] / key
    folder.parent.mkdir(exist_ok=True)
    cell.rename(folder)
    content = json.loads((folder / "manifest.json").read_text())
    for table in TABLES:
        path = folder / f"{table}.parquet"
        rows = [
            {**row, "key": key} | ({"code": code} if "code" in row else {}) for row in pq.read_table(path).to_pylist()
        ]
        pq.write_table(pa.Table.from_pylist(rows, schema=schema(table)), path)
        content["files"][path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    del content["identity"]["library"]
    content["identity"]["code"] = code
    (folder / "manifest.json").write_text(json.dumps({**content, "key": key, "plan": "1" * 64}))
    return key


def test_a_cell_stored_before_there_was_a_version(base: dict[str, Any], store: Path) -> None:
    """It is read and current as before, until a sweep computes it again; then it is still there."""
    old = as_before(cell_of(store, controls="none"))
    with Store(store) as opened:
        assert (
            set(opened.keys()) > {old}
            and opened.problems == []
            and opened.manifest(old).identity["code"] == "c0de" * 16
        )
    assert old in set(load(store).key) and len(load(store)) == 4
    assert old in {row["key"] for row in ls(store).cells} and show(old[:8], store).result.accuracy.icl >= 0
    assert query(f"SELECT count(*) AS n FROM queries WHERE key = '{old}'", store).to_pylist() == [{"n": 6}]
    summary = sweep(grid(base, seed=[1, 2], controls=["none", "quick"]), store)
    assert (summary.done_before, summary.computed, summary.failed) == (3, 1, ())
    assert old not in set(load(store).key) and old in set(load(store, current=False).key)


def with_fewer_options(cell: Path) -> None:
    """Rewrite a cell as a dualview stored it that had no option ft_precision."""
    path = cell / "manifest.json"
    content = json.loads(path.read_text())
    del content["options"]["ft_precision"]
    path.write_text(json.dumps({**content, "asked": asked_id(content["options"])}))


@pytest.mark.parametrize("kept", ["index", "no index", "packed", "packed, no index", "damaged pack"])
def test_a_cell_stored_when_there_were_fewer_options(
    base: dict[str, Any], store: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers today's options, so a sweep that computes it again replaces it: `ls` lists every cell once."""
    before = load(store)
    old = as_before(cell_of(store, controls="none"))
    with_fewer_options(places.StorePaths(store).cell(old))
    with monkeypatch.context() as patched:  # that dualview
        for room in ("folder", "packs.compaction"):
            patched.setattr(f"dualview.store.{room}.OPTIONS_VERSION", 1)
        patched.setattr("dualview.store.cell.asked_now", lambda _, asked: asked)
        with Store(store) as opened:
            assert len(opened.keys()) == 4
            assert "pack" not in kept or pack(opened, at_least=1) == 4
    if "no index" in kept:
        for path in store.glob("index.sqlite*"):
            path.unlink()
    if kept == "damaged pack":
        next(store.glob("packs/*/layers.parquet")).write_bytes(b"")
    assert old in {row["key"] for row in ls(store).cells} and len(ls(store).cells) == 4
    summary = sweep(grid(base, seed=[1, 2], controls=["none", "quick"]), store)
    assert (summary.done_before, summary.computed, summary.failed) == (3, 1, ())
    listed = [row["key"] for row in ls(store).cells]
    assert sorted(listed) == sorted(before.key) and old not in listed
    everything = {row["key"]: row["current"] for row in ls(store, all=True).cells}
    assert everything == {**dict.fromkeys(before.key, True), old: False}
    with Store(store) as opened:
        assert pack(opened, at_least=1) and opened.index.superseded() == [old]
    assert sorted(load(store).key) == sorted(before.key)


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
    from dualview.comparison.run import run

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
        patched.setattr("dualview.store.folder.put_back", nothing)
        with pytest.raises(Killed):
            with_tensors()
    [aside] = (store / "unfinished").glob("*.old")
    assert len(list(store.glob("cells/*/*"))) == 3
    with Store(store) as opened, locks.acquire(opened.paths.locks, aside.stem) as lock:  # pyright: ignore[reportOptionalContextManager]
        assert lock is not None
        opened.repair()
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
        assert len(opened.problems) == 1 and len(opened.to_frame()) == 3 and len(list(opened.results())) == 3
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
        assert not opened.writable and len(opened.to_frame()) == 4
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
