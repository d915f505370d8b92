"""Fine-tuning in dual form on real architectures, against torch.optim.SGD on the model's own parameters."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from close import assert_close
from dualview.duality.on_model.dual_finetuning import (
    DualPatch,
    dual_form,
    dual_patch,
    reconstruct,
    role_factors,
    score_contributions,
    trace_for,
    update_contributions,
)
from dualview.duality.on_model.single_prompt import last_logits
from dualview.duality.theory.linear import aggregate
from dualview.io.errors import UserError
from dualview.learning.recipe import TrainingRecipe
from dualview.learning.traces import trace_training
from dualview.learning.weight_patches import Deltas
from dualview.models.loading import adopt
from dualview.models.scoring import PassPlan, ask
from equivalence.cases import QUERIES, SEQUENCES, worst
from equivalence.cases import lm as zoo_lm

RATE, EPOCHS = 0.01, 2
NAMES = ["llama", "qwen2-bias", "gpt2", "gpt_neox", "falcon-groups", "gemma2-softcap", "bloom", "lfm2-hybrid"]


def traced(name, **recipe):
    lm = zoo_lm(name)
    return lm, trace_training(lm, SEQUENCES, [RATE], TrainingRecipe(**{"epochs": EPOCHS, **recipe}))[0]


def trained_by_torch(name, pick, mask):
    """K and V of a copy, trained by torch.optim.SGD through Hugging Face's own forward."""
    model = copy.deepcopy(zoo_lm(name).model).requires_grad_(False)
    parameters = {n: p.requires_grad_() for n, p in model.named_parameters() if pick(n)}
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE)
    for _ in range(EPOCHS):
        for sequence in SEQUENCES:
            ids = torch.tensor([sequence.ids])
            cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).backward()
            for parameter in parameters.values():
                mask(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    return {n: p.detach() for n, p in parameters.items()}


def keep_all(_gradient):
    pass


def only_k_and_v(gradient):
    """GPT-2's fused matrix: its first third of columns makes q."""
    gradient[..., :32] = 0


@pytest.mark.parametrize(
    ("name", "pick", "mask"),
    [
        ("qwen2-bias", lambda n: ".k_proj." in n or ".v_proj." in n, keep_all),
        ("gpt2", lambda n: ".c_attn." in n, only_k_and_v),
    ],
)
def test_the_dual_form_is_what_sgd_makes(name, pick, mask):
    _, trace = traced(name)
    true = trained_by_torch(name, pick, mask)
    for factors in trace.factors:
        form = dual_form(factors, trace.tokens)
        weight, bias = true[f"{factors.projection.name}.weight"], true[f"{factors.projection.name}.bias"]
        weight = weight.T if name == "gpt2" else weight
        rows = slice(None) if factors.projection.rows is None else factors.projection.rows
        moved = weight[rows] - form.weight0
        # Hugging Face's float32 norms leave 1e-7 of the gradient; GPT-2 has none.
        tolerance = 1e-11 if name == "gpt2" else 1e-5
        assert torch.linalg.norm(form.delta() - moved) < tolerance * torch.linalg.norm(moved)
        assert torch.linalg.norm(form.bias() - bias[rows]) < tolerance * torch.linalg.norm(moved)


@pytest.mark.parametrize("name", NAMES)
def test_every_projection_is_rebuilt(name):
    lm, trace = traced(name)
    report = reconstruct(trace)
    assert {each.layer for each in report} == {p.name for p in lm.anatomy.projections(("k", "v"))}
    for each in report:
        assert each.weight < 1e-11 and each.weight_total < 1e-11 and each.steps == EPOCHS * len(SEQUENCES)
        assert each.bias is None or each.bias < 1e-11
        assert each.tokens == EPOCHS * sum(len(sequence.ids) for sequence in SEQUENCES)


def test_single_precision_is_rebuilt_to_its_own_rounding():
    model = copy.deepcopy(zoo_lm("llama").model).float()
    lm = adopt(model, None, "llama32")
    (trace,) = trace_training(lm, SEQUENCES, [RATE], TrainingRecipe())
    assert all(each.weight_total < 1e-5 and each.weight < 50 * each.rounding for each in reconstruct(trace))


@pytest.mark.parametrize("name", NAMES)
def test_the_model_in_dual_form_says_the_same(name):
    lm, trace = traced(name)
    how = PassPlan((1,), 1, record=False)
    tuned, dual, base = (
        ask(lm, QUERIES, how, patch).settings[0].log_probs[:2, :2]
        for patch in (trace.tuned.patch, dual_patch(lm, trace), None)
    )
    assert worst(tuned, dual) < 1e-11
    assert worst(tuned, base) > 1e-3


def test_the_dual_patch_forms_no_weight():
    lm, trace = traced("gpt2")
    patch = dual_patch(lm, trace)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    slow = torch.zeros(2, 5, patch.factors[0].errors.shape[1], dtype=torch.float64)
    for row in range(2):
        for token in range(5):
            for key, error in zip(patch.factors[0].inputs, patch.factors[0].errors, strict=True):
                slow[row, token] += error * (key @ x[row, token]) + error  # and the bias
    assert torch.allclose(patch.change(0, x), slow, atol=1e-14)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "falcon-groups", "codegen", "phi3-fused"])
