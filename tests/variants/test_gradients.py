"""Gradients against finite differences, for queries, keys, values and the coefficient."""

from __future__ import annotations

import pytest
import torch

from dualview.variants import Alibi, Linear, Momentum, Negative, Regularised, Sign, TokenShift, apply
from dualview.variants.sign import straight_through_sign
from dualview.variants.sums.layout import read_layout
from dualview.variants.sums.scan import CHUNK, moving_sum

SMOOTH = [
    Momentum(),
    Regularised(),
    Regularised(form="strict"),
    Negative(k=2),
    Linear(),
    Linear(bare=True, average=True),
    TokenShift(),
    Alibi(),
]
SIGNS = [Sign(scale="constant"), Sign(scale="sequence"), Sign(scale="token")]


def inputs(length=4):
    draw = torch.Generator().manual_seed(3)
    shapes = [(2, 4, length, 2), (2, 2, length, 2), (2, 2, length, 2)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def masks(kit, length=4):
    padded = torch.ones(2, length, dtype=torch.bool)
    padded[0, :2] = False
    return {"causal": None, "padded": kit.causal_mask(padded), "window": kit.causal_mask(torch.ones_like(padded), 2)}


@pytest.mark.parametrize("which", ["causal", "padded", "window"])
@pytest.mark.parametrize("coefficient", [0.4, [0.0, 0.7]], ids=["layer", "head"])
@pytest.mark.parametrize("variant", SMOOTH, ids=lambda v: v.name)
def test_gradients(kit, variant, coefficient, which):
    mask = masks(kit)[which]
    real = torch.ones(2, 4, dtype=torch.bool) if mask is None else mask[:, 0].any(-1)
    each = torch.tensor(coefficient, dtype=torch.float64, requires_grad=True)

    def attention(query, key, value, each):
        return apply(variant, query, key, value, mask=mask, coefficient=each)[real]

    assert torch.autograd.gradcheck(attention, (*inputs(), each))


@pytest.mark.parametrize("which", ["causal", "padded", "window"])
@pytest.mark.parametrize("variant", SIGNS, ids=lambda v: v.scale)
def test_gradients_around_the_sign(kit, variant, which):
    """Everything but the path through sign(v) itself: queries, keys, α."""
    mask = masks(kit)[which]
    real = torch.ones(2, 4, dtype=torch.bool) if mask is None else mask[:, 0].any(-1)
    query, key, value = inputs()
    each = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)

    def attention(query, key, each):
        return apply(variant, query, key, value.detach(), mask=mask, coefficient=each)[real]

    assert torch.autograd.gradcheck(attention, (query, key, each))


@pytest.mark.parametrize("variant", SIGNS, ids=lambda v: v.scale)
def test_straight_through_gradient(monkeypatch, variant):
    """The gradient in v is that of the same attention with sign(v) replaced by sign(v₀) + v − v₀, around v₀."""
    query, key, value = (x.detach() for x in inputs())
    direction = torch.randn(value.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    around = value.clone()
    value.requires_grad_()
    weights = torch.randn(2, 4, 4, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    (apply(variant, query, key, value) * weights).sum().backward()

    monkeypatch.setattr("dualview.variants.sign.straight_through_sign", lambda v: around.sign() + v - around)
    step = 1e-6
    up, down = ((apply(variant, query, key, around + s * direction) * weights).sum() for s in (step, -step))
    numeric = (up - down) / (2 * step)
    torch.testing.assert_close((value.grad * direction).sum(), numeric, rtol=1e-7, atol=1e-8)


def test_straight_through_sign_is_exactly_a_sign():
    v = torch.tensor([-1e-30, -3.7, 0.0, 1e-12, 5e8], requires_grad=True)
    out = straight_through_sign(v)
    assert out.tolist() == [-1.0, -1.0, 0.0, 1.0, 1.0]
    out.sum().backward()
    assert v.grad.tolist() == [1.0] * 5


@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_scan_gradients_over_several_chunks(eta):
    length = 2 * CHUNK + 3
    values = torch.randn(1, 1, length, 1, dtype=torch.float64, requires_grad=True)
    each = torch.tensor(eta, dtype=torch.float64, requires_grad=True)
    layout = read_layout(None, length, length, values.device)
    assert torch.autograd.gradcheck(lambda v, e: moving_sum(v, e, layout), (values, each), fast_mode=True)


def test_linear_gradients_over_several_chunks():
    query, key, value = inputs(CHUNK + 2)
    assert torch.autograd.gradcheck(lambda q, k, v: apply(Linear(), q, k, v), (query, key, value), fast_mode=True)
