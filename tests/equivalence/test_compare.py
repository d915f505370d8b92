"""`dualview.compare` from files to JSON, every number worked out again by `recompute`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualview
from close import assert_alike
from dualview.tasks.sampling import sample_demos, sample_queries
from dualview.tasks.task import load_task
from equivalence import cases, recompute, tiny

LR = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_task(tmp_path_factory.mktemp("task"))


def given(tmp_path: Path, demos: list[dict[str, Any]], queries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "demos": tiny.write_rows(tmp_path / "demos.jsonl", demos),
        "queries": tiny.write_rows(tmp_path / "queries.jsonl", queries),
    }


def run(folder: Path, task: Path, tmp_path: Path, **options: Any) -> dict[str, Any]:
    path = tmp_path / "result.json"
    options = {"dtype": "float64", "device": "cpu", "lr": LR, **options}
    result = dualview.compare(model=str(folder), task=str(task), json=path, **options)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found == json.loads(json.dumps(result.to_json()))
    return found


def agree(setup: recompute.Setup, found: dict[str, Any]) -> None:
    assert recompute.differences(setup.numbers(), found) == []
    # Log-probabilities are held to more than the metrics made of them.
    for mine, theirs in zip(setup.numbers()["queries"], found["queries"], strict=True):
        for name in recompute.SETTINGS:
            assert cases.worst(mine[name], theirs[name]) < cases.EXACT


DEMOS, QUERIES = tiny.rows(5, seed=11), tiny.rows(6, seed=12)


@pytest.mark.parametrize(
    ("options", "setup"),
    [
        ({}, {}),
        (
            {"at": "label0", "ft_loss": "label", "epochs": 2},
            {"at": "label0", "training": {"loss": "label", "epochs": 2}},
        ),
        ({"bos": "no", "separator": "eos", "ft_params": "qkv"}, {"bos": False, "separator": "eos"}),
        ({"ft_params": "v", "separator": " and "}, {"separator": " and ", "training": {"params": "v"}}),
        ({"ft_params": "all", "lr": 0.005}, {"lr": 0.005, "training": {"params": "all"}}),
        ({"ft_rule": "layer-causal", "batch_size": 1}, {"training": {"layer_causal": True}}),
    ],
    ids=["defaults", "label0", "no-bos-eos", "values", "all", "layer-causal"],
)
def test_every_number(folder: Path, task: Path, tmp_path: Path, options: dict[str, Any], setup: dict[str, Any]) -> None:
    if options.get("ft_params") == "qkv":
        setup = {**setup, "training": {"params": "qkv"}}
    found = run(folder, task, tmp_path, **given(tmp_path, DEMOS, QUERIES), **options)
    agree(recompute.Setup(folder, DEMOS, QUERIES, **{"lr": LR, **setup}), found)
    assert found["sim_am"]["delta_per_layer"][0] is None, "rotary positions leave layer 0 as it was: pure rounding"
    assert found["ft"] | {"rule": options.get("ft_rule", "sgd"), "loss": options.get("ft_loss", "all")} == found["ft"]
    assert found["ft"]["params"] == options.get("ft_params", "kv")
    assert found["ft"]["lr"] == options.get("lr", LR)
    assert found["ft"]["status"] in ("ok", "collapsed")


def test_single_precision_is_close_enough(folder: Path, task: Path, tmp_path: Path) -> None:
    """The default dtype, against the same float64 numbers; what is undefined in one is undefined in the other."""
    found = run(folder, task, tmp_path, **given(tmp_path, DEMOS, QUERIES), dtype="float32")
    assert recompute.differences(recompute.Setup(folder, DEMOS, QUERIES, LR).numbers(), found, within=1e-4) == []


def test_a_tokenizer_without_bos_begins_with_nothing(task: Path, tmp_path: Path) -> None:
    bare = tiny.save_model(tmp_path / "bare", bos=False)
    rows = given(tmp_path, DEMOS, QUERIES)
    agree(recompute.Setup(bare, DEMOS, QUERIES, LR, bos=False), run(bare, task, tmp_path, **rows))
    agree(recompute.Setup(bare, DEMOS, QUERIES, LR, bos=True), run(bare, task, tmp_path, **rows, bos="yes"))


def test_rows_keep_their_order(folder: Path, task: Path, tmp_path: Path) -> None:
    """The same rows the other way round: the queries' answers move with them, the demonstrations' order matters."""
    forward = run(folder, task, tmp_path, **given(tmp_path, DEMOS, QUERIES))
    turned = run(folder, task, tmp_path, **given(tmp_path, DEMOS, QUERIES[::-1]))
    for a, b in zip(forward["queries"], turned["queries"][::-1], strict=True):
        assert a["gold"] == b["gold"]
        assert all(cases.worst(a[name], b[name]) < 1e-12 for name in recompute.SETTINGS)
    back = run(folder, task, tmp_path, **given(tmp_path, DEMOS[::-1], QUERIES))
    agree(recompute.Setup(folder, DEMOS[::-1], QUERIES, LR), back)
    assert cases.worst(back["queries"][0]["icl"], forward["queries"][0]["icl"]) > 1e-6


def test_demonstrations_that_do_not_fit_are_dropped_from_the_end(task: Path, tmp_path: Path) -> None:
    short = tiny.save_model(tmp_path / "short", context=48)
    demos = tiny.rows(9, seed=13)
    rows = given(tmp_path, demos, QUERIES)
    for limit in (48, 40):
        found = run(short, task, tmp_path, **rows, max_context=None if limit == 48 else limit)
        setup = recompute.Setup(short, demos, QUERIES, LR, context=limit)
        assert 0 < len(setup.used) < len(demos)
        agree(setup, found)
        assert (found["task"]["shots"], found["task"]["shots_used"]) == (9, len(setup.used))
        assert found["ft"]["steps"] == len(setup.used), "fine-tuning sees the same list"
        assert any("truncation" in warning for warning in found["warnings"])
    with pytest.raises(dualview.UserError, match="demonstration"):
        run(short, task, tmp_path, **rows, max_context=17)
    with pytest.raises(dualview.UserError, match=r"[Qq]uery"):
        run(short, task, tmp_path, **rows, max_context=6)


def test_the_learning_rate_is_chosen_on_the_selection_rows(folder: Path, task: Path, tmp_path: Path) -> None:
    grid = (0.3, 1e-4, 0.03, 1e300)
    found = run(folder, task, tmp_path, **given(tmp_path, DEMOS, QUERIES), lr="auto", lr_grid=grid)
    selection = tiny.rows(10, seed=3)
    trials: dict[float, float | None] = {}
    for rate in grid[:3]:
        setup = recompute.Setup(folder, DEMOS, QUERIES, rate)
        trials[rate] = recompute.accuracy(setup.ask(setup.train().model, setup.start, selection), selection)
    trials[1e300] = None
    assert {trial["value"]: trial["accuracy"] for trial in found["selection"]["lr"]} == pytest.approx(trials)
    assert found["selection"]["lr"][3]["status"] == "diverged"
    best = max(accuracy for accuracy in trials.values() if accuracy is not None)
    chosen = min(rate for rate, accuracy in trials.items() if accuracy == best)
    assert found["ft"]["lr"] == chosen
    agree(recompute.Setup(folder, DEMOS, QUERIES, chosen), found)


def test_the_choice_never_sees_a_reported_query(folder: Path, task: Path, tmp_path: Path) -> None:
    """Other queries, other labels: the same rate and the same trials."""
    twisted = [{**row, "label": (row["label"] + 1) % 3} for row in tiny.rows(4, seed=40)]
    first = run(folder, task, tmp_path, shots=4, n_queries=6, lr="auto", lr_grid=(1e-3, 0.1), seed="auto")
    other = run(
        folder, task, tmp_path, shots=4, lr="auto", lr_grid=(1e-3, 0.1), seed="auto",
        queries=tiny.write_rows(tmp_path / "queries.jsonl", twisted),
    )  # fmt: skip
    assert_alike(first["selection"], other["selection"])
    assert first["provenance"]["seeds"] == other["provenance"]["seeds"]
    assert first["ft"]["lr"] == other["ft"]["lr"]
    assert_alike(first["ft"]["losses"], other["ft"]["losses"])


def test_the_seed_is_chosen_by_icl_on_the_selection_rows(folder: Path, task: Path, tmp_path: Path) -> None:
    found = run(folder, task, tmp_path, shots=4, n_queries=5, seed="auto")
    selection = tiny.rows(10, seed=3)
    trials: dict[int, float] = {}
    for seed in range(1, 8):
        demos = [{"text": r.fields["text"], "label": r.label} for r in sample_demos(load_task(task), seed, 4)]
        setup = recompute.Setup(folder, demos, selection, LR)
        trials[seed] = recompute.accuracy(setup.ask(setup.twin, setup.prefix, selection), selection)
    assert {trial["value"]: trial["accuracy"] for trial in found["selection"]["seed"]} == pytest.approx(trials)
    chosen = min(seed for seed, accuracy in trials.items() if accuracy == max(trials.values()))
    assert found["provenance"]["seeds"]["demos"] == chosen
    fixed = run(folder, task, tmp_path, shots=4, n_queries=5, seed=chosen)
    assert_alike(fixed["queries"], found["queries"])


def test_a_task_without_selection_rows_holds_some_out(folder: Path, tmp_path: Path) -> None:
    task = tiny.save_task(tmp_path / "task", selection=None)
    found = run(folder, task, tmp_path, shots=3, n_queries=4, lr="auto", lr_grid=(1e-3, 1e-2))
    loaded = load_task(task)
    held, pool = loaded.rows("selection"), loaded.rows("train")
    assert held and not {row.fields["text"] for row in held} & {row.fields["text"] for row in pool}
    assert len(found["selection"]["lr"]) == 2


def test_calibration_divides_out_the_prior(folder: Path, task: Path, tmp_path: Path) -> None:
    found = run(folder, task, tmp_path, **given(tmp_path, DEMOS, QUERIES), calibrate=True)
    setup = recompute.Setup(folder, DEMOS, QUERIES, LR)
    ways = {"zsl": (setup.twin, setup.start), "icl": (setup.twin, setup.prefix)}
    ways["ft"] = (setup.train().model, setup.start)
    for name, (twin, prefix) in ways.items():
        assert found["calibrated"]["accuracy"][name] == pytest.approx(setup.calibrated(twin, prefix, QUERIES))
    plain = run(folder, task, tmp_path, **given(tmp_path, DEMOS, QUERIES))
    assert "calibrated" not in plain
    assert plain["accuracy"] == found["accuracy"]
    assert_alike(plain["queries"], found["queries"])


def test_multiple_choice(folder: Path, tmp_path: Path) -> None:
    """Every row its own candidates, of differing number and length."""
    choices = [["Negative", "Positive"], ["the film", "a story of it", "plot"], ["cold and slow", "warm"]]
    demos = [{**row, "choices": choices[i % 3], "label": i % 2} for i, row in enumerate(DEMOS)]
    queries = [{**row, "choices": choices[(i + 1) % 3], "label": i % 2} for i, row in enumerate(QUERIES)]
    task = tiny.save_task(tmp_path / "task", labels=[], choices="choices")
    for name in ("train", "selection", "validation"):
        tiny.write_rows(tmp_path / "task" / f"{name}.jsonl", demos)
    found = run(folder, task, tmp_path, **given(tmp_path, demos, queries), calibrate=True)
    setup = recompute.Setup(folder, demos, queries, LR)
    agree(setup, found)
    assert [len(query["zsl"]) for query in found["queries"]] == [len(query["choices"]) for query in queries]
    assert found["calibrated"]["accuracy"]["zsl"] == pytest.approx(setup.calibrated(setup.twin, setup.start, queries))
    agree(recompute.Setup(folder, demos, queries, LR, at="label0"), run(
        folder, task, tmp_path, **given(tmp_path, demos, queries), at="label0"
    ))  # fmt: skip


@pytest.mark.parametrize("protocol", ["dai", "deutch"])
def test_the_papers_protocols(folder: Path, task: Path, tmp_path: Path, protocol: str) -> None:
    found = run(folder, task, tmp_path, protocol=protocol, shots=3, n_queries=4, lr_grid=(1e-3, 1e-2), lr="auto")
    seed = found["provenance"]["seeds"]["demos"]
    assert seed in range(1, 8) and len(found["selection"]["seed"]) == 7
    loaded = load_task(task)
    demos = [{"text": r.fields["text"], "label": r.label} for r in sample_demos(loaded, seed, 3)]
    queries = [{"text": r.fields["text"], "label": r.label} for r in sample_queries(loaded, 4)]
    layered = {"layer_causal": True} if protocol == "deutch" else {}
    setup = recompute.Setup(folder, demos, queries, found["ft"]["lr"], at="label0", separator="eos", training=layered)
    agree(setup, found)


def test_a_loaded_model_gives_the_same_result_and_stays_as_it_is(folder: Path, task: Path, tmp_path: Path) -> None:
    lm = dualview.load_model(str(folder), dtype="float64", device="cpu")
    before = {key: value.clone() for key, value in lm.model.state_dict().items()}
    rows = given(tmp_path, DEMOS, QUERIES)
    mine = dualview.compare(model=lm, task=str(task), lr=LR, dtype="float64", device="cpu", **rows).to_json()
    theirs = run(folder, task, tmp_path, **rows)
    assert_alike(mine["queries"], theirs["queries"])
    assert_alike(mine["sim_aou"], theirs["sim_aou"])
    assert all(torch.equal(value, before[key]) for key, value in lm.model.state_dict().items())
    assert mine["provenance"]["weights_hash"] == theirs["provenance"]["weights_hash"]


def test_saved_records_hold_what_was_measured(folder: Path, task: Path, tmp_path: Path) -> None:
    rows = given(tmp_path, DEMOS, QUERIES)
    result = dualview.compare(
        model=str(folder), task=str(task), dtype="float64", device="cpu", lr=LR, save_records=True,
        out=tmp_path / "out", **rows,
    )  # fmt: skip
    kept = dualview.load_records(tmp_path / "out" / "records.safetensors")
    again = dualview.compute_metrics(kept).to_json()
    whole = result.to_json()
    for key in ("rec2ftp", "sim_aou", "sim_am", "update_norm"):
        assert recompute.differences(again[key], whole[key]) == []
    setup = recompute.Setup(folder, DEMOS, QUERIES, LR)
    for name, twin, prefix in (("zsl", setup.twin, setup.start), ("icl", setup.twin, setup.prefix)):
        for i, answer in enumerate(setup.ask(twin, prefix, QUERIES)):
            setting = kept[name]
            assert setting.h is not None and setting.m is not None and setting.demo_mass is not None
            width = answer.m[0].shape[1]
            assert cases.worst(setting.h[i], answer.h) < cases.EXACT
            assert cases.worst(setting.m[i, :, :, :width], np.stack(answer.m)) < cases.EXACT
            assert cases.worst(setting.demo_mass[i], np.stack(answer.demo_mass)) < cases.EXACT


def test_one_answer_for_everything_is_a_warning(folder: Path, task: Path, tmp_path: Path) -> None:
    """Trained long enough on one label alone, the model answers everything with it, and the result says so."""
    demos = [{**row, "label": 1} for row in DEMOS]
    how: dict[str, Any] = {"lr": 0.3, "ft_loss": "label", "epochs": 6}
    found = run(folder, task, tmp_path, **given(tmp_path, demos, QUERIES), **how)
    setup = recompute.Setup(folder, demos, QUERIES, 0.3, training={"loss": "label", "epochs": 6})
    answers = setup.ask(setup.train().model, setup.start, QUERIES)
    assert {answer.log_probs.index(max(answer.log_probs)) for answer in answers} == {1}
    assert found["ft"]["status"] == "collapsed"
    assert any("collapsed" in warning for warning in found["warnings"])
    assert any("ft predicts label 1 for all" in warning for warning in found["warnings"])


def test_only_the_first_64_selection_rows_choose(folder: Path, tmp_path: Path) -> None:
    task = tiny.save_task(tmp_path / "task", selection=70)
    how: dict[str, Any] = {"shots": 3, "n_queries": 4, "lr": "auto", "lr_grid": (1e-3, 0.1)}
    more = run(folder, task, tmp_path, **how)
    tiny.write_rows(tmp_path / "task" / "selection.jsonl", tiny.rows(70, seed=3)[:64])
    assert run(folder, task, tmp_path, **how)["selection"] == more["selection"]


def test_selection_rows_beyond_the_context_are_left_out(tmp_path: Path) -> None:
    short = tiny.save_model(tmp_path / "short", context=64, learnt_positions=True)
    mine = tiny.save_task(tmp_path / "task")
    rows = tiny.rows(10, seed=3)
    rows[4]["text"] = " ".join(["film"] * 80)
    tiny.write_rows(tmp_path / "task" / "selection.jsonl", rows)
    how: dict[str, Any] = {"shots": 3, "n_queries": 4, "lr": "auto", "lr_grid": (1e-3, 1e-2)}
    assert run(short, mine, tmp_path, **how)["selection"]["rows"] == 9
    tiny.write_rows(tmp_path / "task" / "selection.jsonl", rows[4:5])
    with pytest.raises(dualview.UserError, match="no selection row that fits"):
        run(short, mine, tmp_path, **how)


def test_the_same_run_twice_is_the_same_result(folder: Path, task: Path, tmp_path: Path) -> None:
    first, second = (run(folder, task, tmp_path, shots=4, n_queries=5, seed=3) for _ in range(2))
    for result in (first, second):
        result["provenance"].pop("run")
    assert first == second
