"""Every control of a run, on a tiny model: what each one asks, and that a run repeats itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualview
import zoo
from close import assert_alike
from dualview.comparison import finetuning
from dualview.comparison.controls import training
from dualview.comparison.controls.kendall import followed_taps, taps_of, token_scores, with_ceiling
from dualview.comparison.controls.settings import (
    _random_labels,  # pyright: ignore[reportPrivateUsage]
    _random_text,  # pyright: ignore[reportPrivateUsage]
    flipped_labels,
    reordered,
)
from dualview.comparison.controls.training import CLOSE, nearest, next_rate, train_controls, unsteady, update_size
from dualview.comparison.finetuning import fine_tune
from dualview.comparison.prepare import Prepared, prepare
from dualview.comparison.seeds import compare_seeds, parse_seeds
from dualview.io.errors import UserError
from dualview.io.progress import Silent
from dualview.learning.finetune import finetune, train
from dualview.learning.recipe import LetGo, Training, TrainingRecipe, Tuned
from dualview.learning.traces import TrainingTrace, trace_training
from dualview.learning.weight_patches import Deltas
from dualview.metrics.kendall import Kendall
from dualview.metrics.recompute import recompute
from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt, load_model
from dualview.models.scoring import Asked, PassPlan, ask
from dualview.models.untrained import untrained
from dualview.options import RunOptions
from dualview.records import load_records, save_records
from dualview.tasks.prompts import PromptSet
from equivalence import tiny
from learning.stand_in import recording

LR = 0.05


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load_model(str(tiny.save_model(tmp_path_factory.mktemp("model"))), dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_task(tmp_path_factory.mktemp("task"), train=40, validation=20)


@pytest.fixture(scope="module")
def prepared(lm: LanguageModel, task: Path) -> Prepared:
    return prepare(RunOptions.make(task=str(task), shots=5, n_queries=12, lr=LR), lm)


@pytest.fixture(scope="module")
def full(lm: LanguageModel, task: Path) -> dict[str, Any]:
    options = {"shots": 5, "n_queries": 12, "lr": LR, "lr_grid": (0.01, 0.05), "controls": "full"}
    return dualview.compare(model=lm, task=str(task), **options).to_json()


@pytest.mark.parametrize("controls", ["full", "none"])
def test_saved_records_give_every_number_again(lm: LanguageModel, task: Path, tmp_path: Path, controls: Any) -> None:
    options: dict[str, Any] = {"shots": 5, "n_queries": 12, "lr": LR, "lr_grid": (LR,), "controls": controls}
    found = dualview.compare(model=lm, task=str(task), **options)
    assert found.records is not None
    file = save_records(found.records, tmp_path / "records.safetensors")
    again, whole = recompute(load_records(file)).to_json(), found.to_json()
    assert {key: whole[key] for key in again if key != "warnings"} == {
        k: v for k, v in again.items() if k != "warnings"
    }
    assert set(again["warnings"]) <= set(whole["warnings"])
    named = {"kendall", "overlap", "controls", "verdict"} & set(whole)
    assert named <= set(again) and (len(named) == 4) == (controls == "full")
    if controls == "full":
        assert again["kendall"]["dual_v"]["tau_token"] is not None and set(again["overlap"]) >= {"zsl", "ft"}


def test_records_of_an_earlier_version_say_what_was_not_recorded(lm: LanguageModel, task: Path, tmp_path: Path) -> None:
    """Such a file has neither the likeliest tokens nor the scores of the training tokens."""
    found = dualview.compare(model=lm, task=str(task), shots=4, n_queries=8, lr=LR)
    assert found.records is not None
    bare = {name: replace(s, top_ids=None, top_probs=None) for name, s in found.records.settings.items()}
    old = replace(found.records, settings=bare, token_scores=None, meta={})
    again = recompute(load_records(save_records(old, tmp_path / "old.safetensors"))).to_json()
    assert again["kendall"] is None and again["overlap"] == {}
    assert {again["controls"][name]["reason"] for name in ("kendall_dual_v", "token_overlap")} == {"not recorded"}
    assert again["sim_aou"] == found.to_json()["sim_aou"]


FLOORS = {"gaussian", "shuffled_query", "mean_direction", "head_span", "rotated", "icl_random_labels"}
FLOORS |= {"icl_random_text", "ft_random_labels", "ft_sign_flipped"}
FLOORS |= {"untrained", "untrained_but_embeddings", "zsl_shifted"}


def test_full_controls_are_all_there(full: dict[str, Any]) -> None:
    assert set(full["controls"]["sim_aou"]["floors"]) == FLOORS
    assert set(full["controls"]["sim_aou"]["ceilings"]) == {"icl_reordered", "icl_other_demos", "ft_distilled"}
    rules = {"ft_all_params", "ft_layer_causal", "ft_linearised"}
    assert set(full["controls"]["sim_aou"]["others"]) == rules | {"icl_flipped_labels", "ft_flipped_labels"}
    draws = {name: len(values) for name, values in full["controls"]["sim_aou"]["floors_draws"].items()}
    assert draws["icl_random_labels"] == draws["ft_random_labels"] == draws["icl_random_text"] == 5
    assert draws["untrained"] == draws["untrained_but_embeddings"] == 3
    # This tokenizer knows none of the other task's labels: those two controls say so and the rest goes on.
    assert set(full["controls_skipped"]) == {"icl_other_task", "ft_other_task"}
    assert "same tokens" in full["controls_skipped"]["icl_other_task"]
    assert {point["rule"] for point in full["norm_curve"]} == {"sgd", "layer-causal", "linearised"}
    assert full["order_sensitivity"]["icl"] > 0


def test_controls_trained_in_turns_are_those_trained_one_by_one(
    lm: LanguageModel, task: Path, full: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: all trainings under way at once, and steps recorded, of which corrections repeat theirs."""
    for module in ("run", "controls.training", "controls.untrained"):
        monkeypatch.setattr(f"dualview.comparison.{module}.have_room_together", lambda *_: True)
    made = recording(monkeypatch)
    options = {"shots": 5, "n_queries": 12, "lr": LR, "lr_grid": (0.01, 0.05), "controls": "full"}
    found = dualview.compare(model=lm, task=str(task), **options).to_json()
    for part in ("controls_trained", "sim_aou", "accuracy", "order_sensitivity", "norm_curve"):
        assert flat(found[part]) == pytest.approx(flat(full[part]), rel=1e-4, abs=1e-5, nan_ok=True)
    for side in ("floors", "ceilings", "others"):
        there, here = (flat(result["controls"]["sim_aou"][side]) for result in (full, found))
        assert here == pytest.approx(there, rel=1e-3, abs=1e-4, nan_ok=True)
    # FT, the controls and the few of them that are corrected, four grids, all parameters and six untrained models.
    assert len(made) == 14


