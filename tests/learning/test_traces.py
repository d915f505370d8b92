"""The factors of an update: inputs and error signals that add up to it, and what was tapped along the way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zoo
from dualview.io.errors import UserError
from dualview.learning import finetune as module
from dualview.learning import traces as traces_module
from dualview.learning.finetune import finetune, train
from dualview.learning.recipe import Training, TrainingRecipe
from dualview.learning.traces import Follower, TrainingTrace, trace_training
from dualview.learning.weight_patches import Deltas
from dualview.models.loading import adopt
from equivalence import cases, reference, training

RATES = (0.03, 0.0)
TOKENS = sum(len(sequence.ids) for sequence in cases.SEQUENCES)


def traced(
    name: str, recipe: TrainingRecipe = TrainingRecipe(), rates: tuple[float, ...] = RATES
) -> list[TrainingTrace]:
    lm = cases.lm(name)
    return trace_training(lm, cases.SEQUENCES, rates, recipe, lm.anatomy.projections(("q",)))


def check_sums(trace: TrainingTrace) -> None:
    patch = trace.tuned.patch
    assert isinstance(patch, Deltas)
    by_name = {factors.projection.name: factors for factors in trace.factors}
    for index, projection in enumerate(patch.projections):
        factors = by_name[projection.name]
        assert len(factors.inputs) == len(factors.errors) == len(trace.tokens.step)
        total = torch.zeros_like(patch.weights[index][0])
        for x, e in zip(factors.inputs, factors.errors, strict=True):
            total += e[:, None] * x[None, :]
        assert cases.worst(patch.weights[index][0], total) < 1e-12


@pytest.mark.parametrize("rule", ["sgd", "layer-causal"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-groups", "mixtral", "lfm2-hybrid"])
def test_factors_add_up_to_the_update(name: str, rule) -> None:
    trained, still = traced(name, TrainingRecipe(rule=rule))
    check_sums(trained)
    [alone] = finetune(cases.lm(name), cases.SEQUENCES, [RATES[0]], TrainingRecipe(rule=rule))
    assert cases.worst(trained.tuned.losses, alone.losses) < 1e-12
    # At a rate of 0 nothing moves, and the signals are those of a rate of 1 at the base weights: the first step's
    # differ from the trained run's by the rate alone.
    assert isinstance(still.tuned.patch, Deltas)
    assert not any(weight.any() for weight in still.tuned.patch.weights)
    first = len(cases.SEQUENCES[0].ids)
    for a, b in zip(trained.factors, still.factors, strict=True):
        assert cases.worst(a.errors[:first], RATES[0] * b.errors[:first]) < 1e-12
        assert cases.worst(a.inputs[:first], b.inputs[:first]) < 1e-12


def test_tokens_say_where_each_row_comes_from() -> None:
    [trace] = traced("llama", TrainingRecipe(epochs=2), rates=(0.01,))
    lengths = [len(sequence.ids) for sequence in cases.SEQUENCES]
    where = [(e * 3 + d, d, t) for e in range(2) for d, n in enumerate(lengths) for t in range(n)]
    tokens = trace.tokens
    found = list(zip(tokens.step.tolist(), tokens.demo.tolist(), tokens.position.tolist(), strict=True))
    assert found == where
    check_sums(trace)


def queries_while_training(name: str, params: str, rate: float) -> list[torch.Tensor]:
    """Each query projection's output at every training token, at the weights of its step, by the reference."""
    found: list[list[torch.Tensor]] = []
    for step, sequence in enumerate(cases.SEQUENCES):
        twin = training.train(cases.model(name), name, cases.SEQUENCES[:step], rate, params=params).model
        rows, seen = training.expected_rows(name, twin, "qkv"), {}
        hooks = [
            twin.get_submodule(key).register_forward_hook(
                lambda _m, _x, y, key=key, seen=seen: seen.update({key: y[0]})
            )
            for key in rows
            if key.endswith("q_proj")
        ]
        with torch.no_grad():
            reference.run(twin, sequence.ids)
        for hook in hooks:
            hook.remove()
        found.append([seen[key] for key in sorted(seen)])
    return [torch.cat(pieces) for pieces in zip(*found, strict=True)]


