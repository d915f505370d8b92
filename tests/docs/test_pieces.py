"""A piece of the second edition in several processes: who computes what, and what remains of one that is killed."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from docs.blocks import ROOT
from dualview.store import Store
from dualview.sweep.spec import Spec
from equivalence import tiny

sys.path.insert(0, str(ROOT / "studies"))

import pieces
import second

ALL = argparse.Namespace(arms=None, models=None, seeds=None, tasks=None, device="cpu")
CELL: dict[str, Any] = {"shots": 3, "n_queries": 6, "controls": "none", "labels": "natural"}


def written(folder: Path, arms: dict[str, Any], **more: Any) -> Path:
    study = {
        "models": [str(tiny.save_model(folder / "model"))],
        "seeds": "1",
        "tasks": [{"task": [str(tiny.save_task(folder / "task"))]}],
        "arms": arms,
        **more,
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return folder / "study.yaml"


def test_a_cell_that_another_process_holds_is_passed_over_and_then_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so are cells that it chooses."""
    arms = {
        "first": {**CELL, "lr": [0.01, 0.02]},
        "chosen": {**CELL, "lr": 0.5, "learnt": True},
        "last": {**CELL, "lr": [0.03, 0.04, 0.05]},
    }
    study, store = written(tmp_path, arms), tmp_path / "store"
    (grid,) = next(second.stages(second.read_study(study), ALL)).grids
    with Store(store, create=True) as opened:
        lock = opened.lock(Spec.make(grid).cells()[0])
    assert lock is not None
    order: list[float] = []
    compute = pieces.Sharing._outcome

    def noted(self: pieces.Sharing, worker: Any, options: Any, is_known: Any) -> Any:
        order.append(options.lr)
        if options.lr == 0.04:
            lock.release()
        return compute(self, worker, options, is_known)

    def learnt(cells: pd.DataFrame, _grid: object) -> list[str]:
        return list(cells.loc[cells["lr"] == 0.01, "task"])

    monkeypatch.setattr(pieces.Sharing, "_outcome", noted)
    monkeypatch.setattr(second, "where_both_learn", learnt)
    given = [str(store), "--file", str(study), "--device", "cpu"]
    assert second.main([*given, "--minutes", "0", "--arms", "first"]) == 0 and order == []
    assert second.main([*given, "--minutes", "0.1", "--arms", "first"]) == 0 and order == [0.02]
    assert capsys.readouterr().out.endswith("not all is done: the same command continues\n")  # it is the other's
    assert second.main(given) == 0 and order == [0.02, 0.03, 0.04, 0.01, 0.5, 0.05]
    assert capsys.readouterr().out.endswith("all done\n")


def test_what_fails_is_tried_once_and_a_missing_model_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DUALVIEW_CACHE", str(tmp_path / "cache"))
    own = {**CELL, "models": [str(tmp_path / "model")]}
    arms = {
        "missing": {**CELL, "models": ["qwen2.5-coder-0.5b"]},
        "failing": {**own, "lr": [0.01, 0.02]},
        "good": {**own, "lr": [0.03, 0.04]},
    }
    study = written(tmp_path, arms, models=["qwen2.5-coder-0.5b", str(tmp_path / "model")])
    store, tried, compute = tmp_path / "store", list[float](), pieces.Local._outcome

    def fails(self: pieces.Local, worker: Any, options: Any, is_known: Any) -> Any:
        tried.append(options.lr)
        return pieces.Failed("It cannot.") if options.lr == 0.01 else compute(self, worker, options, is_known)

    monkeypatch.setattr(pieces.Local, "_outcome", fails)
    (grid,) = list(second.stages(second.read_study(study), ALL))[1].grids
    with Store(store, create=True) as opened:
        lock = opened.lock(Spec.make(grid).cells()[1])  # so that its stage is gone through again
    assert lock is not None
    given = [str(store), "--file", str(study), "--device", "cpu"]
    assert second.main([*given, "--minutes", "0.15"]) == 2 and tried == [0.01, 0.03, 0.04]
    lock.release()
    told = capsys.readouterr()
    assert told.out.endswith("not all is done: the same command continues\n")
    failed, missing = told.err.splitlines()[-2:]
    assert failed == "failed: lr 0.01: It cannot."
    assert missing.startswith("The model qwen2.5-coder-0.5b cannot be used (it is not on this machine); run `dualview")
    assert second.main([*given, "--plan"]) == 0
    assert [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[1:5]] == [
        *(["1", "0"], ["2", "0"], ["2", "2"]),
        ["5", "2"],
    ]


def test_several_processes_share_a_store_and_one_of_them_may_be_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {"slow": {**CELL, "n_queries": 8, "lr": [0.01, 0.02, 0.03]}, "quick": {**CELL, "controls": "quick"}}
    study, store = written(tmp_path, arms, seeds="1:3"), tmp_path / "store"
    command = [sys.executable, str(pieces.SCRIPT), str(store), "--file", str(study), "--device", "cpu"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command += ["--workers", "2", "--threads", "1", "--minutes", "5"]
    running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list((store / "claims").glob("*.lock")):  # until one of them computes
        assert running.poll() is None, running.communicate()[1]
        time.sleep(0.05)
    workers = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(workers) == 2
    os.kill(int(workers[0]), signal.SIGKILL)
    out, err = running.communicate(timeout=240)
    assert running.returncode == 0 and out.splitlines()[-1] == "all done", err
    assert "worker 1 of 2 was killed by signal 9; what it had finished is kept" in err
    with Store(store) as opened:
        assert len(opened.keys()) == 12 and not opened.problems
    computed = sum(int(line.split(" computed")[0].split()[-1]) for line in out.splitlines() if " computed" in line)
    assert computed in (11, 12)  # the last of these may have been the killed one's, finished and not yet told
    assert not list((store / "claims").glob("*.lock")) and not list((store / "unfinished").iterdir())
    assert second.main([*command[2:5], "--device", "cpu"]) == 0 and capsys.readouterr().out == "all done\n"


def test_a_first_cell_takes_what_its_arm_expects() -> None:
    pace = pieces.Pace(time.monotonic() + 10)
    assert not pace.out_of_time()
    pace.longest["long",] = 20.0
    assert pace.out_of_time()  # nothing else is known of it
    pace.expected = 1.0
    assert not pace.out_of_time()
    pace.kind = ("long",)
    assert pace.out_of_time()
