"""The second edition of the study: its stages, its matched rates, and that a piece stops in time and continues."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from dualview.store.api import query
from dualview.sweep.spec import Spec
from equivalence import tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))

import front
import second

ALL = argparse.Namespace(arms=None, models=None, seeds=None, tasks=None, device="auto")


def test_every_stage_is_a_valid_grid() -> None:
    study = yaml.safe_load(second.FILE.read_text())
    stages = list(second.stages(study, ALL))
    assert [stage.arm for stage in stages if stage.model == "embedded" and stage.seed in ("1", "auto")] == list(
        study["arms"]
    )
    assert (stages[0].arm, stages[0].model, stages[4].seed) == ("comparison", "qwen2.5-coder-1.5b", "5")
    cells = {stage.arm: sum(len(Spec.make(grid).cells()) for grid in stage.grids) for stage in stages}
    expected = {
        "comparison": 11,
        "draws": 11,
        "abstract": 11,
        "abstract_draws": 44,
        "rates": 264,
        "epochs": 528,
        "matched": 44,
        "layer_causal": 22,
        "distilled": 22,
    }
    assert cells == {**expected, "dai_best": 11, "dai_all": 11}
    (dai,) = {
        grid.cells()[0] for s in stages if s.arm == "dai_best" for grid in [Spec.make(s.grids[1])] if "1.5b" in s.model
    }
    assert (dai.at, dai.separator, dai.bos, dai.seed, dai.n_queries) == ("label0", "eos", "auto", "auto", 2000)
    part = argparse.Namespace(**{**vars(ALL), "arms": "rates", "models": "embedded", "seeds": "2:3", "tasks": "mr"})
    chosen = list(second.stages(study, part))
    assert [(s.arm, s.model, s.seed, s.grids[0]["task"]) for s in chosen] == [
        ("rates", "embedded", "2", ["mr"]),
        ("rates", "embedded", "3", ["mr"]),
    ]


def test_a_match_has_the_fewest_epochs_then_the_nearest_accuracy() -> None:
    columns = ["task", "labels", "ft_loss", "epochs", "lr", "accuracy_icl", "accuracy_ft", "ft_status"]
    rows = [
        ("mr", "natural", "all", 1, 0.01, 0.90, 0.80, "ok"),
        ("mr", "natural", "all", 2, 0.01, 0.90, 0.88, "ok"),
        ("mr", "natural", "all", 2, 0.03, 0.90, 0.91, "ok"),
        ("mr", "natural", "all", 4, 0.01, 0.90, 0.90, "ok"),
        ("mr", "natural", "label", 1, 0.01, 0.90, 0.90, "collapsed"),
        ("cb", "abstract", "all", 1, 0.03, 0.50, 0.49, "ok"),
        ("cb", "abstract", "all", 1, 0.01, 0.50, 0.51, "ok"),
    ]
    found = second.matches(pd.DataFrame(rows, columns=columns), 0.02)
    assert {(row.task, row.epochs, row.lr) for row in found.itertuples()} == {("mr", 2, 0.03), ("cb", 1, 0.01)}


def test_the_order_for_a_short_time_is_of_cells_of_the_study() -> None:
    """And what was found before chooses the first: the draws in which both settings learn, with full controls."""
    study, short = (
        yaml.safe_load(second.FILE.with_name(f"{name}.yaml").read_text()) for name in ("second", "priority")
    )
    cells = {cell for stage in second.stages(study, ALL) for grid in stage.grids for cell in Spec.make(grid).cells()}
    asked = [(s, cell) for s in second.stages(short, ALL) for grid in s.grids for cell in Spec.make(grid).cells()]
    own = {cell for _, cell in asked}
    assert len(own) == len(asked) == 70 and own <= cells
    found = pd.read_parquet(second.COLLECTED / "cells.parquet")
    found = found[(found["labels"] == "natural") & (found["verdict_learning"] == "supported")]
    for model, arms in (("qwen2.5-coder-1.5b", "natural"), ("qwen2.5-coder-0.5b", "small")):
        learnt = found[found["model"] == model]
        full = [(str(cell.task), str(cell.seed)) for stage, cell in asked if stage.arm.startswith(arms)]
        assert set(full) == set(zip(learnt["task"], learnt["seed"].astype(str), strict=True))
        if arms == "natural":  # those that are there come last, and before them one draw of each task before others
            there = learnt[(learnt["controls"] == "full") & (front.numerics(learnt) >= 13)]
            done = {(task, str(seed)) for task, seed in zip(there["task"], there["seed"], strict=True)}
            assert set(full[-len(done) :]) == done
            assert {task for task, _ in done} | {full[0][0]} == {task for task, _ in full}
    looked = {cell.task for stage, cell in asked if stage.arm.startswith("look")}
    assert looked == {cell.task for stage, cell in asked if stage.learnt}
    assert all(stage.seconds for stage, _ in asked)


def test_tasks_on_which_both_learn_are_those_of_the_same_options() -> None:
    columns = ["task", "labels", "ft_loss", "ft_rule", "epochs", "controls", "learning"]
    rows = [
        ("mr", "abstract", "label", "sgd", 4, "quick", "supported"),
        ("cb", "abstract", "label", "sgd", 4, "quick", "not supported"),
        ("subj", "abstract", "all", "sgd", 4, "quick", "supported"),
        ("sst2", "abstract", "label", "sgd", 1, "none", "supported"),
        ("agnews", "natural", "label", "sgd", 4, "full", "supported"),
        ("sst5", "abstract", "label", "sgd", 4, "none", None),
    ]
    grid = {"labels": "abstract", "ft_loss": "label", "epochs": 4, "controls": "full"}
    assert second.where_both_learn(pd.DataFrame(rows, columns=columns), grid) == ["mr"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("second")
    base: dict[str, Any] = {"shots": 3, "n_queries": 6, "controls": "none", "labels": ["natural", "abstract"]}
    arms = {
        "rates": {**base, "lr": [0.01, 0.03]},
        "matched": {**base, "controls": "quick", "match": 1.0},
        "again": {**base, "labels": "natural", "learnt": True, "seed": "1"},
    }
    study = {
        "models": [str(tiny.save_model(folder / "model"))],
        "seeds": "1:2",
        "tasks": [{"task": [str(tiny.save_task(folder / "task"))]}],
        "arms": arms,
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return folder / "small.yaml"


def test_a_piece_stops_in_time_and_the_next_continues(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [str(tmp_path / "store"), "--file", str(small), "--device", "cpu"]

    def piece(minutes: str) -> str:
        assert second.main([*given, "--minutes", minutes]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert piece("0.0001") == "not all is done: the same command continues"
    counted = "SELECT controls, labels, count(*) AS n FROM cells GROUP BY 1, 2 ORDER BY 1, 2"
    assert sum(query(counted, tmp_path / "store")["n"].to_pylist()) == 1  # the cell that was under way is finished
    assert piece("9") == "all done" and piece("9") == "all done"
    found = query(counted, tmp_path / "store").to_pylist()
    assert [row["n"] for row in found] == [4, 4, 2, 2] and found[0]["labels"] == "abstract"
    assert second.main([*given, "--plan"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].split() == ["12", "12"]
    monkeypatch.setattr(second, "COLLECTED", tmp_path / "collected")
    assert second.main([*given[:1], "--collect"]) == 2
    assert "12 of 12 cells in" in capsys.readouterr().err and not (tmp_path / "collected").exists()
    assert second.main([*given, "--collect"]) == 0 and second.main([*given, "--collect"]) == 0
    assert len(pd.read_parquet(tmp_path / "collected" / "cells.parquet")) == 12
    capsys.readouterr()
    (tmp_path / "none.yaml").write_text("models: []")
    for path, why in (("none.yaml", "is no study: it lacks seeds, tasks, arms"), ("nowhere", "cannot be read")):
        assert second.main([*given[:1], "--file", str(tmp_path / path)]) == 2 and why in capsys.readouterr().err
    assert second.main([*given, "--arms", "none"]) == 2
    assert "The study has no 'none' among its arms: rates, matched, again." in capsys.readouterr().err
