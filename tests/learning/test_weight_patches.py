"""Patches: applied exactly, side by side, and removed without a trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import zoo
from close import assert_close, is_close
from dualview.anatomy.layers import Projection
from dualview.learning.weight_patches import Deltas, Parameters
from dualview.models.scoring import PassPlan, ask
from equivalence import cases, reference


def random_deltas(projections: tuple[Projection, ...], rates: int, seed: int = 0) -> Deltas:
    draw = torch.Generator().manual_seed(seed)

    def like(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else 0.05 * torch.randn(x.shape, generator=draw, dtype=x.dtype)

    zero = Deltas.zero(projections, rates, torch.float64)
    return Deltas(projections, tuple(map(like, zero.weights)), tuple(map(like, zero.biases)))  # pyright: ignore


def written_into(name: str, change: Deltas, rate: int):
    """A copy of the model with the change added to its weights."""
    twin = reference.copy_of(cases.model(name)).requires_grad_(False)
    for index, projection in enumerate(change.projections):
        module = twin.get_submodule(projection.name)
        rows = slice(None) if projection.rows is None else projection.rows
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        weight[rows] += change.weights[index][rate]
        bias = change.biases[index]
        if bias is not None:
            module.bias[rows] += bias[rate]
    return twin


@pytest.mark.parametrize("name", ["llama", "qwen2-bias", "gpt2", "gpt_neox", "falcon-groups", "codegen", "lfm2-hybrid"])
def test_several_changes_side_by_side_are_several_models(name: str) -> None:
    lm = cases.lm(name)
    change = random_deltas(lm.anatomy.projections(("k", "v")), rates=3)
    found = ask(lm, cases.QUERIES[:2], PassPlan(cases.DEMOS, 1), change)
    assert len(found.settings) == change.rows == 3
    for rate, setting in enumerate(found.settings):
        twin = written_into(name, change, rate)
        [single] = ask(lm, cases.QUERIES[:2], PassPlan(cases.DEMOS, 1), change.pick(rate)).settings
        for i, query in enumerate(cases.QUERIES[:2]):
            right = reference.answer(twin, cases.DEMOS, 1, query.ids, query.candidates)["prompt"]
            n = len(query.candidates)
            assert cases.worst(setting.log_probs[i, :n], right.log_probs) < cases.EXACT
            assert cases.worst(single.log_probs[i, :n], right.log_probs) < cases.EXACT
            assert setting.h is not None and cases.worst(setting.h[i], right.h) < cases.EXACT
            assert setting.demo_mass is not None
            assert cases.worst(setting.demo_mass[i], right.demo_mass) < cases.EXACT


def test_side_by_side_and_pick_are_inverse() -> None:
    projections = cases.lm("qwen2-bias").anatomy.projections(("k", "v"))
    several = [random_deltas(projections, rates=1, seed=seed) for seed in range(3)]
    joined = Deltas.side_by_side(several)
    for index, one in enumerate(several):
        for a, b in zip(joined.pick(index).weights, one.weights, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(joined.pick(index).biases, one.biases, strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("rows", [None, [1, 4, 5]])
@pytest.mark.parametrize("bias", [True, False])
def test_a_change_is_added_to_its_rows_alone(rows: list[int] | None, bias: bool) -> None:
    linear = nn.Linear(3, 6, bias=bias, dtype=torch.float64).requires_grad_(False)
    projection = Projection("map", linear, None if rows is None else torch.tensor(rows))
    change = random_deltas((projection,), rates=2)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    plain = linear(x)
    with change.applied():
        worn = linear(x)
    assert is_close(linear(x), plain) and not linear._forward_hooks
    touched = list(range(6)) if rows is None else rows
    for rate in range(2):
        for row in range(6):
            extra = torch.zeros(5, dtype=torch.float64)
            if row in touched:
                place = touched.index(row)
                extra = x[rate] @ change.weights[0][rate, place]
                if change.biases[0] is not None:
                    extra = extra + change.biases[0][rate, place]
            assert cases.worst(worn[rate, :, row] - plain[rate, :, row], extra) < 1e-12


def test_hooks_come_off_after_an_error() -> None:
    lm = cases.lm("llama")
    change = random_deltas(lm.anatomy.projections(("k", "v")), rates=1)
    with pytest.raises(RuntimeError, match="on the way"), change.applied():
        raise RuntimeError("on the way")
    assert not any(module._forward_hooks for module in lm.model.modules())


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # gpt2 ties its unembedding to its embedding
def test_parameters_stand_in_everywhere_and_step_back(name: str) -> None:
    model = zoo.make(name).requires_grad_(False)
    ids = torch.tensor([cases.DEMOS])
    other = zoo.make(name, seed=5).requires_grad_(False)
    values = {key: value.detach() for key, value in other.named_parameters()}
    kept = dict(model.named_parameters())
    before, right = model(ids, use_cache=False).logits, other(ids, use_cache=False).logits
    with Parameters(model, values).applied():
        assert_close(model(ids, use_cache=False).logits, right)
    assert_close(model(ids, use_cache=False).logits, before)
    assert all(parameter is kept[key] for key, parameter in model.named_parameters())
    with pytest.raises(RuntimeError, match="on the way"), Parameters(model, values).applied():
        raise RuntimeError("on the way")
    assert_close(model(ids, use_cache=False).logits, before)


def test_rows_of_one_batch_are_side_by_side_without_a_copy() -> None:
    projections = cases.lm("gpt2").anatomy.projections(("k", "v"))
    batch = random_deltas(projections, 3)
    rows = [batch.pick(r) for r in range(3)]
    for several, shared in ((rows, True), (rows[1:], True), ([rows[2], rows[0]], False), ([rows[0], rows[2]], False)):
        joined = Deltas.side_by_side(several)
        assert joined.rows == len(several)
        for i, weight in enumerate(joined.weights):
            assert torch.equal(weight, torch.cat([row.weights[i] for row in several]))
            assert (weight.untyped_storage().data_ptr() == batch.weights[i].untyped_storage().data_ptr()) == shared
        for i, bias in enumerate(joined.biases):
            own = [row.biases[i] for row in several]
            assert bias is None if own[0] is None else torch.equal(bias, torch.cat(own))  # pyright: ignore
    copies = [row.copy() for row in rows]
    assert all(torch.equal(a, b) for a, b in zip(Deltas.side_by_side(copies).weights, batch.weights, strict=True))