@pytest.mark.parametrize("role", ["k", "v"])
def test_a_role_has_its_rows_of_a_fused_matrix(name, role):
    lm, trace = traced(name)
    patch = trace.tuned.patch
    assert isinstance(patch, Deltas)
    for layer, factors in zip(lm.anatomy.layers, role_factors(lm, trace, role), strict=True):
        (projection,) = layer.projections[role]
        index = next(i for i, p in enumerate(patch.projections) if p.name == projection.name)
        whole = torch.zeros(projection.module.weight.numel() // projection.d_in, projection.d_in, dtype=torch.float64)
        rows = patch.projections[index].rows
        whole[slice(None) if rows is None else rows] = patch.weights[index][0]
        assert torch.allclose(factors.errors.T @ factors.inputs, whole[projection.rows], atol=1e-13)
        assert factors.errors.shape[1] == projection.d_out < len(whole)


def test_contributions_to_an_update_add_up_to_its_length():
    lm, trace = traced("llama")
    x = torch.randn(32, dtype=torch.float64)
    factors = role_factors(lm, trace, "v")[1]
    found = update_contributions(factors, x)
    update = sum(e * (key @ x) for e, key in zip(factors.errors, factors.inputs, strict=True))
    for share, e, key in zip(found, factors.errors, factors.inputs, strict=True):
        assert torch.isclose(share, (e @ update) * (key @ x) / update.norm(), atol=1e-15)
    assert torch.isclose(found.sum(), update.norm())
    assert torch.equal(update_contributions(replace(factors, errors=0 * factors.errors), x), torch.zeros_like(found))


@pytest.mark.parametrize(("candidate", "against"), [((7,), (9,)), ((7, 8), (9, 3, 4)), ((7,), (9, 3))])
def test_contributions_to_a_lead_add_up(candidate, against):
    lm, trace = traced("gpt2")
    found = score_contributions(lm, trace, (1, *QUERIES[0].ids), candidate, against)
    assert abs(found.tuned - found.base) > 1e-4
    assert found.residual < 1e-9 * max(1.0, abs(found.tuned - found.base))
    by_demo = aggregate(found.by_token, found.tokens.demo)
    assert torch.isclose(by_demo.sum(), found.by_token.sum()) and len(by_demo) == len(SEQUENCES)
    steps = aggregate(found.by_token, trace.tokens.step)
    assert torch.isclose(steps.sum(), found.values.sum()) and len(steps) == EPOCHS * len(SEQUENCES)


def test_one_node_is_the_gradient_at_the_middle_of_the_path():
    """⟨∂s/∂W, e_t x_tᵀ⟩ by differentiating Hugging Face's model with respect to its whole weight."""
    lm, trace = traced("gpt2")
    ids, a, b = (1, *QUERIES[0].ids), 7, 9
    found = score_contributions(lm, trace, ids, (a,), (b,), nodes=1, tolerance=float("inf"))
    model = copy.deepcopy(lm.model)
    patch = trace.tuned.patch
    assert isinstance(patch, Deltas)
    places = {
        p.name: (p, w[0], bias) for p, w, bias in zip(patch.projections, patch.weights, patch.biases, strict=True)
    }
    for name, (p, w, bias) in places.items():
        module = model.get_submodule(name)
        with torch.no_grad():
            module.weight[:, p.rows] += 0.5 * w.T
            module.bias[p.rows] += 0.5 * bias[0]
        module.weight.requires_grad_()
        module.bias.requires_grad_()
    logits = model(torch.tensor([ids])).logits[0, -1]
    (logits[a] - logits[b]).backward()
    for row, factors in zip(found.values, trace.factors, strict=True):
        module, rows = model.get_submodule(factors.projection.name), factors.projection.rows
        slope, bias_slope = module.weight.grad.T[rows], module.bias.grad[rows]
        slow = [e @ slope @ x + e @ bias_slope for e, x in zip(factors.errors, factors.inputs, strict=True)]
        assert torch.allclose(row, torch.stack(slow), atol=1e-12)


def test_a_narrow_model_wears_what_its_wide_copy_learnt():
    lm = adopt(copy.deepcopy(zoo_lm("llama").model).to(torch.bfloat16), None, "narrow")
    (trace,) = trace_training(lm, SEQUENCES, [0.1], TrainingRecipe())
    how = PassPlan((1,), 1, record=False)
    own = trace_for(lm, trace)
    tuned, dual, base = (
        ask(lm, QUERIES[:1], how, patch).settings[0].log_probs
        for patch in (own.tuned.patch, dual_patch(lm, trace), None)
    )
    assert worst(tuned, base) > 0.05 and worst(tuned, dual) < 0.1 * worst(tuned, base)


def test_what_has_no_dual_form_is_refused():
    lm, trace = traced("llama")
    with pytest.raises(UserError, match="diverged"):
        dual_patch(lm, replace(trace, tuned=replace(trace.tuned, status="diverged")))
    with pytest.raises(UserError, match="two candidates"):
        score_contributions(lm, trace, (1, 2), (), (3,))
    with pytest.raises(UserError, match="at least one node"):
        score_contributions(lm, trace, (1, 2), (4,), (3,), nodes=0)
    _, values_only = traced("llama", params="v")
    with pytest.raises(UserError, match="no trained k"):
        role_factors(lm, values_only, "k")


def test_a_linearised_model_has_no_dual_form():
    """It answers by its expansion, so neither its weights nor a path to them say what it says; its update is a sum."""
    lm, trace = traced("llama", rule="linearised")
    with pytest.raises(UserError, match="first-order expansion"):
        dual_patch(lm, trace)
    with pytest.raises(UserError, match="first-order expansion"):
        score_contributions(lm, trace, (1, 2), (4,), (3,))
    assert all(each.weight < 1e-11 for each in reconstruct(trace))


def test_a_rate_of_zero_made_no_update():
    lm = zoo_lm("qwen2-bias")
    (trace,) = trace_training(lm, SEQUENCES, [0.0], TrainingRecipe())
    assert any(float(f.errors.abs().max()) > 0 for f in trace.factors)  # the gradients, which others read
    ids = (1, *QUERIES[0].ids)
    assert_close(last_logits(lm, ids, dual_patch(lm, trace)), last_logits(lm, ids))
    found = score_contributions(lm, trace, ids, (4,), (3,))
    assert float(found.values.abs().max()) == 0 and found.tuned == found.base and found.residual == 0
    assert all(each.weight == 0 and each.bias in (None, 0) for each in reconstruct(trace))


def test_an_update_small_beside_its_weights_is_rebuilt_as_well():
    lm = zoo_lm("llama")
    (trace,) = trace_training(lm, SEQUENCES, [1e-9], TrainingRecipe())
    assert all(each.weight < 1e-12 for each in reconstruct(trace))


def test_a_bias_that_only_rounding_moved_says_so():
    """No softmax sees the bias of a key: its error signals cancel, and what is left is rounding."""
    lm = adopt(copy.deepcopy(zoo_lm("opt").model).float(), None, "opt32")
    (trace,) = trace_training(lm, SEQUENCES, [RATE], TrainingRecipe())
    report = {each.layer: each for each in reconstruct(trace)}
    keys = [each for name, each in report.items() if "k_proj" in name]
    values = [each for name, each in report.items() if "v_proj" in name]
    assert keys and values
    assert all(each.bias < 10 * each.bias_rounding for each in report.values())
    assert all(each.bias_rounding > 1e-3 for each in keys) and all(each.bias_rounding < 1e-4 for each in values)


def test_hooks_are_gone_afterwards():
    lm, trace = traced("gpt2")
    with pytest.raises(RuntimeError), DualPatch(trace.factors).applied():
        raise RuntimeError
    assert not any(module._forward_hooks for module in lm.model.modules())
