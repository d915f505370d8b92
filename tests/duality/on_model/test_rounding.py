"""What rounding can do to a pass: against a pass in float64, on many architectures, patched and not."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import zoo
from close import assert_close
from dualview.duality.errors import NotApplicable
from dualview.duality.on_model.context_patch import context_patch, patch_report
from dualview.duality.on_model.rounding import pass_rounding, require_digits, summed
from dualview.duality.on_model.single_prompt import last_logits
from dualview.models.loading import adopt
from equivalence.cases import lm as zoo_lm
from equivalence.cases import tokens

IDS = [1, *tokens(12, 3)]
CONTEXT, QUERY = [1, *tokens(9, 4)], tokens(5, 5)
NAMES = ["llama", "gpt2", "olmo2", "gemma2-softcap", "opt", "bloom", "gpt_oss-sinks", "falcon-groups", "mixtral"]


def narrow(name):
    model = copy.deepcopy(zoo_lm(name).model).float()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return adopt(model, None, name)


@pytest.mark.parametrize("name", NAMES)
def test_it_bounds_the_difference_of_float32_from_float64(name):
    lm = narrow(name)
    gap = (last_logits(lm, IDS).double() - last_logits(zoo_lm(name), IDS)).abs().max()
    found = pass_rounding(lm, IDS)
    assert gap <= found.largest <= 1e4 * gap, (float(gap), found)
    assert found.largest <= found.length


@pytest.mark.parametrize("token", ["last", "every"])
@pytest.mark.parametrize("seed", range(3))
def test_it_follows_the_conditioning_of_a_patch(token, seed):
    """A norm at the end of a block (OLMo 2) divides by small numbers: the error grows, and what is allowed with it."""
    kind, shape = zoo.ZOO["olmo2"]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), dtype=torch.float32).eval()
    lm = adopt(model, None, "olmo2")
    patch = context_patch(lm, CONTEXT, QUERY, [1], token)
    report = patch_report(lm, CONTEXT, QUERY, [1], patch)
    ids = [1, *QUERY]
    plain, patched = pass_rounding(lm, ids), pass_rounding(lm, ids, patch)
    assert report.error <= patched.largest and patched.largest > 3 * plain.largest
    assert patched.largest < 0.1 * report.unpatched  # still far from excusing no patch at all


def test_the_model_is_left_as_it_was():
    lm = zoo_lm("gpt2")
    before = last_logits(lm, IDS)
    pass_rounding(lm, IDS)
    assert not any(module._forward_hooks for module in lm.model.modules())
    assert_close(last_logits(lm, IDS), before)


def test_precision_and_length_are_in_it():
    assert summed(torch.float32, 100, 3.0) == pytest.approx(2 * 2**-23 * 10 * 3)
    assert summed(torch.float64, 0, 1.0) == 2 * 2**-52
    wide, lied = pass_rounding(zoo_lm("llama"), IDS), pass_rounding(zoo_lm("llama"), IDS, dtype=torch.float32)
    assert lied.largest == pytest.approx(wide.largest * 2**29)


def test_a_check_that_rounding_could_decide_is_refused():
    require_digits(1e-4, 1e-3, "it changes")
    for rounding, explained in ((1.1e-4, 1e-3), (1e-9, 0.0), (float("nan"), 1.0)):
        with pytest.raises(NotApplicable, match=r"it changes by .* of which rounding can be"):
            require_digits(rounding, explained, "it changes")
