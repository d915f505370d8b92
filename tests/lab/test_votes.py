"""Votes of training examples: the classifier against its algebra, the language model against slow passes, the lab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualview.comparison.prepare import Prepared, prepare
from dualview.duality.on_model.demo_tokens import demo_tokens, ft_shares, icl_mass
from dualview.duality.on_model.dual_finetuning import trace_for
from dualview.duality.theory.linear import aggregate
from dualview.io.errors import UserError
from dualview.lab import harness
from dualview.lab.harness import LabResult
from dualview.lab.votes import classifier, on_model
from dualview.lab.votes.report import figures, tables
from dualview.lab.votes.run import votes
from dualview.learning.recipe import TrainingRecipe
from dualview.learning.traces import trace_training
from dualview.models.loading import load_model
from dualview.models.scoring import PassPlan, ask
from dualview.options import RunOptions
from equivalence.tiny import save_model, save_task

SAMPLES = classifier.gaussian(60, 3)


@pytest.fixture(scope="module")
def trained() -> classifier.Trained:
    return classifier.train(SAMPLES.x, SAMPLES.y, (32, 12, 12, 10), steps=40, batch=8, rate=0.1, seed=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("votes")
    save_model(folder / "model")
    save_task(folder / "task")
    return folder


@pytest.fixture(scope="module")
def prepared(place: Path) -> Prepared:
    lm = load_model(str(place / "model"), dtype="float64", device="cpu")
    task = str(place / "task" / "tiny.yaml")
    options = RunOptions.make(model=lm.name, task=task, shots=5, n_queries=4, lr=0.03, device="cpu", dtype="float64")
    return prepare(options, lm)


# --------------------------------------------------------------------------------------------------------- classifier


def test_class_updates_are_the_update_and_its_contributions(trained: classifier.Trained):
    """Σ_c ΔW_c = W_T − W_0, and u_cᵀ ΔW_c x is the sum of the recorded examples' own contributions."""
    groups = SAMPLES.y[trained.shown]
    x = SAMPLES.x[:5]
    parts = zip(trained.forms, trained.model.weights(), trained.model.inputs(x), strict=True)
    for form, weight, read in parts:
        updates = classifier.class_updates(form, groups, 10)
        torch.testing.assert_close(updates.sum(0), weight - form.weight0, atol=1e-9, rtol=0)
        direction = torch.randn(len(weight), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        slow = aggregate(form.contributions(read.T.detach(), direction), groups, 10)
        fast = torch.einsum("i,cij,nj->cn", direction, updates, read.detach())
        torch.testing.assert_close(fast, slow, atol=1e-9, rtol=0)


def test_directions_carry_a_layer_to_the_logits(trained: classifier.Trained):
    """They are the gradients that autograd finds."""
    x = SAMPLES.x[:4]
    for layer, found in enumerate(trained.model.directions(x)):
        outputs: list[torch.Tensor] = []
        handle = trained.model.layers[layer].register_forward_hook(lambda _m, _i, out, kept=outputs: kept.append(out))
        logits = trained.model(x)
        handle.remove()
        for c in range(10):
            lead = (logits[:, c] - logits.mean(1)).sum()
            [slow] = torch.autograd.grad(lead, [outputs[0]], retain_graph=True)
            torch.testing.assert_close(found[:, c], slow, atol=1e-9, rtol=0)


def test_masses_are_sums_over_the_times_a_row_was_shown(trained: classifier.Trained):
    form, x = trained.forms[1], trained.model.inputs(SAMPLES.x[:3])[1].detach()
    found = classifier.masses(form.keys, trained.shown, 60, x)
    slow = torch.zeros(60, 3, dtype=torch.float64)
    for t, row in enumerate(trained.shown.tolist()):
        for q in range(3):
            slow[row, q] += (form.keys[:, t] @ x[q]).abs()
    torch.testing.assert_close(found, slow, atol=1e-9, rtol=0)


def test_classes_that_are_far_apart_vote_for_themselves():
    """Orthogonal classes: every vote by mass is the target; shuffled classes say nothing."""
    y = torch.arange(80) % 4
    noise = 0.05 * torch.randn(80, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    far = classifier.Samples(3 * torch.eye(4, dtype=torch.float64)[y] + noise, y, 4)
    found = classifier.measure(far, 50, 16, 1, steps=60, batch=10, rate=0.2)
    assert found["accuracy"] == 1 and found["wrong"] == 0 and found["residual"] < 1e-9
    first = found["layers"][0]
    assert first["mass"]["output"] == first["signed"]["output"] == 1
    assert first["mass"]["wrong, target"] is None
    assert first["mass, shuffled classes"]["output"] < 0.6 and first["class frequency"]["output"] < 0.6
    for rule in ("mass, final weights", "mass, untrained weights"):  # it reads the examples, whatever the weights
        assert first[rule] == first["mass"]


def test_agreement_is_split_by_what_was_answered_rightly():
    target, output = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 0, 1])
    found = classifier.agreement(torch.tensor([[0, 0, 2, 1]]), target, output)
    assert found == {"output": 0.5, "right": 0.5, "wrong, target": 0.5, "wrong, output": 0.5}


# ------------------------------------------------------------------------------------------------------ language model


