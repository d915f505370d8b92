"""A context as a patch of real architectures: equal logits, by weights that are really changed, and how it can fail."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import zoo
from close import assert_close
from dualview.duality.on_model.block_patches import LowRank, unscaled
from dualview.duality.on_model.context_patch import context_patch, patch_report
from dualview.duality.on_model.feed_forward import feed_forwards
from dualview.duality.on_model.single_prompt import last_logits
from dualview.io.errors import UserError
from dualview.models.loading import adopt
from equivalence.cases import lm as zoo_lm
from equivalence.cases import tokens

CONTEXT, QUERY, OTHER = [1, *tokens(14, 5)], tokens(6, 6), tokens(6, 7)
EXPERTS = ("gpt_oss-sinks", "mixtral", "qwen3_next-hybrid")
COVERED = [name for name in zoo.ZOO if name not in EXPERTS]


@pytest.mark.parametrize("token", ["last", "every"])
@pytest.mark.parametrize("name", COVERED)
def test_patched_zero_shot_says_what_in_context_says(name, token):
    report = patch_report(zoo_lm(name), CONTEXT, QUERY, [1], token=token)
    assert report.error < 1e-9 and report.relative < 1e-9 and report.same_token
    assert report.unpatched > 0.05


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2-softcap", "gptj", "bloom"])
def test_without_bos_and_with_part_of_the_context_kept(name):
    lm = zoo_lm(name)
    assert patch_report(lm, CONTEXT, QUERY, []).error < 1e-9
    kept = patch_report(lm, CONTEXT, QUERY, CONTEXT[:6], token="every")
    assert kept.error < 1e-9 < kept.unpatched
    assert patch_report(lm, CONTEXT, QUERY, CONTEXT).error < 1e-12


def plain(model, ids):
    """Hugging Face's own forward, nothing of dualview in it."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0, -1]


def with_changed_weights(lm, patch):
    """A copy of the model whose parameters are W + ΔW, written from the printed formulas."""
    twin = copy.deepcopy(lm.model)
    names = {module: name for name, module in lm.model.named_modules()}
    with torch.no_grad():
        for block in patch.blocks:
            for reader in block.place.readers:
                change(
                    twin.get_submodule(names[reader]), lambda weight, low=block.readers: weight @ low.left.T @ low.right
                )
            carrier = twin.get_submodule(names[block.place.carrier])
            if isinstance(block.carrier, LowRank):
                change(carrier, lambda _, low=block.carrier: low.left.T @ low.right)
            else:
                {"bias": lambda c: c.bias, "scale": lambda c: c.weight}[block.place.kind](carrier).add_(block.carrier)
    return twin


def change(module, delta):
    transposed = isinstance(module, Conv1D)
    matrix = delta(module.weight.T if transposed else module.weight)
    assert torch.linalg.matrix_rank(matrix) <= 1
    module.weight.add_(matrix.T if transposed else matrix)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    # Llama's and Gemma's norms compute in float32 in any model, and Gemma's casts its scale to it too.
    [("gpt2", 1e-9), ("falcon-groups", 1e-9), ("phi-parallel", 1e-9), ("llama", 1e-5), ("gemma2-softcap", 1e-4)],
)
def test_really_changed_weights_give_the_same(name, tolerance):
    lm = zoo_lm(name)
    patched = with_changed_weights(lm, context_patch(lm, CONTEXT, QUERY, [1], token="every"))
    aim, before = plain(lm.model, [*CONTEXT, *QUERY]), plain(lm.model, [1, *QUERY])
    assert (plain(patched, [1, *QUERY]) - aim).abs().max() < tolerance
    assert (before - aim).abs().max() > 0.5


