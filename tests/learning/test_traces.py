"""The factors of an update: inputs and error signals that add up to it, and what was tapped along the way."""

from __future__ import annotations

import pytest
import torch

import zoo
from dualview.learning import finetune as module
from dualview.learning.finetune import finetune
from dualview.learning.recipe import TrainingRecipe
from dualview.learning.traces import TrainingTrace, trace_training
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