def test_softmax_masses_are_those_of_whole_prompts(prepared: Prepared):
    prompts, shared = prepared.prompts, demo_tokens(prepared.prompts)
    found, scores = on_model.softmax_masses(prepared.lm, prompts)
    for i, query in enumerate(prompts.queries):
        slow = icl_mass(prepared.lm, prompts.with_queries([query]), shared).mean(1)
        np.testing.assert_allclose(found[:, i][:, shared.place], slow.numpy(), atol=1e-9)
    np.testing.assert_allclose(scores, ask(prepared.lm, prompts.queries, prepared.in_context).settings[0].log_probs)


def test_masses_and_shares_are_those_of_explain(prepared: Prepared):
    lm, prompts, shared = prepared.lm, prepared.prompts, demo_tokens(prepared.prompts)
    (trace,) = trace_training(lm, prompts.training_sequences, [0.03], TrainingRecipe())
    trace = trace_for(lm, trace)
    found, scores = on_model._of_training(prepared, trace, shared)
    query = prompts.queries[2]
    slow = ft_shares(lm, trace, [*prompts.zero_prefix, *query.ids])
    for role in ("v", "k"):
        by_demo = aggregate(shared.from_training(slow[role].T, trace.tokens), shared.demo, 5).T.numpy()
        mine = found[f"share of {role.upper()}"][:, 2]
        np.testing.assert_allclose(mine / mine.sum(-1, keepdims=True), by_demo / by_demo.sum(-1, keepdims=True), 1e-6)
    bare = prompts.zero_prefix
    np.testing.assert_allclose(
        scores, ask(lm, prompts.queries, PassPlan(bare, len(bare)), trace.tuned.patch).settings[0].log_probs
    )


def test_votes_follow_a_planted_attention():
    """Demonstration d gets most where the query's answer is its class: the vote is the answer, shuffled it is not."""
    classes, answers = np.array([0, 1, 2, 0, 1, 2]), np.array([0, 1, 2, 1])
    planted = 1 + 0.5 * (classes == answers[:, None])[None].repeat(2, 0)
    planted[..., 0] += 5  # a demonstration that always gets more decides the raw vote, and not the centred one
    found = on_model._votes(planted, classes, [np.array([1, 2, 0, 2, 0, 1])], 3, answers)
    assert found["vote"] == answers.tolist() and found["raw"] == [0, 0, 0, 0]
    assert found["shuffled"] == [0, 0, 0, 0]
    assert found["layers"] == pytest.approx([1 - 3 / 8] * 2)


def test_margins_are_what_another_query_gives():
    assert on_model.by_margins(np.array([1, 1, 0, 1]), np.array([1, 0, 1, 1])).tolist() == [0.75, 0.25, 0.75, 0.75]


# -------------------------------------------------------------------------------------------------------------- the lab


def _options(place: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(place / "model"), "tasks": str(place / "task" / "tiny.yaml"), "rows": 24, "trained_rows": 14,
        "width": 6, "steps": 10, "batch_size": 4, "shots": 5, "n_queries": 6, "seeds": 2, "device": "cpu", **more,
    }  # fmt: skip


def test_the_lab_on_a_tiny_model(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(classifier, "SENTENCES", str(place / "task" / "tiny.yaml"))
    monkeypatch.setattr(harness, "_write_figures", lambda _figures, _folder: [])
    first = votes(out=place / "out", **_options(place))
    again = votes(**_options(place))
    assert again.results == first.results and first.seeds == [1, 2]
    read = LabResult.load(place / "out" / "votes.json")
    assert not list((place / "out").glob(".state-*"))
    assert "\n\n".join(t.markdown() for t in tables(read)) in (place / "out" / "votes.md").read_text()
    assert len(tables(read)[0].rows) == 2 * len(classifier.RULES) and len(tables(read)[2].rows) == len(on_model.RULES)
    assert set(figures(read)) == {"votes"}
    assert read.provenance["command"].startswith("dualview lab votes --seed 1 --device cpu --seeds 2")


def test_a_finished_classifier_is_not_trained_again(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "_write_figures", lambda _figures, _folder: [])
    trained: list[int] = []
    measure = classifier.measure

    def stopped(samples: Any, rows: int, width: int, seed: int, **how: Any) -> dict[str, Any]:
        trained.append(seed)
        if trained == [1, 2]:
            raise KeyboardInterrupt
        return measure(samples, rows, width, seed, **how)

    monkeypatch.setattr(classifier, "measure", stopped)
    options = _options(place, classify="gaussian", tasks=())
    with pytest.raises(KeyboardInterrupt):
        votes(out=place / "stopped", **options)
    resumed = votes(out=place / "stopped", **options)
    assert trained == [1, 2, 2]
    assert json.dumps(resumed.results) == json.dumps(votes(**options).results)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"classify": "digits"}, "there is no 'digits'"),
        ({"trained_rows": 24}, "none is left to test"),
        ({"tasks": "nothing"}, "nothing"),
        ({"lr": 0}, "--lr"),
    ],
)
def test_mistakes_are_one_sentence(place: Path, given: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        votes(out=place / "wrong", **_options(place, **given))
    assert not (place / "wrong").exists()