@pytest.mark.parametrize("params", ["kv", "qkv"])
def test_taps_are_as_they_were_during_training(params) -> None:
    trained, still = traced("llama", TrainingRecipe(params))
    for tapped, right in zip(trained.tapped, queries_while_training("llama", params, RATES[0]), strict=True):
        assert cases.worst(tapped, right) < cases.EXACT
    for tapped, right in zip(still.tapped, queries_while_training("llama", params, 0.0), strict=True):
        assert cases.worst(tapped, right) < cases.EXACT


@pytest.mark.parametrize("tokens", [1, 14, 1000])  # each alone, two together, all together
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama", TrainingRecipe()),
        ("llama", TrainingRecipe("qkv", loss="label", epochs=2)),
        ("gpt2", TrainingRecipe(rule="layer-causal")),
        ("falcon-groups", TrainingRecipe(rule="linearised")),
        ("mixtral", TrainingRecipe()),
        ("lfm2-hybrid", TrainingRecipe()),  # on the slow path nothing is padded
    ],
)
def test_at_a_rate_of_0_it_is_what_a_training_that_stays_where_it_is_leaves(
    name: str, recipe: TrainingRecipe, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = cases.lm(name)
    taps, training = lm.anatomy.projections(("q",)), Training([*cases.SEQUENCES, cases.SEQUENCES[0]], 0.0)
    follower = Follower(lm, [training], recipe, [0], taps)
    [tuned] = train(lm, [training], recipe, watch=follower.watch)
    [wanted] = follower.traces([tuned], [0])
    monkeypatch.setattr(traces_module, "_TOKENS", tokens)
    advanced: list[int] = []
    [found] = trace_training(lm, training.sequences, [0.0], recipe, taps, advanced.append)
    assert sum(advanced) == len(tuned.losses) == len(found.tuned.losses)
    assert (found.tuned.lr, found.tuned.status, type(found.tuned.patch)) == (0.0, "ok", type(tuned.patch))
    assert cases.worst(found.tuned.losses, tuned.losses) < 1e-9
    assert [f.projection.name for f in found.factors] == [f.projection.name for f in wanted.factors]
    for side in ("step", "demo", "position"):
        assert torch.equal(getattr(found.tokens, side), getattr(wanted.tokens, side))
    for a, b in zip(found.factors, wanted.factors, strict=True):
        assert cases.worst(a.inputs, b.inputs) < 1e-9
        assert cases.worst(a.errors, b.errors) < 1e-9
    for a, b in zip(found.tapped, wanted.tapped, strict=True):
        assert cases.worst(a, b) < 1e-9


def test_mistakes_are_told_at_a_rate_of_0_as_well() -> None:
    lm = cases.lm("llama")
    for recipe, what in ((TrainingRecipe(epochs=0), "--epochs"), (TrainingRecipe(rule="distilled"), "no dual form")):
        with pytest.raises(UserError, match=what):
            trace_training(lm, cases.SEQUENCES, [0.0], recipe)


def test_losses_that_are_not_finite_are_told_at_a_rate_of_0() -> None:
    lm = adopt(zoo.make("llama", dtype=torch.float32), None, "llama")
    with torch.no_grad():
        lm.model.get_output_embeddings().weight.fill_(torch.inf)
    [trace] = trace_training(lm, cases.SEQUENCES, [0.0], TrainingRecipe())
    assert trace.tuned.status == "diverged" and not any(np.isfinite(trace.tuned.losses))


def test_rates_too_many_for_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = traced("llama")
    monkeypatch.setitem(module._LOGIT_BYTES, "cpu", 1)
    for a, b in zip(traced("llama"), whole, strict=True):
        if a.tuned.lr:  # at a rate of 0 nothing moved
            check_sums(a)
        assert [tuple(x.shape) for x in a.tapped] == [tuple(x.shape) for x in b.tapped]
        for x, y in zip(a.factors, b.factors, strict=True):
            assert cases.worst(x.errors, y.errors) < 1e-12


def test_a_narrow_model_is_tapped_while_it_trains_and_not_before() -> None:
    lm = adopt(zoo.make("llama", dtype=torch.bfloat16), None, "llama")
    [trace] = trace_training(lm, cases.SEQUENCES, (0.01,), TrainingRecipe(), lm.anatomy.projections(("q",)))
    assert {len(tapped) for tapped in trace.tapped} == {TOKENS}
