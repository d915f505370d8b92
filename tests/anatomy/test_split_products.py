"""Float32 products by bfloat16 parts: the parts are exact, and a product is as exact as a plain one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dualview.anatomy import split_products
from dualview.anatomy.split_products import own_linear, parts, split_linear
from dualview.learning.finetune import train
from dualview.learning.recipe import Rule, Training, TrainingRecipe
from dualview.models.loading import adopt
from dualview.models.scoring import PassPlan, ask
from dualview.records import Setting
from equivalence import cases
from zoo import make

# Below 2⁻¹⁰⁰ the last part may be too small for a number; above 2¹²⁷ the first may be rounded to infinity.
NUMBERS = st.floats(2.0**-100, 2.0**126, width=32) | st.floats(-(2.0**126), -(2.0**-100), width=32) | st.just(0.0)


def exact(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    """What tensor cores do, in double precision and rounded once."""
    product = a.double() @ b.double()
    return (product if c is None else product + c.double()).float()


@given(st.lists(NUMBERS, min_size=1, max_size=20))
def test_the_parts_add_up_to_the_number(numbers: list[float]) -> None:
    x = torch.tensor([numbers])
    for reverse in (False, True):
        found = parts(x, reverse=reverse).double().view(3, -1)
        assert torch.equal(found.sum(0), x[0].double())
        sizes = found.flip(0).abs() if reverse else found.abs()
        assert bool((sizes[1] <= 2.0**-7 * sizes[0]).all() and (sizes[2] <= 2.0**-7 * sizes[1]).all())


@pytest.mark.parametrize("depth", [40, 1 << 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_parts_is_a_float32_product(
    monkeypatch: pytest.MonkeyPatch, depth: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(split_products, "_DEPTH", depth)
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(4, 5, 96, generator=draw) * torch.logspace(-3, 3, 96)).to(dtype)
    weight, bias = torch.randn(7, 96, generator=draw), torch.randn(7, generator=draw)
    found = split_linear(x, weight, bias, exact)
    wanted = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert found.shape == wanted.shape and found.dtype == torch.float32
    assert float(((found - wanted).abs() / size).max()) < 4 * torch.finfo(torch.float32).eps
    without_bias = split_linear(x, weight, None, exact)
    assert torch.allclose(without_bias + bias, found)


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on a GPU whose tensor cores pay, and for products of every size; the shapes that were split."""
    shapes: list[tuple[int, ...]] = []

    def product(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
        shapes.append(tuple(a.shape))
        return exact(a, b, c)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return original(x, weight, bias, product)

    original = split_products.split_linear
    monkeypatch.setattr(split_products, "_faster", lambda _device: True)
    monkeypatch.setattr(split_products, "_WORTH", 0.0)
    monkeypatch.setattr(split_products, "_LEAST", 0)
    monkeypatch.setattr(split_products, "split_linear", linear)
    return shapes


def close(one: np.ndarray | None, other: np.ndarray | None) -> None:
    assert one is not None and other is not None
    finite = np.isfinite(other)
    assert np.array_equal(finite, np.isfinite(one))
    np.testing.assert_allclose(one[finite], other[finite], rtol=0, atol=2e-5 * float(np.abs(other[finite]).max()))


@pytest.mark.parametrize("rule", ["sgd", "linearised"])
def test_a_pass_by_parts_equals_a_plain_one(
    rule: Rule, splitting: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = adopt(make("llama", dtype=torch.float32), cases.lm("llama").tokenizer, "llama")

    def asked() -> tuple[Setting, Setting]:
        [tuned] = train(lm, [Training(cases.SEQUENCES, 0.1)], TrainingRecipe(rule=rule))
        plan = PassPlan(cases.DEMOS, 1)
        return ask(lm, cases.QUERIES, plan).settings[0], ask(lm, cases.QUERIES, plan, tuned.patch).settings[0]

    by_parts = asked()
    assert splitting
    monkeypatch.setattr(split_products, "_faster", lambda _device: False)
    splitting.clear()
    plain = asked()
    assert not splitting
    for one, other in zip(by_parts, plain, strict=True):
        close(one.log_probs, other.log_probs)
        close(one.h, other.h)
        close(one.m, other.m)


@pytest.mark.parametrize("rates", [1, 3])
def test_what_is_added_to_a_half_precision_output_is_by_parts(splitting: list[tuple[int, ...]], rates: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rates, 5, 96, generator=draw).bfloat16(), torch.randn(rates, 7, 96, generator=draw)
    with torch.no_grad():
        found = own_linear(x, weight)
    wanted = x.double() @ weight.double().mT
    assert len(splitting) == 3 * rates and found.dtype == torch.float32
    assert torch.allclose(found.double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    splitting.clear()
    assert torch.equal(own_linear(x, weight), x.float() @ weight.mT) and not splitting  # as a training does


def test_what_is_differentiated_or_already_fast_is_left_alone(splitting: list[tuple[int, ...]]) -> None:
    lm = adopt(make("llama", dtype=torch.float32), cases.lm("llama").tokenizer, "llama")
    splitting.clear()
    train(lm, [Training(cases.SEQUENCES, 0.1)], TrainingRecipe())
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        ask(lm, cases.QUERIES, PassPlan(cases.DEMOS, 1))
    finally:
        torch.set_float32_matmul_precision(before)
    wide = cases.lm("llama")  # float64
    ask(wide, cases.QUERIES, PassPlan(cases.DEMOS, 1))
    assert not splitting
