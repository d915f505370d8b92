"""Trackers really get every computed cell; if one fails, the sweep continues."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dualview.io.errors import UserError
from dualview.store.store import Store
from dualview.sweep.runner import sweep
from dualview.sweep.trackers import TRACKERS, TensorBoard
from sweep.study import grid


def rows(store: Path) -> dict[str, dict[str, Any]]:
    with Store(store) as opened:
        return {row["key"]: row for row in opened.to_frame().to_dict("records")}


def test_tensorboard_holds_every_cell(base: dict[str, Any], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = tmp_path / "store"
    sweep(grid(base, seed=[1, 2], controls="quick"), store, track=["tensorboard"])
    cells = rows(store)
    assert {folder.name for folder in (store / "tracked" / "tensorboard").iterdir()} == {key[:16] for key in cells}
    for key, row in cells.items():
        events = EventAccumulator(str(store / "tracked" / "tensorboard" / key[:16]))
        events.Reload()
        for name in ("accuracy_icl", "sim_aou_raw", "sim_aou_raw_floor", "rec2ftp_chance"):
            [scalar] = events.Scalars(name)
            assert scalar.value == pytest.approx(row[name], rel=1e-6)
        [text] = events.Tensors("options/text_summary")
        assert f"seed: {row['seed']}" in text.tensor_proto.string_val[0].decode()
    before = sorted(store.rglob("events*"))
    assert sweep(grid(base, seed=[1, 2], controls="quick"), store, track=["tensorboard"]).computed == 0
    assert sorted(store.rglob("events*")) == before  # only computed cells are logged


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_trackio_holds_the_cell(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio

    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "trackio")
    said: list[str] = []
    sweep(base, tmp_path / "store", track=["trackio"], say=said.append)
    assert not any("trackio failed" in line for line in said)
    [(key, row)] = rows(tmp_path / "store").items()
    [database] = (tmp_path / "trackio").glob("*.db")
    connection = sqlite3.connect(database)
    logged = [json.loads(text) for (text,) in connection.execute("SELECT metrics FROM metrics")]
    names = {name for (name,) in connection.execute("SELECT run_name FROM metrics")}
    connection.close()
    assert names == {key[:16]} and logged[0]["accuracy_icl"] == row["accuracy_icl"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_writes_the_cell_offline(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    said: list[str] = []
    sweep(base, tmp_path / "store", track=["wandb"], say=said.append)
    assert not any("wandb failed" in line for line in said)
    [key] = rows(tmp_path / "store")
    [log] = (tmp_path / "store" / "tracked" / "wandb").glob(f"wandb/offline-run-*-{key[:32]}/*.wandb")
    content = log.read_bytes()
    assert b"sim_aou_raw" in content and b"accuracy_icl" in content and b"ft_rule" in content


def test_a_tracker_that_fails_is_not_used_again(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def broken(_self: object, key: str, *_: object) -> None:
        calls.append(key)
        raise RuntimeError("no network")

    monkeypatch.setattr(TensorBoard, "_log", broken)
    said: list[str] = []
    summary = sweep(grid(base, seed=[1, 2, 3]), tmp_path / "store", track=["tensorboard"], say=said.append)
    assert (summary.computed, summary.failed, len(calls)) == (3, (), 1)
    assert "tensorboard failed (no network) and is left out from now on; the store is not affected" in said


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_missing_package_is_named(
    name: str, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TRACKERS[name], "module", "no_such_package")
    with pytest.raises(UserError, match=rf"--track {name} needs a package.*dualview\[track\]"):
        sweep(base, tmp_path / "store", track=[name])