@pytest.mark.parametrize(
    ("name", "kind", "readers", "carrier"),
    [
        ("llama", "weight", ("gate_proj", "up_proj"), "mlp.down_proj"),
        ("gemma3", "scale", ("gate_proj", "up_proj"), "post_feedforward_layernorm"),
        ("olmo2", "scale", ("gate_proj", "up_proj"), "post_feedforward_layernorm"),
        ("gpt2", "bias", ("c_fc",), "mlp.c_proj"),
        ("phi3-fused", "weight", ("gate_up_proj",), "mlp.down_proj"),
        ("gptj", "bias", ("fc_in",), "mlp.fc_out"),
        ("opt", "bias", ("fc1",), "fc2"),
        ("lfm2-hybrid", "weight", ("w1", "w3"), "feed_forward.w2"),
    ],
)
def test_the_feed_forward_half_is_found(name, kind, readers, carrier):
    lm = zoo_lm(name)
    names = {module: path for path, module in lm.model.named_modules()}
    places = feed_forwards(lm)
    assert len(places) == len(lm.anatomy.blocks)
    for place in places:
        assert place.kind == kind and place.scale == pytest.approx(1.0)
        assert tuple(names[reader].rsplit(".", 1)[-1] for reader in place.readers) == readers
        assert names[place.carrier].endswith(carrier)


def made(kind, **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return adopt(model, None, kind)


def test_scaled_residual_branches_and_norms_after_the_sum():
    granite = made("granite", **{**zoo.ZOO["granite"][1], "residual_multiplier": 0.3})
    assert {round(place.scale, 6) for place in feed_forwards(granite)} == {0.3}
    assert patch_report(granite, CONTEXT, QUERY, [1], token="every").error < 1e-9
    # OPT-350m norms after each sum: the block ends in a LayerNorm, whose bias carries the patch.
    late = made("opt", **{**zoo.ZOO["opt"][1], "do_layer_norm_before": False})
    places = feed_forwards(late)
    assert all(isinstance(place.carrier, torch.nn.LayerNorm) and place.kind == "bias" for place in places)
    assert patch_report(late, CONTEXT, QUERY, [1]).error < 1e-9


@pytest.mark.parametrize("name", ["gemma2-softcap", "olmo2", "stablelm"])
def test_unscaled_is_the_norm_without_its_scale(name):
    lm = zoo_lm(name)
    norm = next(m for m in lm.model.modules() if type(m).__name__.endswith("Norm"))
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    u, weight = unscaled(norm, x), norm.weight.detach()
    shifted = copy.deepcopy(norm)
    shifted.weight.add_(1.0)
    assert torch.allclose(u, shifted(x) - norm(x), atol=1e-5)
    assert torch.equal(norm.weight, weight)


def test_a_patch_belongs_to_its_query():
    lm = zoo_lm("llama")
    patch = context_patch(lm, CONTEXT, OTHER, [1])
    assert patch_report(lm, CONTEXT, QUERY, [1], patch).relative > 1e-2


def test_hooks_are_gone_afterwards_even_if_the_pass_fails():
    lm = zoo_lm("gpt2")
    before = last_logits(lm, [1, *QUERY])
    with pytest.raises(Exception, match=r"."):
        context_patch(lm, CONTEXT, [10**6], [1])
    assert_close(last_logits(lm, [1, *QUERY]), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in lm.model.modules())


@settings(max_examples=8, deadline=None)
@given(
    name=st.sampled_from(["llama", "gpt2", "gemma2-softcap", "gptj"]),
    demos=st.integers(1, 20),
    asked=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_any_lengths(name, demos, asked, seed):
    report = patch_report(zoo_lm(name), [1, *tokens(demos, seed)], tokens(asked, seed + 1), [1], token="every")
    assert report.error < 1e-8


@pytest.mark.parametrize("name", EXPERTS)
def test_mixtures_of_experts_are_refused(name):
    with pytest.raises(UserError, match="mixtures of experts"):
        context_patch(zoo_lm(name), CONTEXT, QUERY)


def test_an_empty_query_is_refused():
    with pytest.raises(UserError, match="at least one token"):
        context_patch(zoo_lm("llama"), CONTEXT, [])
