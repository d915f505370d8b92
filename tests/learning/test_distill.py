"""Distillation: its loss against the slow way, on fast and slow architectures, and what it leaves untouched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualview
from dualview.io.errors import UserError
from dualview.learning.batch import Watch
from dualview.learning.distill import _Goal  # pyright: ignore[reportPrivateUsage]
from dualview.learning.finetune import train
from dualview.learning.recipe import Training, TrainingRecipe, projections_of, step_count
from dualview.learning.weight_patches import Deltas
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.models.scoring import PassPlan, ask
from equivalence import cases, tiny

NAMES = ("llama", "gpt2", "gemma2-softcap", "bloom", "minicpm3-latent")
STEP = 1e-3
SINGLE = ("llama", "gemma2-softcap", "minicpm3-latent")
"""Their norms compute in single precision, also in a model of double precision."""
RECIPE = TrainingRecipe(rule="distilled", rows=cases.QUERIES)


def teacher(at: str = "prompt") -> PassPlan:
    prefix, special = cases.PREFIXES["demos"]
    return PassPlan(prefix, special, at=at)  # pyright: ignore[reportArgumentType]


def some_change(lm: LanguageModel) -> Deltas:
    deltas = Deltas.zero(projections_of(lm, RECIPE), 1, torch.float64)
    generator = torch.Generator().manual_seed(3)
    for part in (*deltas.weights, *deltas.biases):
        if part is not None:
            part.copy_(0.05 * torch.randn(part.shape, generator=generator, dtype=part.dtype))
    return deltas


def slow_loss(lm: LanguageModel, at: str, patch: Deltas | None) -> float:
    """The docstring's loss, from what `ask` records."""
    plan = teacher(at)
    bare = PassPlan(plan.prefix[: plan.special], plan.special, at=plan.at)
    icl, zsl, own = (
        ask(lm, cases.QUERIES, how, p).settings[0] for how, p in ((plan, None), (bare, None), (bare, patch))
    )
    missed = whole = 0.0
    for i, query in enumerate(cases.QUERIES):
        s = [setting.log_probs[i, : len(query.candidates)] for setting in (icl, zsl, own)]
        goal, before, now = (scores - scores.mean() for scores in s)
        missed, whole = missed + ((now - goal) ** 2).sum(), whole + ((before - goal) ** 2).sum()
    assert icl.h is not None and zsl.h is not None and own.h is not None
    shares = [
        ((own.h[:, layer] - icl.h[:, layer]) ** 2).sum() / ((zsl.h[:, layer] - icl.h[:, layer]) ** 2).sum()
        for layer in range(icl.h.shape[1])
    ]
    return missed / whole / 2 + float(np.mean(shares)) / 2