def flat(value: Any, name: str = "") -> dict[str, float]:
    """Every number in a JSON value by its path."""
    if isinstance(value, dict | list):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: x for key, each in named for path, x in flat(each, f"{name}/{key}").items()}
    return {name: float(value)} if isinstance(value, int | float) else {}


def test_the_norm_curve_is_that_of_the_first_queries(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer queries further on change nothing: each point is the run of the first queries alone at that rate."""
    rows = sorted(tiny.rows(12, 5, longest=9), key=lambda row: len(row["text"]))
    task = tiny.save_task(tmp_path, train=24, validation=12)
    options: dict[str, Any] = {"task": str(task), "shots": 4, "lr_grid": (0.01, 0.05)}
    few, all_rows = (tiny.write_rows(tmp_path / f"{n}.jsonl", rows[:n]) for n in (4, 12))
    monkeypatch.setattr("dualview.comparison.controls.sensitivity.QUERIES", 4)
    curve = dualview.compare(model=lm, queries=all_rows, lr="auto", controls="full", **options).to_json()["norm_curve"]
    assert [(point["rule"], point["lr"]) for point in curve] == [
        (rule, lr) for rule in ("sgd", "layer-causal", "linearised") for lr in (0.01, 0.05)
    ]
    for point in curve:
        alone = dualview.compare(
            model=lm, queries=few, lr=point["lr"], ft_rule=point["rule"], controls="none", **options
        ).to_json()
        assert point["accuracy"] == alone["accuracy"]["ft"]
        assert point["update_norm"] == pytest.approx(alone["update_norm"]["ft"], rel=1e-9)
        assert point["sim_aou_raw"] == pytest.approx(alone["sim_aou"]["raw"], abs=1e-9)
        assert point["sim_am_after"] == pytest.approx(alone["sim_am"]["after"], abs=1e-9)
        assert point["sim_am_delta"] == pytest.approx(alone["sim_am"]["delta"], abs=1e-9)


def test_a_small_step_up_is_the_opposite_of_a_small_step_down(lm: LanguageModel, task: Path) -> None:
    options = {"shots": 3, "n_queries": 6, "lr": 1e-4, "lr_grid": (1e-4,), "controls": "full"}
    found = dualview.compare(model=lm, task=str(task), **options).to_json()["controls"]["sim_aou"]
    assert found["floors"]["ft_sign_flipped"] == pytest.approx(-found["value"], abs=0.02)


def test_two_runs_are_the_same(lm: LanguageModel, task: Path) -> None:
    def once() -> dict[str, Any]:
        found = dualview.compare(model=lm, task=str(task), shots=4, n_queries=8, lr=LR).to_json()
        found["provenance"].pop("run")
        return found

    assert once() == once()


def test_quick_controls_are_four_more_passes(lm: LanguageModel, task: Path) -> None:
    found = dualview.compare(model=lm, task=str(task), shots=4, n_queries=8, lr=LR)
    assert found.records is not None
    assert set(found.records.controls) == {*("icl_reordered", "zsl_shifted", "icl_flipped_labels", "ft_flipped_labels")}
    plain = dualview.compare(model=lm, task=str(task), shots=4, n_queries=8, lr=LR, controls="none").to_json()
    assert "verdict" not in plain and "controls" not in plain


def test_another_order_is_another_order(prepared: Prepared) -> None:
    other = reordered(prepared.prompts, "reordered")
    assert sorted(other.demos, key=str) == sorted(prepared.prompts.demos, key=str)
    assert other.demos != prepared.prompts.demos
    assert reordered(prepared.prompts, "reordered") == other


def test_untrained_models_keep_what_they_should(lm: LanguageModel) -> None:
    bare, kept = (untrained(lm, keep_embeddings=keep, seed=0) for keep in (False, True))
    trained = dict(lm.model.named_parameters())
    for name, parameter in kept.model.named_parameters():
        same = torch.equal(parameter, trained[name])
        assert same == ("embed" in name or "norm" in name or "lm_head" in name), name
    assert not torch.equal(
        dict(bare.model.named_parameters())["model.embed_tokens.weight"], trained["model.embed_tokens.weight"]
    )
    again = untrained(lm, keep_embeddings=False, seed=0)
    assert again.weights_hash == bare.weights_hash != untrained(lm, keep_embeddings=False, seed=1).weights_hash


@pytest.mark.parametrize("weights", ["untrained", "trained-embeddings"])
def test_the_comparison_runs_on_redrawn_weights(lm: LanguageModel, task: Path, weights: Any) -> None:
    """`--weights` is the comparison of the re-drawn model itself, whether the model was loaded or named."""
    options: dict[str, Any] = {"task": str(task), "shots": 3, "n_queries": 6, "lr": LR, "controls": "none"}
    found = dualview.compare(model=lm, weights=weights, **options)
    other = untrained(lm, keep_embeddings=weights == "trained-embeddings", seed=0)
    assert found.provenance.weights_hash == other.weights_hash != lm.weights_hash
    assert_alike(found.to_json()["queries"], dualview.compare(model=other, **options).to_json()["queries"])


def asked(prepared: Prepared) -> dict[str, Asked]:
    lm, prompts = prepared.lm, prepared.prompts
    taps = taps_of(lm.anatomy)
    special = len(prompts.zero_prefix)
    bare = PassPlan(prompts.zero_prefix, special, taps=taps)
    patch = finetune(lm, prompts.training_sequences, [LR])[0].patch
    icl = ask(lm, prompts.queries, PassPlan(prompts.prefix, special, demo_logits=True))
    return {"icl": icl, "ft": ask(lm, prompts.queries, bare, patch), "zsl": ask(lm, prompts.queries, bare)}


def kendall(
    lm: LanguageModel, prompts: PromptSet, recipe: TrainingRecipe, lr: float, passes: dict[str, Asked], again: Any
) -> Kendall | None:
    taps = followed_taps(lm, recipe)
    if taps is None:
        return None
    traces = trace_training(lm, prompts.training_sequences, (lr, 0.0), recipe, taps)
    scores = token_scores(lm, prompts, recipe, traces, passes)
    if scores is None:
        return None
    return Kendall.of(scores if again is None else with_ceiling(scores, prompts, again))


def slow_tau(x: np.ndarray, y: np.ndarray) -> float:
    """Kendall's tau-b by looking at every pair."""
    x, y = with_ties(x), with_ties(y)
    agree = ties_x = ties_y = 0
    n = len(x)
    for i in range(n):
        for j in range(i):
            a, b = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
            agree += a * b
            ties_x += a == 0
            ties_y += b == 0
    pairs = n * (n - 1) / 2
    return float(agree / np.sqrt((pairs - ties_x) * (pairs - ties_y)))


def with_ties(scores: np.ndarray) -> np.ndarray:
    """Scores that are equal on paper made equal; no two others may be so near that rounding could order them."""
    order = np.argsort(scores)
    steps = np.diff(scores[order]) / np.abs(scores).max()
    assert not ((steps > 1e-13) & (steps < 1e-10)).any(), "near-ties: take other data"
    ranks = np.empty(len(scores))
    ranks[order] = np.concatenate([[0], np.cumsum(steps > 1e-12)])
    return ranks


def test_kendall_against_a_slow_one(prepared: Prepared) -> None:
    """The dual form written out token by token for W_V, the released form from q vectors, both at every layer."""
    passes = asked(prepared)
    icl, ft = passes["icl"], passes["ft"]
    lm, prompts = prepared.lm, prepared.prompts
    found = kendall(lm, prompts, TrainingRecipe(), LR, passes, None)
    assert found is not None and icl.demo_logits is not None
    columns = [i for span in prompts.demo_spans for part in (span.template, span.label) for i in part]
    q_maps = [layer.projections["q"][0] for layer in lm.anatomy.layers]
    [trace] = trace_training(lm, prompts.training_sequences, [LR], TrainingRecipe(), q_maps)
    real = [t for t in range(len(trace.tokens.position)) if int(trace.tokens.position[t]) > 0]
    taps = {p.name: tap for p, tap in zip(taps_of(lm.anatomy), ft.tapped, strict=True)}
    for layer, parts in enumerate(lm.anatomy.layers):
        v = parts.projections["v"][0].name
        factors = next(f for f in trace.factors if f.projection.name == v)
        for query in (0, 7):
            ours = icl.demo_logits[query, layer, columns]
            x = torch.tensor(taps[v].x[query])
            change = sum((e * (k @ x) for e, k in zip(factors.errors, factors.inputs, strict=True)), torch.zeros(()))
            shares = [float(factors.errors[t] @ change * (factors.inputs[t] @ x) / change.norm()) for t in real]
            assert found.forms["dual_v"].tau_token[query, layer] == pytest.approx(slow_tau(ours, np.array(shares)))
            q_test = taps[parts.projections["q"][0].name].y[query]
            released = [float(trace.tapped[layer][t].numpy() @ q_test) for t in real]
            assert found.forms["released"].tau_token[query, layer] == pytest.approx(slow_tau(ours, np.array(released)))


def test_kendall_over_two_epochs(prepared: Prepared) -> None:
    """The dual form sums a token's shares over epochs; the released form reads the last epoch's q."""
    passes = asked(prepared)
    icl, ft = passes["icl"], passes["ft"]
    lm, prompts = prepared.lm, prepared.prompts
    found = kendall(lm, prompts, TrainingRecipe(epochs=2), LR, passes, None)
    assert found is not None and icl.demo_logits is not None
    columns = [i for span in prompts.demo_spans for part in (span.template, span.label) for i in part]
    q_maps = [layer.projections["q"][0] for layer in lm.anatomy.layers]
    [trace] = trace_training(lm, prompts.training_sequences, [LR], TrainingRecipe(epochs=2), q_maps)
    n = len(trace.tokens.position) // 2
    real = [t for t in range(n) if int(trace.tokens.position[t]) > 0]
    taps = {p.name: tap for p, tap in zip(taps_of(lm.anatomy), ft.tapped, strict=True)}
    v = lm.anatomy.layers[1].projections["v"][0].name
    factors = next(f for f in trace.factors if f.projection.name == v)
    x = torch.tensor(taps[v].x[3])
    change = factors.errors.T @ (factors.inputs @ x)
    each = (factors.errors @ change) * (factors.inputs @ x) / change.norm()
    ours = icl.demo_logits[3, 1, columns]
    assert found.forms["dual_v"].tau_token[3, 1] == pytest.approx(slow_tau(ours, (each[:n] + each[n:])[real].numpy()))
    last = trace.tapped[1][n:][real].numpy() @ taps[q_maps[1].name].y[3]
    assert found.forms["released"].tau_token[3, 1] == pytest.approx(slow_tau(ours, last))


def test_only_values_trained_has_no_key_form(prepared: Prepared) -> None:
    found = kendall(prepared.lm, prepared.prompts, TrainingRecipe(params="v"), LR, asked(prepared), None)
    assert found is not None and set(found.forms) == {"released", "released_lr0", "dual_v", "dual_v_lr0"}


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_kendall_where_one_matrix_makes_q_k_and_v(prepared: Prepared, name: str) -> None:
    """The released form reads q and nothing else of a fused matrix; at layer 0 it cannot depend on training."""
    lm = adopt(zoo.make(name), prepared.lm.tokenizer, name)
    fused = replace(prepared, lm=lm)
    passes = asked(fused)
    found = kendall(lm, prepared.prompts, TrainingRecipe(), LR, passes, None)
    assert found is not None and passes["icl"].demo_logits is not None
    columns = [i for span in prepared.prompts.demo_spans for part in (span.template, span.label) for i in part]
    q_maps = [layer.projections["q"][0] for layer in lm.anatomy.layers]
    [trace] = trace_training(lm, prepared.prompts.training_sequences, [LR], TrainingRecipe(), q_maps)
    real = [t for t in range(len(trace.tokens.position)) if int(trace.tokens.position[t]) > 0]
    x = passes["ft"].tapped[3].x[2]  # of layer 1, the same for q, k and v
    rows = q_maps[1].rows
    assert rows is not None
    with torch.no_grad():
        q_test = q_maps[1].module(torch.from_numpy(x))[rows].numpy()
    released = trace.tapped[1][real].numpy() @ q_test
    expected = slow_tau(passes["icl"].demo_logits[2, 1, columns], released)
    assert found.forms["released"].tau_token[2, 1] == pytest.approx(expected)
    first, untouched = (found.forms[form].tau_token[:, 0] for form in ("released", "released_lr0"))
    np.testing.assert_allclose(first, untouched, atol=1e-12)  # nothing before layer 0's q is trained


def test_icl_reordered_is_kendalls_ceiling(prepared: Prepared) -> None:
    """Every token's attention is compared with its own in the other order, whose places are found by hand here."""
    lm, prompts = prepared.lm, prepared.prompts
    other = reordered(prompts, "reordered")
    again = ask(lm, prompts.queries, replace(prepared.in_context, prefix=other.prefix, demo_logits=True))
    passes = asked(prepared)
    found = kendall(lm, prompts, TrainingRecipe(), LR, passes, again)
    assert found is not None and found.ceiling is not None
    assert again.demo_logits is not None and passes["icl"].demo_logits is not None
    ours, theirs = [], []
    for demo, span in zip(prompts.demos, prompts.demo_spans, strict=True):
        there = other.demo_spans[other.demos.index(demo)]
        ours += [*span.template, *span.label]
        theirs += [*there.template, *there.label]
    for layer in range(2):
        expected = slow_tau(passes["icl"].demo_logits[3, layer, ours], again.demo_logits[3, layer, theirs])
        assert found.ceiling.tau_token[3, layer] == pytest.approx(expected)
    held = found.controls()["kendall_dual_v"]
    assert held.ci is not None and set(held.floors) == {"lr0"} and held.ceiling is not None


def test_every_draw_and_every_training_of_the_controls_is_told(full: dict[str, Any]) -> None:
    drawn = {"demos", "other_demos", "random_labels", "random_text", "other_task", "untrained", "reordered", "draws"}
    assert set(full["provenance"]["seeds"]) == drawn
    told = full["controls_trained"]
    assert {"ft_sign_flipped", "ft_layer_causal", "ft_linearised", "untrained"} <= set(told)
    for name in ("ft_random_labels", "ft_random_labels@5", "untrained", "untrained@3"):
        assert 0.8 < told[name]["size_over_ft"] < 1.25, "read at the size of FT's update"
    assert told["ft_sign_flipped"]["lr"] == -LR and told["ft_layer_causal"]["lr"] in (0.01, 0.05)


def test_the_other_rules_stand_beside_whichever_was_run(lm: LanguageModel, task: Path) -> None:
    options = {"shots": 3, "n_queries": 6, "lr": LR, "lr_grid": (LR,), "controls": "full"}
    found = dualview.compare(model=lm, task=str(task), ft_rule="layer-causal", **options).to_json()
    assert {"ft_sgd", "ft_linearised"} <= set(found["controls"]["sim_aou"]["others"])
    assert [point["rule"] for point in found["norm_curve"]] == ["layer-causal", "sgd", "linearised"]


@pytest.mark.parametrize("seed", range(1, 7))
def test_random_labels_are_never_all_the_true_ones(lm: LanguageModel, task: Path, seed: int) -> None:
    few = prepare(RunOptions.make(task=str(task), shots=1, n_queries=2, lr=LR, seed=seed), lm)
    assert _random_labels(few).prefix != few.prompts.prefix


def test_random_text_is_as_long_and_neither_begins_nor_ends(
    lm: LanguageModel, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(RunOptions.make(task=str(task), shots=12, n_queries=2, lr=LR), lm)
    text, shown = _random_text(prepared), prepared.prompts
    assert len(text) == len(shown.prefix) and text[: len(shown.zero_prefix)] == shown.zero_prefix
    drawn = np.random.default_rng([1, 1]).choice(
        min(len(lm.tokenizer), lm.vocab) - 1, len(text) - len(shown.zero_prefix)
    )
    end = drawn[len(drawn) // 2]  # were that the EOS, it and all after it would be one further on
    monkeypatch.setattr(type(lm.tokenizer), "bos_token_id", int(end), raising=False)
    monkeypatch.setattr(type(lm.tokenizer), "eos_token_id", int(end), raising=False)
    assert _random_text(prepared)[len(shown.zero_prefix) :] == tuple(int(t) + (t >= end) for t in drawn)


def test_one_demonstration_has_no_other_order(lm: LanguageModel, task: Path) -> None:
    found = dualview.compare(model=lm, task=str(task), shots=1, n_queries=6, lr=LR).to_json()
    assert "no other order" in found["controls_skipped"]["icl_reordered"]
    assert found["controls"]["sim_aou"]["ceilings"] == {}


def test_over_seeds(lm: LanguageModel, task: Path) -> None:
    several = compare_seeds(RunOptions.make(task=str(task), shots=4, n_queries=8, lr=LR), [1, 2, 3], lm=lm)
    alone = dualview.compare(model=lm, task=str(task), shots=4, n_queries=8, lr=LR, seed=2)
    raw = several.summary["sim_aou.raw"]
    assert raw.values[1] == pytest.approx(alone.sim_aou.raw, rel=1e-9)
    assert raw.mean == pytest.approx(np.mean([value for value in raw.values if value is not None]))
    assert raw.ci is not None and raw.ci[0] <= raw.mean <= raw.ci[1]
    assert sum(several.verdicts.values()) == 3
    with pytest.raises(dualview.UserError, match="two different seeds"):
        parse_seeds("4")


def test_flipped_labels_are_all_wrong_and_nothing_else_changes(prepared: Prepared) -> None:
    flipped = flipped_labels(prepared)
    assert len(flipped.demos) == len(prepared.prompts.demos)
    for true, other in zip(prepared.prompts.training_sequences, flipped.training_sequences, strict=True):
        assert true.ids[: true.label_start] == other.ids[: other.label_start]
        assert true.ids[true.label_start :] != other.ids[other.label_start :]


def test_a_control_is_trained_until_it_is_as_large(prepared: Prepared) -> None:
    sequences = prepared.prompts.training_sequences
    wanted = {"down": lambda: Training(sequences, 1e-4), "up": lambda: Training(sequences, -0.3)}
    zsl = ask(prepared.lm, prepared.prompts.queries, prepared.zero_shot).settings[0]
    made = train_controls(prepared, wanted, TrainingRecipe(), Silent(), sized=["down", "up"], size=0.05)
    for name, sign in (("down", 1), ("up", -1)):
        tuned = made.get(name)
        assert np.sign(tuned.lr) == sign
        after = ask(prepared.lm, prepared.prompts.queries, prepared.zero_shot, tuned.patch).settings[0]
        assert update_size(zsl, after) / 0.05 == pytest.approx(made.sizes[name], rel=1e-6)
        assert 1 / CLOSE <= made.sizes[name] <= CLOSE
    left = train_controls(prepared, wanted, TrainingRecipe(), Silent())
    assert (left.get("down").lr, left.get("up").lr) == (1e-4, -0.3) and not left.sizes


@pytest.mark.parametrize("power", [0.4, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("start", [0.004, 0.3, 20.0])
def test_a_size_that_is_a_power_of_the_rate_is_found_in_the_third_try(power: float, start: float) -> None:
    def size(rate: float) -> float:
        return (rate / 0.7) ** power

    tried = [(start, size(start))]
    for _ in range(2):
        rate = next_rate(tried)
        tried.append((rate, size(rate)))
    limited = abs(np.log(tried[0][1])) > np.log(30)  # by more than 30 times at once
    assert tried[-1][1] == pytest.approx(1.0, rel=1e-9) or limited


def test_where_a_training_runs_away_the_nearest_before_counts() -> None:
    def size(rate: float) -> float:
        return rate / 0.7 if rate < 0.6 else 3.0 + rate  # never near 1

    tried = [(0.1, size(0.1))]
    while len(tried) < 8:
        rate = next_rate(tried)
        assert tried[0][0] < rate < 1.0
        tried.append((rate, size(rate)))
    assert nearest(tried)[1] == max(s for _, s in tried if s < 1) > 0.8
    assert nearest([(0.1, float("inf")), (0.2, 4.0), (0.3, 0.0), (0.05, 0.5)]) == (0.05, 0.5)


def test_the_nearest_of_the_rounds_is_reported(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([0.02, 0.5, 0.9])
    monkeypatch.setattr(training, "next_rate", lambda _tried: next(rates))
    wanted = {"ft_other_task": lambda: Training(prepared.prompts.training_sequences, 1e-3)}
    zsl = ask(prepared.lm, prepared.prompts.queries, prepared.zero_shot).settings[0]
    [tuned] = finetune(prepared.lm, prepared.prompts.training_sequences, [0.03])
    size = update_size(zsl, ask(prepared.lm, prepared.prompts.queries, prepared.zero_shot, tuned.patch).settings[0])
    made = train_controls(prepared, wanted, TrainingRecipe(), Silent(), sized=["ft_other_task"], size=size)
    found = made.get("ft_other_task")
    after = ask(prepared.lm, prepared.prompts.queries, prepared.zero_shot, found.patch).settings[0]
    assert found.lr == 0.02 and made.sizes["ft_other_task"] == pytest.approx(update_size(zsl, after) / size, rel=1e-6)


def test_rates_that_gave_no_size_are_left() -> None:
    diverged = float("inf")
    assert next_rate([(0.3, diverged)]) == pytest.approx(0.01)
    assert next_rate([(0.3, diverged), (0.01, 0.2), (0.05, diverged)]) == pytest.approx((0.01 * 0.05) ** 0.5)
    assert next_rate([(-0.01, 0.2), (-0.05, diverged)]) == pytest.approx(-((0.01 * 0.05) ** 0.5))
    assert next_rate([(1.0, diverged), (1 / 30, 0.2)]) == pytest.approx(1 / 6)  # straight on, where that is short of it
    assert next_rate([(1.0, 0.3), (4.0, 0.0)]) == pytest.approx(2.0)  # the same training would give the same again
    assert nearest([(0.3, diverged), (0.01, 0.0)]) == (0.01, 0.0)
    assert next_rate([(0.1, 1e-9)]) == pytest.approx(3.0)  # never more than 30 times
    assert next_rate([(0.1, 0.5), (0.2, 0.500001)]) == pytest.approx(
        0.2 * 2**4, rel=1e-3
    )  # flat: at most the fourth power


def test_a_control_that_cannot_be_made_says_why(prepared: Prepared) -> None:
    def broken() -> Training:
        raise UserError("One demonstration has no other order.")

    made = train_controls(prepared, {"order": broken}, TrainingRecipe(), Silent())
    with pytest.raises(UserError, match="no other order"):
        made.get("order")


def assert_same_trace(found: TrainingTrace, expected: TrainingTrace) -> None:
    assert found.tuned.lr == expected.tuned.lr
    assert [f.projection.name for f in found.factors] == [f.projection.name for f in expected.factors]
    for a, b in zip(found.factors, expected.factors, strict=True):
        torch.testing.assert_close(a.inputs, b.inputs, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(a.errors, b.errors, rtol=1e-9, atol=1e-12)
    for a, b in zip(found.tapped, expected.tapped, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("params", ["kv", "qkv"])
def test_controls_and_traces_trained_together_are_those_trained_alone(prepared: Prepared, params: Any) -> None:
    """Rows of one batch: flipped labels, and the two trainings that Kendall's tau follows."""
    lm, prompts, recipe = prepared.lm, prepared.prompts, TrainingRecipe(params=params)
    taps = followed_taps(lm, recipe)
    assert taps is not None
    flipped = Training(flipped_labels(prepared).training_sequences, LR)
    followed = {"ft": Training(prompts.training_sequences, LR), "ft_lr0": Training(prompts.training_sequences, 0.0)}
    wanted = {"flipped": lambda: flipped}
    made = train_controls(prepared, wanted, recipe, Silent(), followed=followed, taps=taps)
    [alone] = train(lm, [flipped], recipe)
    assert set(made.tuned) == {"flipped"} and isinstance(alone.patch, Deltas)
    assert made.tuned["flipped"].losses == pytest.approx(alone.losses, rel=1e-9)
    for a, b in zip(made.tuned["flipped"].patch.weights, alone.patch.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    expected = trace_training(lm, prompts.training_sequences, (LR, 0.0), recipe, taps)
    for name, trace in zip(followed, expected, strict=True):
        assert_same_trace(made.traces[name], trace)


@pytest.mark.parametrize("lr", ["auto", LR])
def test_the_trace_kept_in_fine_tuning_is_that_of_training_again(
    prepared: Prepared, lr: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(prepared.options, lr=lr, lr_grid=(0.01, LR, 0.1), controls="quick")
    asked_for, taps = replace(prepared, options=options), followed_taps(prepared.lm, TrainingRecipe())
    learnt = fine_tune(asked_for, Silent(), taps)
    [trace] = learnt.kept
    sequences = prepared.prompts.training_sequences
    [expected] = trace_training(prepared.lm, sequences, (learnt.tuned.lr,), TrainingRecipe(), taps or ())
    assert_same_trace(trace, expected)
    plain = fine_tune(asked_for, Silent())
    assert (plain.tuned.lr, plain.tuned.losses, plain.trials) == (learnt.tuned.lr, learnt.tuned.losses, learnt.trials)
    assert not plain.kept
    monkeypatch.setattr(finetuning, "_TRACE_BYTES", 0)  # no room
    assert not fine_tune(asked_for, Silent(), taps).kept


def test_a_run_without_room_for_traces_finds_the_same(
    lm: LanguageModel, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"task": str(task), "shots": 5, "n_queries": 12, "lr_grid": (0.01, LR)}
    found = dualview.compare(model=lm, **options).to_json()
    monkeypatch.setattr(finetuning, "_TRACE_BYTES", 0)
    again = dualview.compare(model=lm, **options).to_json()
    for part in ("kendall", "controls", "verdict", "queries"):
        assert_alike(found[part], again[part])


def test_seeds_are_judged_together(lm: LanguageModel, task: Path) -> None:
    several = dualview.run(model=lm, task=str(task), shots=4, n_queries=12, lr=LR, seeds="1:3")
    assert several.verdict is not None and several.verdict.unit == "3 draws"
    assert set(several.verdict.levels) == {"learning", "predictions", "representations", "attention", "labels"}


def test_a_training_whose_loss_jumps_is_warned_of(
    lm: LanguageModel, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualview.comparison.controls.training._STEADY", 1.1)  # the tiny model's losses are bounded
    options: dict[str, Any] = {"shots": 5, "n_queries": 12}
    steady, jumps = (dualview.run(model=lm, task=str(task), lr=lr, **options).to_json() for lr in (LR, 50.0))
    assert not any("unstable" in warning for warning in steady["warnings"])
    assert jumps["ft"]["status"] == "ok" and max(jumps["ft"]["losses"]) > max(steady["ft"]["losses"])
    [warning] = [warning for warning in jumps["warnings"] if warning.startswith("ft is unstable at learning rate 50")]
    assert "depends on rounding" in warning


def test_only_jumps_in_what_the_untouched_model_reads_as_well_are_warned_of() -> None:
    still = Tuned(0.0, LetGo(), (4.0, 2.0, 6.0))

    def after(*losses: float, lr: float = 0.1) -> Tuned:
        return Tuned(lr, LetGo(), losses)

    names = ("ft", "ft_flipped_labels", "ft_random_labels@2")
    for name in names:
        assert unsteady({name: after(4.0, 2.9, 8.9)}, still) == []
        [told] = unsteady({name: after(4.0, 3.1, 12.0)}, still)
        assert told.startswith(f"{name} is unstable at learning rate 0.1: its loss is 3.1 at step 2") and "2." in told
        assert unsteady({name: after(4.0, 2.9)}, still) == []  # fewer demonstrations fit
    # These read other texts, other orders or climb the loss; what diverged is told of elsewhere.
    for name in ("ft_other_task", "order 1", "ft_sign_flipped"):
        assert unsteady({name: after(9.0, 9.0, 9.0)}, still) == []
    assert unsteady({"ft": replace(after(9.0, 9.0, 9.0), status="diverged")}, still) == []
