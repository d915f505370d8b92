"""Float32 products by oneDNN: exact to rounding, and used only where nothing differentiates and they are faster."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dualview.anatomy import onednn_products
from dualview.anatomy.onednn_products import product
from dualview.learning.finetune import train
from dualview.learning.recipe import Rule, Training, TrainingRecipe
from dualview.models.loading import adopt
from dualview.models.scoring import PassPlan, ask
from dualview.records import Setting
from equivalence import cases
from zoo import make

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs a torch with oneDNN")
CPU = torch.device("cpu")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on a processor where oneDNN is faster, and for products of every size; the shapes that it took."""
    shapes: list[tuple[int, ...]] = []

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append(tuple(x.shape))
        return product(x, weight, bias)

    monkeypatch.setattr(onednn_products, "_faster", lambda: True)
    monkeypatch.setattr(onednn_products, "_LEAST", 0)
    monkeypatch.setattr(onednn_products, "_LEAST_ROWS", 0)
    monkeypatch.setattr(onednn_products, "product", noted)
    return shapes


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    transposed=st.booleans(),
    biased=st.booleans(),
)
def test_a_product_is_a_float32_product(
    shape: list[int], widths: tuple[int, int], transposed: bool, biased: bool
) -> None:
    draw, (d_in, d_out) = torch.Generator().manual_seed(0), widths
    x, bias = torch.randn(*shape, d_in, generator=draw), torch.randn(d_out, generator=draw) if biased else None
    weight = torch.randn(*((d_in, d_out) if transposed else (d_out, d_in)), generator=draw)
    weight = weight.mT if transposed else weight
    found = product(x, weight, bias)
    own = torch.zeros(1, dtype=torch.float64) if bias is None else bias.double()
    wanted = x.double() @ weight.double().mT + own
    size = x.double().abs() @ weight.double().abs().mT + own.abs()
    assert found.shape == wanted.shape and found.dtype == torch.float32
    assert bool(((found - wanted).abs() <= (d_in + 2) * torch.finfo(torch.float32).eps * size).all())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("rule", ["sgd", "linearised"])
def test_a_run_by_onednn_equals_a_plain_one(
    name: str, rule: str, taken: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = adopt(make(name, dtype=torch.float32), cases.lm(name).tokenizer, name)
    chosen: Rule = "sgd" if rule == "all" else rule  # pyright: ignore[reportAssignmentType]
    recipe = TrainingRecipe(rule=chosen, params="all" if rule == "all" else "kv")

    def asked() -> tuple[Setting, Setting]:
        [tuned] = train(lm, [Training(cases.SEQUENCES, 0.1)], recipe)
        plan = PassPlan(cases.DEMOS, 1)
        return ask(lm, cases.QUERIES, plan).settings[0], ask(lm, cases.QUERIES, plan, tuned.patch).settings[0]

    by_onednn = asked()
    assert taken
    taken.clear()
    monkeypatch.setattr(onednn_products, "_faster", lambda: False)
    plain = asked()
    assert not taken
    for one, other in zip(by_onednn, plain, strict=True):
        for own, wanted in ((one.log_probs, other.log_probs), (one.h, other.h), (one.m, other.m)):
            assert own is not None and wanted is not None
            finite = np.isfinite(wanted)
            assert np.array_equal(finite, np.isfinite(own))
            size = float(np.abs(wanted[finite]).max())
            np.testing.assert_allclose(own[finite], wanted[finite], rtol=0, atol=2e-5 * size)


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A processor to be described, with everything else as it must be."""
    about = tmp_path / "cpuinfo"
    monkeypatch.setattr(onednn_products, "_PROCESSORS", about)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    onednn_products._faster.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield about
    onednn_products._faster.cache_clear()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("about", "capability", "settings", "expected"),
    [
        ("vendor_id\t: AuthenticAMD\n", "AVX512", {}, True),
        ("vendor_id\t: AuthenticAMD\n", "AVX2", {}, False),
        ("vendor_id\t: AuthenticAMD\n", "AVX512", {"MKL_CBWR": "COMPATIBLE"}, False),
        ("vendor_id\t: GenuineIntel\n", "AVX512", {}, False),
        (None, "AVX512", {}, False),
    ],
)
def test_only_where_mkl_is_slower(
    about: str | None,
    capability: str,
    settings: dict[str, str],
    expected: bool,
    processor: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if about is not None:
        processor.write_text(about)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert onednn_products._faster() is expected  # pyright: ignore[reportPrivateUsage]


def test_other_numbers_and_narrow_models_are_left_alone(
    taken: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nn.Linear(12, 9), torch.randn(3, 12)
    with onednn_products.onednn_products(layer, torch.float32, CPU):
        layer(x)  # may be differentiated
    with torch.no_grad():
        for dtype, device in ((torch.float64, CPU), (torch.bfloat16, CPU), (torch.float32, torch.device("meta"))):
            with onednn_products.onednn_products(layer, dtype, device):
                layer(x)
        with onednn_products.onednn_products(layer, torch.float32, CPU):
            nn.functional.linear(x.double(), layer.weight.double())
            layer(torch.randn(12, 3).mT)
    assert not taken
    monkeypatch.setattr(onednn_products, "_LEAST", 10)
    with onednn_products.onednn_products(layer, torch.float32, CPU), torch.no_grad():
        layer(x)
    assert not taken


def test_a_gradient_by_onednn_is_that_of_float32_products(taken: list[tuple[int, ...]]) -> None:
    """Of linear and GPT-2's layers; a weight that asks for a gradient of its own keeps torch's products."""
    draw = torch.Generator().manual_seed(0)
    x, weight, pull = (torch.randn(*shape, generator=draw) for shape in ((2, 7, 12), (9, 12), (2, 7, 9)))
    bias = torch.randn(9, generator=draw)
    layer = nn.Linear(12, 9)
    products = (
        lambda x: nn.functional.linear(x, weight),
        lambda x: nn.functional.linear(x, weight, bias),
        lambda x: torch.addmm(bias, x.flatten(0, 1), weight.mT.contiguous()).view(2, 7, 9),
    )
    for made in products:
        given = x.clone().requires_grad_()
        with onednn_products.onednn_gradients(layer, torch.float32, CPU):
            found = made(given)
            [gradient] = torch.autograd.grad(found, [given], pull)
        assert len(taken) == 2  # there and back
        taken.clear()
        torch.testing.assert_close(found.detach(), made(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, pull @ weight, rtol=1e-5, atol=1e-5)
    with onednn_products.onednn_gradients(layer, torch.float32, CPU):
        layer(x).sum().backward()
    assert not taken and layer.weight.grad is not None
