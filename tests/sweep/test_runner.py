"""Sweeps: the same numbers as one run at a time, work shared, what is there skipped, and whatever fails survived."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dualview.comparison import finetuning
from dualview.comparison import run as comparison
from dualview.io.errors import UserError
from dualview.options import RunOptions
from dualview.store.store import Store
from dualview.sweep import worker
from dualview.sweep.engine import Local
from dualview.sweep.runner import sweep
from dualview.sweep.spec import Spec
from sweep.study import Counter, grid, rows_by_query, rows_on_disk, save_study


def without_run(content: dict[str, Any]) -> dict[str, Any]:
    del content["provenance"]["run"]
    return content


# ---------------------------------------------------------------------------------------------------- the same, faster


def test_shared_work_changes_no_number(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"seed": [1, 2], "lr": [0.01, "auto"], "ft_rule": "layer-causal", "controls": "quick"}
    asked = Counter(comparison.ask)
    monkeypatch.setattr(comparison, "ask", asked)
    summary = sweep(grid(base, **axes), tmp_path / "store")
    assert (summary.computed, summary.failed) == (4, ())
    # One zero-shot pass for all, one in-context pass for each seed, and each cell's own fine-tuned pass.
    assert asked.calls == 1 + 2 + 4
    with Store(tmp_path / "store") as store:
        for stored in store.results():
            options = {name: x for name, x in store.manifest(stored.key).options.items() if x is not None}
            alone = comparison.run(RunOptions.make(**options))
            assert without_run(stored.result.to_json()) == without_run(alone.to_json())


def test_sweeps_that_share_an_engine_load_the_model_once(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Counter(worker.load)
    monkeypatch.setattr(worker, "load", loaded)
    engine = Local()
    for name, rule in (("one", "sgd"), ("one", "layer-causal"), ("two", "sgd")):
        assert sweep(grid(base, ft_rule=rule), tmp_path / name, engine=engine).computed == 1
    assert loaded.calls == 1
    sweep(grid(base), tmp_path / "alone")
    for one, other in zip(*(rows_on_disk(tmp_path / name).items() for name in ("two", "alone")), strict=True):
        assert one == other
    with pytest.raises(UserError, match="are for Ray"):
        sweep(grid(base), tmp_path / "store", engine=engine, workers=1, cpus=1.0)


def test_rules_train_each_grid_once(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[str] = []

    def note(_lm: Any, trainings: Any, recipe: Any, *_: Any) -> None:
        if len(trainings) > 1:
            grids.append(recipe.rule)

    monkeypatch.setattr(finetuning, "train_steps", Counter(finetuning.train_steps, note))
    sweep(grid(base, ft_rule=["sgd", "layer-causal"], lr="auto", controls="full"), tmp_path / "store")
    assert sorted(grids) == ["layer-causal", "linearised", "sgd"]


@pytest.mark.parametrize(
    "axes",
    [
        {"seed": ["auto", 1], "lr": [0.01, 0.02]},
        {"at": ["prompt", "label0"], "batch_size": [None, 2], "lr": "auto"},
        {"shots": [2, 3], "bos": ["yes", "no"], "calibrate": True},
        {"dtype": ["float32", "float64"], "controls": ["none", "quick"], "weights": "untrained"},
        {"ft_rule": ["sgd", "layer-causal"], "lr": ["auto", 0.01], "controls": "full"},
    ],
)
def test_any_grid_is_its_runs_one_by_one(axes: dict[str, Any], base: dict[str, Any], tmp_path: Path) -> None:
    spec = Spec.make(grid(base, **axes))
    assert not sweep(spec, tmp_path / "store").failed
    with Store(tmp_path / "store") as store:
        kept = {
            json.dumps(content["provenance"]["options"], sort_keys=True): without_run(content)
            for content in (stored.result.to_json() for stored in store.results())
        }
    alone = [without_run(comparison.run(options).to_json()) for options in spec.cells()]
    assert kept == {json.dumps(c["provenance"]["options"], sort_keys=True): c for c in alone}


def test_a_model_is_loaded_once(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Path(shutil.copytree(base["model"], tmp_path / "other"))
    loaded = Counter(worker.load)
    monkeypatch.setattr(worker, "load", loaded)
    sweep(grid(base, model=[base["model"], str(other)], seed=[1, 2, 3]), tmp_path / "store")
    assert loaded.calls == 2


def test_shards_together_are_the_whole(base: dict[str, Any], tmp_path: Path) -> None:
    spec = grid(base, seed=[1, 2], lr=[0.01, 0.02])
    whole = sweep(spec, tmp_path / "whole")
    parts = [sweep(spec, tmp_path / "parts", shard=f"{number}/3") for number in (3, 1, 2)]
    assert whole.computed == sum(part.computed for part in parts) == 4
    assert [part.cells for part in parts] == [2, 1, 1]
    assert rows_on_disk(tmp_path / "whole") == rows_on_disk(tmp_path / "parts")
    assert rows_by_query(tmp_path / "whole") == rows_by_query(tmp_path / "parts")


# ----------------------------------------------------------------------------------------------------------- skipping


def test_what_is_there_is_not_computed_again(base: dict[str, Any], tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert sweep(grid(base, seed=[1, 2]), store).computed == 2
    more = sweep(grid(base, seed=[1, 2, 3], save_records=False), store)
    assert (more.done_before, more.computed) == (2, 1)
    said: list[str] = []
    assert sweep(grid(base, seed=[1, 2, 3]), store, dry_run=True, say=said.append).left == 0
    assert said == ["3 cells (3 seed): 3 done, 0 to do"]


def test_another_model_behind_the_name_is_noticed(tmp_path: Path) -> None:
    base = save_study(tmp_path)
    store, weights = tmp_path / "store", Path(base["model"]) / "model.safetensors"
    assert sweep(base, store).computed == 1
    original = weights.read_bytes()
    tensors = load_file(weights)
    tensors["lm_head.weight"] *= 1.5
    save_file(tensors, weights, {"format": "pt"})
    assert sweep(base, store).computed == 1
    with Store(store) as opened:
        assert len(opened.keys()) == 1 and len(opened.keys(current=False)) == 2
        [changed] = opened.keys()
    weights.write_bytes(original)
    assert sweep(base, store).computed == 0  # the first one is still there, and answers again
    with Store(store) as opened:
        assert opened.keys() != [changed] and len(opened.to_frame(current=False)) == 2


def test_a_model_that_changes_under_the_sweep_is_not_remembered_as_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_study(tmp_path)
    store, weights = tmp_path / "store", Path(base["model"]) / "model.safetensors"
    original = weights.read_bytes()

    def saved_anew(*_: object) -> None:
        tensors = load_file(weights)
        tensors["lm_head.weight"] *= 1.5
        save_file(tensors, weights, {"format": "pt"})

    with monkeypatch.context() as patched:
        patched.setattr(worker, "load", Counter(worker.load, saved_anew))
        assert sweep(base, store).computed == 1
    with Store(store) as opened:
        [changed] = opened.keys()
    weights.write_bytes(original)
    assert sweep(base, store).computed == 1  # the plan was made for these weights, and others were measured
    with Store(store) as opened:
        assert opened.keys() != [changed]


def test_a_model_saved_again_is_the_same_model(tmp_path: Path) -> None:
    base = save_study(tmp_path)
    weights = Path(base["model"]) / "model.safetensors"
    assert sweep(base, tmp_path / "store").computed == 1
    save_file(load_file(weights), weights, {"format": "pt", "saved": "again"})
    again = sweep(base, tmp_path / "store")
    assert (again.computed, again.elsewhere) == (0, 1)  # found by its cell key once the model was loaded
    assert sweep(base, tmp_path / "store").done_before == 1  # and remembered


def test_the_same_rows_under_another_name_are_the_same_cell(base: dict[str, Any], tmp_path: Path) -> None:
    task = Path(shutil.copytree(Path(base["task"]).parent, tmp_path / "task")) / "tiny.yaml"
    assert sweep(base, tmp_path / "store").computed == 1
    assert sweep(grid(base, task=str(task)), tmp_path / "store").computed == 0
    (task.parent / "validation.jsonl").write_text(
        "".join(reversed((task.parent / "validation.jsonl").read_text().splitlines(keepends=True)))
    )
    assert sweep(grid(base, task=str(task)), tmp_path / "store").computed == 1


def test_a_dry_run_makes_no_store(base: dict[str, Any], tmp_path: Path) -> None:
    summary = sweep(grid(base, seed=[1, 2]), tmp_path / "store", dry_run=True)
    assert summary.left == 2 and not (tmp_path / "store").exists()


def test_a_dry_run_refuses_what_the_run_would(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert sweep(base, tmp_path / "mine", dry_run=True).left == 1  # empty: a store may be made here
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for dry_run in (True, False):
        with pytest.raises(UserError, match="is not a store"):
            sweep(base, tmp_path / "mine", dry_run=dry_run)
        with pytest.raises(UserError, match="is a file"):
            sweep(base, tmp_path / "mine" / "notes.txt", dry_run=dry_run)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
