"""The retrofit lab: arms that start as the pretrained model, their algebra, the lab on a tiny model, and mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from dualview.cli.lab import add
from dualview.io.errors import UserError
from dualview.lab import harness as frame
from dualview.lab.harness import LabResult
from dualview.lab.retrofit.arms import (
    ARMS,
    FlashAlibi,
    MomentumFromZero,
    TokenShiftFromZero,
    coefficients,
    fitted,
    starts_as_pretrained,
    variant_of,
)
from dualview.lab.retrofit.report import _right, figures, summarise, tables
from dualview.lab.retrofit.run import _Limit, retrofit
from dualview.lab.retrofit.settings import PRESETS, RetrofitSettings
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.variants import Alibi, Momentum, TokenShift, apply
from equivalence.tiny import FILL, save_model, save_task

DRAW = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, heads, 90, 8, generator=DRAW, dtype=torch.float64) for heads in (4, 2, 2))
IDS = torch.randint(3, 30, (2, 80), generator=DRAW)
SIZES = torch.full((3, 2), 0.3)
_WRITE_FIGURES = frame._write_figures


@pytest.fixture(autouse=True, scope="module")
def without_figures():
    """Drawing takes longer than the trainings; one test draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "_write_figures", lambda _figures, _folder: [])
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("retrofit")
    save_model(folder / "model")
    save_task(folder / "task")
    draw = np.random.default_rng(0)
    (folder / "text.txt").write_text("\n\n".join(" ".join(draw.choice(FILL, 90)) for _ in range(200)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def lm(place: Path) -> LanguageModel:
    return load_model(str(place / "model"), dtype="float64", device="cpu")


def _options(place: Path, **more: Any) -> dict[str, Any]:
    small = {"context": 16, "batch": 2, "steps": 4, "warmup": 1, "lr": 1e-3, "eval_tokens": 64, "shots": 3}
    small |= {"n_queries": 6, "draws": 2, "device": "cpu", "only": "plain,momentum,sign"}
    asked = {"model": str(place / "model"), "text": place / "text.txt", "tasks": str(place / "task" / "tiny.yaml")}
    return {**asked, **small, **more}


# ---------------------------------------------------------------------------------------------------------------- arms


@pytest.mark.parametrize("arm", ARMS)
def test_at_step_0_the_logits_are_the_pretrained_models_where_the_arm_allows_it(lm: LanguageModel, arm: str):
    model = fitted(lm.model, arm, SIZES.double()).eval()
    with torch.no_grad():
        expected, found = (each(input_ids=IDS, use_cache=False).logits for each in (lm.model, model))
    apart = float((found - expected).abs().max())
    if not starts_as_pretrained(arm):
        assert apart > 1e-3
    elif arm == "alibi":  # another shape of the same product, hence another rounding; norms are float32
        assert apart < 1e-4
    else:
        assert apart == 0
    assert all(p.requires_grad for p in model.parameters())
    assert model is not lm.model and not any(p.requires_grad for p in lm.model.parameters())


@pytest.mark.parametrize("variant", [MomentumFromZero(), TokenShiftFromZero(), FlashAlibi()])
def test_at_0_the_coefficients_have_a_gradient(variant):
    """By finite differences: learning can leave the start."""
    weights = torch.randn(2, 90, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    at = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(apply(variant, Q, K, V, coefficient=at), apply(variant, Q, K, V)), "0 is the default"
    (gradient,) = torch.autograd.grad((apply(variant, Q, K, V, coefficient=at) * weights).sum(), at)
    for head in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[head] = 1e-6
        above, below = (float((apply(variant, Q, K, V, coefficient=x) * weights).sum()) for x in (step, -step))
        assert float(gradient[head]) == pytest.approx((above - below) / 2e-6, rel=1e-4)
        assert abs(float(gradient[head])) > 1e-3


@pytest.mark.parametrize(
    ("mine", "theirs"), [(MomentumFromZero(), Momentum(eta=0.4)), (TokenShiftFromZero(), TokenShift(eta=0.4))]
)
def test_eta_is_the_tanh_of_what_is_learnt(mine, theirs):
    raw = torch.full((2,), 0.4, dtype=torch.float64).atanh()
    torch.testing.assert_close(apply(mine, Q, K, V, coefficient=raw), apply(theirs, Q, K, V), atol=1e-12, rtol=0)


def test_a_negative_eta_alternates():
    """Against loops: η < 0 is allowed, as an optimiser's first step may go there."""
    eta = torch.tensor([-0.5, 0.3], dtype=torch.float64)
    found = apply(MomentumFromZero(), Q, K, V, coefficient=eta.atanh()) - apply(MomentumFromZero(), Q, K, V)
    for head in range(4):
        v, base = V[:, head // 2], float(eta[head // 2])
        by_hand = torch.stack(
            [sum((base ** (t - i) * v[:, i] for i in range(t)), torch.zeros(2, 8)) for t in range(90)]
        )
        torch.testing.assert_close(found[:, :, head], by_hand.transpose(0, 1), atol=1e-9, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_alibi_on_two_more_dimensions_is_alibi(masked: bool):
    strength = torch.tensor([0.7, -0.2], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(90, 90, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    mask[1, :, :, :5] = False  # padding at the left of one row
    mask[1, :, :5, 0] = True
    given = {"mask": mask if masked else None, "coefficient": strength}
    one, other = (apply(kind, Q, K, V, **given) for kind in (FlashAlibi(), Alibi()))
    rows = slice(5, None) if masked else slice(None)
    torch.testing.assert_close(one[:, rows], other[:, rows], atol=1e-9, rtol=0)
    weights = torch.randn(one[:, rows].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((x[:, rows] * weights).sum(), strength)[0] for x in (one, other)]
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)


def test_alibis_positions_are_exact_in_bfloat16():
    """Position 1,023 is none of bfloat16's numbers; its two parts are."""
    at = torch.arange(8192)
    for part in (at - at % 64, at % 64):
        assert torch.equal(part.to(torch.bfloat16).long(), part)
    assert not torch.equal(at.to(torch.bfloat16).long(), at)


def test_signs_start_at_the_given_sizes(lm: LanguageModel):
    sizes = torch.rand(3, 2, generator=torch.Generator().manual_seed(2))
    found = coefficients(fitted(lm.model, "sign", sizes))
    np.testing.assert_allclose(found, sizes.numpy(), atol=1e-7)
    assert coefficients(fitted(lm.model, "sign_token", sizes)) == [[1.0, 1.0]] * 3
    assert coefficients(fitted(lm.model, "plain", sizes)) is None


# ----------------------------------------------------------------------------------------------------------------- lab


@pytest.fixture(scope="module")
def whole(place: Path) -> LabResult:
    return retrofit(out=place / "out", json=place / "retrofit.json", seeds=2, **_options(place))


def _numbers(result: LabResult) -> dict[str, Any]:
    found = result.to_json()
    found["provenance"] = {key: value for key, value in found["provenance"].items() if key not in ("run", "command")}
    return found


def test_every_training_and_measure_is_there(whole: LabResult, place: Path):
    trainings = whole.results["trainings"]
    assert [(t["arm"], t["seed"]) for t in trainings] == [
        (arm, seed) for seed in (1, 2) for arm in ("plain", "momentum", "sign")
    ]
    assert {t["tokens"] for t in trainings} == {4 * 2 * 16}
    assert json.loads((place / "retrofit.json").read_text()) == whole.to_json()
    assert set(whole.results["starts"]) == {"plain", "sign"}
    momentum = next(t for t in trainings if t["arm"] == "momentum")
    assert np.shape(momentum["learnt"]) == (3, 2) and np.abs(momentum["learnt"]).max() > 1e-3
    first = {t["arm"]: t["curve"]["loss"][0] for t in trainings if t["seed"] == 1}
    assert first["plain"] == first["momentum"] != first["sign"], "equal arms read the same first batch"
    cost = whole.provenance["run"]["cost"]["sign/2"]
    assert cost["matrix_rate"] > 0 and cost["compiled"] is False


def test_the_text_and_the_tables_say_what_was_found(whole: LabResult):
    shown = [table.markdown() for table in tables(whole)]
    assert "usable: below +10 %" in shown[0] or "not shown usable" in shown[0]
    assert "momentum, η learnt: perplexity at 16 tokens" in shown[0] and "over seeds." in shown[0]
    assert "tiny" in shown[1] and "of the matrix rate" in shown[2]
    assert set(figures(whole)) == {"retrofit"}


def test_a_second_call_trains_only_what_is_new_and_the_numbers_stay(whole: LabResult, place: Path, monkeypatch):
    asked: list[str] = []
    import dualview.lab.retrofit.run as module

    ours = module._training
    monkeypatch.setattr(module, "_training", lambda b, arm, *rest: asked.append(arm) or ours(b, arm, *rest))
    more = retrofit(out=place / "out", **_options(place, only="plain,alibi,momentum"))
    assert asked == ["alibi"]
    fresh = retrofit(**_options(place, only="plain,alibi,momentum"))
    assert _numbers(fresh) == _numbers(more)


def test_killed_and_started_again_it_ends_in_the_same_numbers(place: Path, monkeypatch):
    import dualview.lab.gpt.training as training

    options = _options(place, only="plain,momentum", steps=41, save_every=1e-9, n_queries=0)
    once = retrofit(**options)
    ours, calls = training.Blocks.take, [0]

    def dying(self: Any, step: int) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 70:
            raise KeyboardInterrupt
        return ours(self, step)

    monkeypatch.setattr(training.Blocks, "take", dying)
    with pytest.raises(KeyboardInterrupt):
        retrofit(out=place / "killed", **options)
    again = retrofit(out=place / "killed", **options)
    assert calls[0] == 70 + 41 - 20, "the second training goes on from step 20"
    assert _numbers(again) == _numbers(once)


def test_with_minutes_no_training_begins_too_late_and_a_later_call_continues(place: Path):
    options = _options(place, seeds=2, n_queries=0)
    short = retrofit(out=place / "short", minutes=1e-9, **options)
    done, left_out = ([(t["arm"], t["seed"]) for t in short.results["trainings"]], short.results["left_out"])
    assert done == [("plain", 1)] and left_out == [
        f"{arm}/{seed}" for seed in (1, 2) for arm in ("plain", "momentum", "sign") if (arm, seed) != ("plain", 1)
    ]
    assert "for want of time: momentum/1, sign/1" in tables(short)[0].note
    whole = retrofit(out=place / "short", minutes=60, **options)
    assert len(whole.results["trainings"]) == 6 and whole.results["left_out"] == []
    assert whole.results["trainings"][0] == short.results["trainings"][0]


def test_a_run_that_is_killed_leaves_the_result_of_the_trainings_it_finished(place: Path, monkeypatch):
    import dualview.lab.retrofit.run as module

    ours = module._training

    def dying(bench: Any, arm: str, *rest: Any) -> dict[str, Any]:
        if arm == "sign":
            raise KeyboardInterrupt
        return ours(bench, arm, *rest)

    monkeypatch.setattr(module, "_training", dying)
    with pytest.raises(KeyboardInterrupt):
        retrofit(out=place / "dead", **_options(place, n_queries=0))
    left = LabResult.load(place / "dead" / "retrofit.json")
    assert [t["arm"] for t in left.results["trainings"]] == ["plain", "momentum"]
    assert left.results["left_out"] == ["sign/1"] and "sign/1" in tables(left)[0].note


def test_natural_and_abstract_labels_are_asked_and_compared_apart(place: Path):
    found = retrofit(**_options(place, only="plain,momentum", labels="natural,abstract", batch=2, micro_batch=1))
    asked = found.results["trainings"][1]["few_shot"]
    assert [(task["task"], task["labels"]) for task in asked] == [("tiny", "natural"), ("tiny", "abstract")]
    difference = found.results["differences"][0]
    assert list(difference["accuracy_by_labels"]) == ["natural", "abstract"]
    for kind, task in zip(("natural", "abstract"), asked, strict=True):
        assert found.results["arms"]["momentum"]["by_labels"][kind] == pytest.approx(np.mean(task["icl"]))
    arms, tasks = (table.markdown() for table in tables(found)[:2])
    assert "accuracy, abstract labels" in arms and "with abstract labels" in arms
    assert "| tiny, abstract labels |" in tasks
    assert len(figures(found)["retrofit"].axes) == 3


def test_the_time_of_a_training_is_expected_from_the_arms_last(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dualview.lab.retrofit.run.time.monotonic", lambda: now[0])
    limit = _Limit(1.0, 0.0)
    for arm, seconds in (("plain", 20.0), ("momentum", 10.0), ("plain", 5.0)):
        assert limit.allows(arm)
        with limit.watched(arm):
            now[0] += seconds
    assert limit.allows("plain") and limit.allows("momentum") and limit.allows("sign")
    now[0] = 51.0
    assert limit.allows("plain") and not limit.allows("momentum") and not limit.allows("sign")
    assert _Limit(None, 0.0, {"plain": 1e9}).allows("plain")


# ------------------------------------------------------------------------------------------------------------- summary


def _training(arm: str, seed: int, loss: list[float], right: list[str], learnt: Any = None) -> dict[str, Any]:
    task = {"task": "t", "icl": [0.5], "right": right, "chance": 0.5, "zsl": 0.5, "n_queries": len(right[0])}
    task["right_without"] = "0" * len(right[0])
    held_out = {"16": {"loss": float(np.mean(loss)), "perplexity": float(np.exp(np.mean(loss))), "blocks": loss}}
    return {"arm": arm, "seed": seed, "status": "ok", "held_out": held_out, "few_shot": [task], "learnt": learnt}


def test_differences_are_paired_by_seed_and_block():
    rows = [
        _training("plain", 1, [1.0, 2.0], ["0101"]), _training("plain", 2, [3.0, 4.0], ["0000"]),
        _training("momentum", 2, [3.1, 4.3], ["1100"], [[0.2]]),
        _training("momentum", 1, [1.0, 2.2], ["0101"], [[0.1]]),
    ]  # fmt: skip
    found = summarise(rows, {"plain": rows[0]}, [16])
    difference = found["differences"][0]
    assert sorted(difference["loss"]["16"]["values"]) == pytest.approx([0.1, 0.2])
    assert sorted(difference["accuracy"]["values"]) == pytest.approx([0.0, 0.5])
    assert difference["loss"]["16"]["over"] == "seeds"
    assert found["arms"]["momentum"]["learnt"] == [0.1, pytest.approx(0.15), 0.2]


@pytest.mark.parametrize(("second", "word"), [(0.3, "worse"), (-0.2, "not distinguishable")])
def test_a_difference_must_hold_over_seeds_and_over_blocks(second: float, word: str):
    """Seeds agree in both cases; half of the text does not in the second."""
    gaps = np.tile([0.3, second], 10)
    rows = [
        _training(arm, seed, (2 + 0.001 * seed * (arm != "plain") + gaps * (arm != "plain")).tolist(), ["01"])
        for arm in ("plain", "momentum")
        for seed in (1, 2, 3)
    ]
    found = summarise(rows, {"plain": rows[0]}, [16])
    loss = found["differences"][0]["loss"]["16"]
    assert loss["ci"][0] > 0 and (loss["rows_ci"][0] > 0) == (second > 0)
    assert f"%, {word}" in found["sentences"][0] and ") and (" in found["sentences"][0]


def test_where_demonstrations_help_the_pretrained_model_is_told_apart():
    """Task a: right with demonstrations alone, and the arm is wrong there. Task b: no better with them."""
    a, b = {"task": "a", "right_without": "0" * 20}, {"task": "b", "right_without": "01" * 10}
    rows = []
    for arm, right in (("plain", ["1" * 20, "01" * 10]), ("momentum", ["0" * 19 + "1", "11" * 10])):
        row = _training(arm, 1, [1.0, 2.0, 3.0], ["1"])
        row["few_shot"] = [{**row["few_shot"][0], **each, "right": [x]} for each, x in zip((a, b), right, strict=True)]
        rows.append(row)
    found = summarise(rows, {"plain": rows[0]}, [16])
    assert found["works"] == ["a"]
    difference = found["differences"][0]
    assert difference["accuracy_where_it_works"]["mean"] == pytest.approx(-0.95)
    assert difference["accuracy"]["mean"] == pytest.approx((-0.95 + 0.5) / 2)
    assert "; on a -0.950 (" in found["sentences"][0]


def test_tasks_count_equally_whatever_their_number_of_queries():
    row = _training("plain", 1, [1.0], ["1111"])
    row["few_shot"].append({**row["few_shot"][0], "right": ["00", "10"]})
    assert _right(row).mean() == pytest.approx((1.0 + 0.25) / 2)


@pytest.mark.parametrize(("gap", "word"), [(0.01, "usable: below"), (0.5, "not shown usable")])
def test_signed_values_are_usable_by_a_rule(gap: float, word: str):
    blocks = np.random.default_rng(0).normal(2, 0.1, 30)
    rows = [_training("plain", 1, blocks.tolist(), ["01"]), _training("sign", 1, (blocks + gap).tolist(), ["01"])]
    sentence = summarise(rows, {"plain": rows[0], "sign": rows[1]}, [16])["sentences"][0]
    assert f"; {word}" in sentence and "the same in every pair" in sentence


def test_a_diverged_arm_is_said_to_be_so():
    rows = [_training("plain", 1, [1.0, 2.0], ["01"]), _training("sign", 1, [1.0, 2.0], ["01"])]
    rows[1] |= {"held_out": None, "few_shot": [], "status": "diverged"}
    found = summarise(rows, {"plain": rows[0], "sign": rows[1]}, [16])
    assert "a training diverged" in found["sentences"][0]


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"only": "plain,momentun"}, "there is no arm momentun"),
        ({"only": "plain,momentum_1.5"}, "momentum_1.5"),
        ({"only": "momentum"}, "plain is the control"),
        ({"context": 4096}, "eval-tokens"),
        ({"warmup": 900}, "warmup"),
        ({"batch": 6, "micro_batch": 4}, "does not divide"),
        ({"labels": "natural,foo"}, "labels"),
        ({"only": "sign,plain", "minutes": 5}, "plain must come first"),
    ],
)
def test_mistakes_are_one_sentence(given: dict[str, Any], problem: str):
    with pytest.raises(UserError, match="(?i)" + problem):
        RetrofitSettings.make(**given)


def test_the_command_refuses_before_any_work(place: Path, tmp_path: Path):
    app = typer.Typer()
    add(app)
    arguments = ["lab", "retrofit", "--model", str(place / "model"), "--device", "cpu", "--out", str(tmp_path / "x")]
    done = CliRunner().invoke(app, [*arguments, "--context", "512", "--eval-tokens", "512"])
    assert isinstance(done.exception, UserError) and "reads 256 tokens at most" in str(done.exception)
    assert not (tmp_path / "x" / "retrofit.json").exists()


def test_the_gpu_preset_is_a_setting_of_its_own():
    made = RetrofitSettings.make(preset="h200", steps=10, warmup=5)
    assert made.steps == 10 and made.batch == PRESETS["h200"]["batch"] and made.compile
    assert made.recipe.coefficient_lr == made.coefficient_lr
    assert variant_of("momentum_0.25") == Momentum(eta=0.25)
    assert replace(made, seeds=2).all_seeds == [1, 2]