@pytest.mark.parametrize("at", ["prompt", "label0"])
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_share_not_reproduced(name: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = cases.lm(name)
    goal, patch, rows = _Goal.of(lm, cases.QUERIES, teacher(at)), some_change(lm), list(range(len(cases.QUERIES)))
    still = Deltas.zero(projections_of(lm, RECIPE), 1, torch.float64)
    with torch.no_grad():
        shown = goal.shown(lm, rows, padded=False)
        assert float(goal.loss(lm, shown, still)) == pytest.approx(1.0, abs=1e-9)
        packed = float(goal.loss(lm, shown, patch))
        # As a recorded step shows them: all of one length.
        assert float(goal.loss(lm, goal.shown(lm, rows, padded=True), patch)) == pytest.approx(packed, rel=1e-6)
        monkeypatch.setattr(LanguageModel, "shares_prefix", lambda *_: False)
        whole = float(goal.loss(lm, goal.shown(lm, rows, padded=False), patch))
    exact = 1e-6 if name in SINGLE else 1e-9
    assert packed == pytest.approx(slow_loss(lm, at, patch), abs=exact)
    assert whole == pytest.approx(packed, abs=exact)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_by_finite_differences(name: str) -> None:
    lm = cases.lm(name)
    goal, patch, rows = _Goal.of(lm, cases.QUERIES, teacher()), some_change(lm), [0, 1, 2, 3]
    weight = patch.weights[1].requires_grad_()
    shown = goal.shown(lm, rows, padded=False)
    loss = goal.loss(lm, shown, patch)
    (gradient,) = torch.autograd.grad(loss, [weight])
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    sides: list[float] = []
    with torch.no_grad():
        for sign in (1, -1):
            weight.add_(sign * STEP * direction)
            sides.append(float(goal.loss(lm, shown, patch)))
            weight.sub_(sign * STEP * direction)
    assert (sides[0] - sides[1]) / (2 * STEP) == pytest.approx(float((gradient * direction).sum()), rel=2e-3, abs=1e-3)


def test_it_comes_closer_and_leaves_the_model_alone() -> None:
    lm = cases.lm("llama")
    before = {name: value.clone() for name, value in lm.model.state_dict().items()}
    training = Training((), 0.02, teacher())
    [tuned], [again] = (train(lm, [training], RECIPE) for _ in range(2))
    assert len(tuned.losses) == step_count(training, RECIPE) == 10
    assert tuned.losses[-1] < 0.7 * tuned.losses[0] and tuned.status == "ok"
    assert isinstance(tuned.patch, Deltas) and slow_loss(lm, "prompt", tuned.patch) < 0.7
    assert again.losses == tuned.losses
    assert all(torch.equal(value, before[name]) for name, value in lm.model.state_dict().items())
    assert not any(p.grad is not None for p in lm.model.parameters())
    assert not any(w.requires_grad for w in tuned.patch.weights)


def test_at_a_rate_of_zero_nothing_changes() -> None:
    [tuned] = train(cases.lm("llama"), [Training((), 0.0, teacher())], RECIPE)
    assert isinstance(tuned.patch, Deltas) and not any(bool(w.any()) for w in tuned.patch.weights)


@pytest.mark.parametrize(
    ("training", "recipe", "message"),
    [
        (Training((), 0.01), RECIPE, "in-context prompt"),
        (Training((), 0.01, teacher()), TrainingRecipe(rule="distilled"), "rows"),
        (Training((), -0.01, teacher()), RECIPE, "at least 0"),
    ],
)
def test_what_cannot_be_distilled_is_refused(training: Training, recipe: TrainingRecipe, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(cases.lm("llama"), [training], recipe)


def test_it_has_no_dual_form() -> None:
    with pytest.raises(UserError, match="no dual form"):
        train(cases.lm("llama"), [Training((), 0.01, teacher())], RECIPE, watch=Watch(lambda _step: None))


def test_a_run_whose_fine_tuning_is_distillation(tmp_path: Path) -> None:
    lm = load_model(str(tiny.save_model(tmp_path / "model")), dtype="float64", device="cpu")
    task = tiny.save_task(tmp_path / "task", train=20, validation=12)
    options: dict[str, Any] = {"shots": 4, "n_queries": 8, "lr_grid": (0.01,), "controls": "full"}
    distilled = dualview.run(model=lm, task=str(task), ft_rule="distilled", **options).to_json()
    assert distilled["ft"]["rule"] == "distilled" and distilled["ft"]["steps"] == 30  # 10 rows, 4 a step, 10 times
    assert distilled["kendall"] is None and distilled["order_sensitivity"]["ft"] is None
    assert {"ft_sgd", "ft_flipped_labels"} <= set(distilled["controls"]["sim_aou"]["others"])
    assert "ft_sign_flipped" not in distilled["controls"]["sim_aou"]["floors"]
    # In another run it is a ceiling: what a change of K and V can carry.
    descent = dualview.run(model=lm, task=str(task), **options).to_json()
    assert descent["controls"]["sim_aou"]["ceilings"]["ft_distilled"] == distilled["sim_aou"]["raw"]
    assert distilled["sim_aou"]["raw"] > descent["sim_aou"]["raw"]


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(UserError, match="loss of its own"):
        dualview.run(task="movie", ft_rule="distilled", ft_loss="label")
    with pytest.raises(UserError, match="ft_params all"):
        dualview.run(task="movie", ft_rule="distilled", ft_params="all")
