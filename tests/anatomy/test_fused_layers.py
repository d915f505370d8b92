"""Norms and rotary positions in fewer kernels: the same numbers, for models that compute just that, during a pass."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualview.anatomy import fused_layers
from dualview.anatomy.fused_layers import fused_layers as fused
from dualview.learning.finetune import train
from dualview.learning.recipe import Rule, Training, TrainingRecipe
from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt
from dualview.models.scoring import PassPlan, ask
from dualview.records import Setting
from equivalence import cases
from zoo import make

CPU = torch.device("cpu")
PLAIN = ("llama", "mistral-window", "qwen2-bias", "qwen3-qk-norm", "phi3-fused", "olmo2", "granite", "gpt_oss-sinks")
"""Llama's norm and rotary positions; their files are copies of one another."""


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(fused_layers, "_worth", lambda _device: True)


def found_in(model: PreTrainedModel) -> tuple[int, int]:
    return tuple(map(len, fused_layers._fusable(model, CPU)))  # pyright: ignore[reportPrivateUsage]


def language_model(name: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return adopt(make(name, dtype=dtype), cases.lm(name).tokenizer, name)


@pytest.mark.parametrize("name", PLAIN)
def test_what_can_be_fused_is_found(name: str) -> None:
    norms = [m for m in make(name, dtype=torch.float32).modules() if "RMSNorm" in type(m).__name__]
    found = found_in(make(name, dtype=torch.float32))
    # GPT-OSS rotates by half as many cosines, which is another function.
    assert found == (len(norms), 0 if name == "gpt_oss-sinks" else 1)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "cohere-parallel", "gptj"])
def test_other_norms_and_rotations_are_left_alone(name: str) -> None:
    assert found_in(make(name, dtype=torch.float32)) == (0, 0)


@pytest.mark.parametrize("name", ["gemma", "gemma2-softcap", "gemma3"])
def test_a_norm_whose_weight_is_one_more_is_left_alone(name: str) -> None:
    assert found_in(make(name, dtype=torch.float32)) == (0, 1)


def test_a_norm_that_cannot_be_tried_is_left_alone() -> None:
    model = make("llama", dtype=torch.float32)
    model.model.norm.variance_epsilon = None
    model.model.layers[0].input_layernorm.to(torch.float8_e4m3fn)
    type(model.model.layers[1]).__module__, before = "not.imported", type(model.model.layers[1]).__module__
    try:
        assert found_in(model) == (5, 1)
    finally:
        type(model.model.layers[1]).__module__ = before


def test_a_norm_of_another_width_is_left_to_itself(worth: None) -> None:
    norm: Any = make("llama", dtype=torch.float32).model.norm
    norm.weight = torch.nn.Parameter(torch.full((1,), 2.0))  # applies to any width
    x = torch.randn(3, 32)
    with fused(norm, CPU):
        assert torch.equal(norm(x), type(norm).forward(norm, x))


def test_norms_that_round_to_single_precision_stay_so_in_a_double_model() -> None:
    assert found_in(make("llama", dtype=torch.float64))[0] == 0


def asked(lm: LanguageModel, rule: Rule) -> tuple[Setting, ...]:
    [tuned] = train(lm, [Training(cases.SEQUENCES, 0.01)], TrainingRecipe(rule=rule))
    plan = PassPlan(cases.DEMOS, 1)
    return ask(lm, cases.QUERIES, plan).settings[0], ask(lm, cases.QUERIES, plan, tuned.patch).settings[0]


def close(one: np.ndarray | None, other: np.ndarray | None) -> None:
    assert one is not None and other is not None
    finite = np.isfinite(other)
    assert np.array_equal(finite, np.isfinite(one))
    np.testing.assert_allclose(one[finite], other[finite], rtol=0, atol=1e-4 * float(np.abs(other[finite]).max()))


RUNS = [(name, rule) for name in PLAIN for rule in ("sgd", "layer-causal", "linearised")]


# Experts have no forward differentiation.
@pytest.mark.parametrize(("name", "rule"), [run for run in RUNS if run != ("gpt_oss-sinks", "linearised")])
def test_passes_and_trainings_give_the_same(
    name: str, rule: Rule, worth: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(function: Any) -> Any:
        return lambda *given: (calls.append(function.__name__), function(*given))[1]

    monkeypatch.setattr(torch.nn.functional, "rms_norm", counted(torch.nn.functional.rms_norm))
    monkeypatch.setattr(fused_layers, "_rotated", counted(fused_layers._rotated))  # pyright: ignore
    lm = language_model(name)
    with fused(lm.model, CPU):  # the trial of what can be fused
        calls.clear()
    by_fewer = asked(lm, rule)
    assert set(calls) == ({"rms_norm"} if name == "gpt_oss-sinks" else {"rms_norm", "_rotated"})
    monkeypatch.setattr(fused_layers, "_worth", lambda _device: False)
    for one, other in zip(by_fewer, asked(language_model(name), rule), strict=True):
        close(one.log_probs, other.log_probs)
        close(one.h, other.h)
        close(one.m, other.m)


def test_a_rotation_has_its_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    x, cos, signed = (
        torch.randn(*shape, generator=draw).double() for shape in ((1, 2, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8))
    )
    turn: Any = fused_layers._Rotated.apply  # pyright: ignore[reportPrivateUsage]
    assert torch.autograd.gradcheck(lambda y: turn(y, cos, signed), x.requires_grad_())


def test_outside_a_pass_the_model_is_its_own(worth: None) -> None:
    model = make("llama", dtype=torch.float32)
    file: Any = sys.modules[type(model).__module__]
    norm, rotary = model.model.norm, file.apply_rotary_pos_emb
    with pytest.raises(KeyError), fused(model, CPU):
        assert "forward" in norm.__dict__ and file.apply_rotary_pos_emb is not rotary
        with fused(model, CPU):  # a pass within a pass
            pass
        assert "forward" in norm.__dict__ and file.apply_rotary_pos_emb is not rotary
        twin = copy.deepcopy(norm)
        with torch.no_grad():
            twin.weight.zero_()
            assert not bool(twin(torch.ones(1, 32)).any())  # the copy's own weight
        raise KeyError
    assert "forward" not in norm.__dict__ and file.apply_rotary_pos_emb is rotary


def test_a_norm_that_somebody_replaced_is_called(worth: None) -> None:
    model = make("llama", dtype=torch.float32)
    replaced = model.model.norm

    def twice(x: Tensor) -> Tensor:
        return 2 * type(replaced).forward(replaced, x)

    replaced.forward = twice
    with fused(model, CPU):
        assert replaced.forward is twice
    assert replaced.forward is twice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_before(dtype: torch.dtype, worth: None) -> None:
    norm: Any = make("llama", dtype=torch.float32).model.norm
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    exact = norm.double()(x.double())
    norm, x = norm.to(dtype), x.to(dtype)
    with torch.no_grad():
        own, fewer = norm(x), fused_layers._norm(norm, x)  # pyright: ignore[reportPrivateUsage]
        assert float((fewer.double() - exact).abs().max()) <= 1.5 * float((own.double() - exact).abs().max())
