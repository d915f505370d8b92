"""The identities on a language model's own weights and activations, for `verify --model`, with their misprints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from dualview.duality.errors import NotApplicable
from dualview.duality.on_model.block_patches import BlockPatches, LowRank, Token
from dualview.duality.on_model.context_patch import context_patch, patch_report
from dualview.duality.on_model.dual_finetuning import (
    DualPatch,
    deltas_of,
    dual_patch,
    reconstruct,
    role_factors,
    rows_within,
    score_contributions,
    update_contributions,
)
from dualview.duality.on_model.feed_forward import feed_forwards
from dualview.duality.on_model.rounding import pass_rounding, require_digits, summed
from dualview.duality.on_model.shared_patch import fit_patch, in_context_aims
from dualview.duality.on_model.single_prompt import projected
from dualview.duality.on_model.softmax_split import Heads, record_heads, split_heads
from dualview.duality.on_model.weight_space import tuned_on_base_states
from dualview.duality.theory.icl_as_update import state_weights
from dualview.duality.theory.linalg import column_norms, norm
from dualview.duality.theory.toy_attention import lin_attn, relative_error
from dualview.duality.verify.check import DAI, DHERIN, GOLDWASER, IRIE, Deviation, identity
from dualview.duality.verify.model_setup import ModelSetup, judged, missed, patched_rounding, trial
from dualview.models.scoring import compute_prefix

on_model = partial(identity, tolerance=0.0, given=trial)
"""Rounding is all that is allowed on a model, unless a formula has a tolerance of its own."""


@on_model("model: every tuned K and V is W₀ + Σ_t e_t x_tᵀ over its training tokens", IRIE)
def _reconstruction(setup: ModelSetup) -> Iterator[Deviation]:
    """κ = Σ_t ‖e_t‖‖x_t‖ / ‖ΔW‖, for the sum over training tokens."""
    trace = setup.train(epochs=2)
    patch = deltas_of(trace)
    sizes = {p.name: norm(w[0]) for p, w in zip(patch.projections, patch.weights, strict=True)}
    for residual, factors in zip(reconstruct(trace), trace.factors, strict=True):
        terms = column_norms(factors.errors.double().T) * column_norms(factors.inputs.double().T)
        kappa = float(terms.sum()) / (sizes[factors.projection.name] or 1.0)
        yield Deviation(residual.weight, rounding=summed(factors.errors.dtype, len(terms), kappa))


@on_model("model: base weights + LinAttn(X, E, ·) gives the fine-tuned logits", IRIE)
def _dual_logits(setup: ModelSetup) -> Deviation:
    moved = setup.move()
    dual = dual_patch(setup.lm, moved.trace)
    return missed(setup, moved, dual, dual)


@_dual_logits.misprint("model: +η for −η in the error signals  [sign]", IRIE, 0.0)
def _wrong_sign(setup: ModelSetup) -> Deviation:
    moved = setup.move()
    right = dual_patch(setup.lm, moved.trace)
    return missed(setup, moved, DualPatch(tuple(replace(f, errors=-f.errors) for f in right.factors)), right)


@_dual_logits.misprint("model: error signals all at W₀  [not at step t]", IRIE, 0.0)
def _errors_at_start(setup: ModelSetup) -> Deviation:
    # Far enough for the gradients of the later steps to be others than those of the first.
    moved = setup.move(share=0.1, epochs=3)
    still = setup.train(0.0, epochs=3)  # a rate of 0 keeps the gradients of the base weights
    rate = moved.trace.tuned.lr
    wrong = DualPatch(tuple(replace(f, errors=rate * f.errors) for f in still.factors))
    return missed(setup, moved, wrong, dual_patch(setup.lm, moved.trace))


@on_model("model: ‖ΔW_V x‖ = Σ_t ⟨e_t, ΔW_V x⟩ (x_t·x) / ‖ΔW_V x‖, every layer", IRIE)
def _contributions(setup: ModelSetup) -> Iterator[Deviation]:
    """Σ of the tokens' parts, from the factors alone, against ‖ΔW_V x‖, from the ΔW that training summed.

    κ = Σ_t ‖e_t‖ Σ_i |x_ti x_i| / ‖ΔW_V x‖: an entry of ΔW is rounded relative to the terms it is the sum of.
    """
    trace = setup.train()
    patch = deltas_of(trace)
    trained = {p.name: (p, w[0]) for p, w in zip(patch.projections, patch.weights, strict=True)}
    factors = role_factors(setup.lm, trace, "v")
    with patch.applied():
        taps = projected(setup.lm, setup.zero_shot_ids, [f.projection for f in factors])
    for f, tap in zip(factors, taps, strict=True):
        whole, delta = trained[f.projection.name]
        rows = rows_within(f.projection, whole)
        x = tap.x[0, -1].double()
        moved = norm((delta if rows is None else delta[rows]).double() @ x)
        parts = update_contributions(replace(f, errors=f.errors.double()), x)
        terms = column_norms(f.errors.double().T) * (f.inputs.double().abs() @ x.abs())
        rounding = summed(f.errors.dtype, len(terms), float(terms.sum()) / (moved or 1.0))
        yield Deviation(abs(float(parts.sum()) - moved) / (moved or 1.0), rounding=rounding)


@on_model(
    "model: the change of a logit difference is the tokens' parts, summed along the path (by quadrature)",
    IRIE + ", Sundararajan et al. 2017",
    tolerance=5e-3,  # of a quadrature, in any precision: the kinks of a ReLU leave as much
)
def _lead(setup: ModelSetup) -> Deviation:
    try:
        feed_forwards(setup.lm)
    except NotApplicable:
        raise NotApplicable("where experts are routed, the score jumps along the path") from None
    good, bad = setup.query.candidates
    moved = setup.move()
    # Between two candidates by chance the lead may hardly move: a logit's typical change is what there was to explain.
    least = norm(moved.tuned - moved.base) / math.sqrt(len(moved.base))
    found = score_contributions(setup.lm, moved.trace, setup.zero_shot_ids, good, bad, least=least)
    change = max(abs(found.tuned - found.base), least)
    # Two logits before and two after, each as far off as a typical one; `least` is a typical change likewise.
    rounded = pass_rounding(setup.lm, setup.zero_shot_ids, moved.trace.tuned.patch)
    rounding = 4 * rounded.length / math.sqrt(len(moved.base))
    require_digits(rounding, change, "fine-tuning changes a logit")
    return Deviation(found.residual / change, rounding=rounding / change)


@on_model("model: attention = λ y_demos + (1−λ) y_own, every head", DAI + ", exact for softmax")
def _split(setup: ModelSetup) -> Iterator[Deviation]:
    layers = record_heads(setup.lm, setup.in_context_ids)
    for error, heads in zip(split_heads(layers, setup.demo_places).error, layers, strict=True):
        yield Deviation(error, rounding=head_rounding(heads))


def head_rounding(heads: Heads) -> float:
    """What rounding can do to a layer's attention, relative to its output."""
    return summed(heads.out.dtype, max(heads.k.shape[1], heads.q.shape[1]), heads.conditioning())


@_split.misprint("model: attention = y_demos + y_own  [no masses]", DAI, 0.0)
def _without_masses(setup: ModelSetup) -> Iterator[Deviation]:
    """y = y_demos + y_own, as if softmax attention were linear."""
    layers = record_heads(setup.lm, setup.in_context_ids)
    splits = [layer.split(setup.demo_places) for layer in layers]
    if all(float(split.mass.max()) == 0 for split in splits):
        raise NotApplicable("its windows are so short that no layer sees the demonstrations")
    for split, layer in zip(splits, layers, strict=True):
        yield Deviation(relative_error(split.demos + split.own, layer.out), rounding=head_rounding(layer))


@on_model("model: relaxed to linear attention, F_ICL(q) = (W_ZSL + ΔW_ICL) q, every head", DAI)
def _relaxed(setup: ModelSetup) -> Iterator[Deviation]:
    """Linear attention over the model's own keys and values: one sum over all tokens, or two matrices.

    In float64, with κ = Σ_t ‖v_t‖ Σ_i |k_ti q_i| / ‖y‖.
    """
    for layer in record_heads(setup.lm, setup.in_context_ids):
        group = layer.q.shape[0] // layer.k.shape[0]
        inside = torch.zeros(layer.k.shape[1], dtype=torch.bool, device=layer.k.device)
        inside[setup.demo_places.start : setup.demo_places.stop] = True
        for head, q in enumerate(layer.q.double()):
            keys, values = layer.k[head // group].double().T, layer.v[head // group].double().T
            parts = [state_weights(keys[:, mask], values[:, mask]) for mask in (~inside, inside)]
            aim = lin_attn(keys, values, q)
            kappa = float((column_norms(values) * (keys.abs().T @ q.abs())).sum()) / (norm(aim) or 1.0)
            error = relative_error((parts[0] + parts[1]) @ q, aim)
            yield Deviation(error, rounding=summed(q.dtype, sum(keys.shape), kappa))


@on_model("model: tuned heads, V₁K₁ᵀ − V₀K₀ᵀ = V₀ΔKᵀ + ΔV K₀ᵀ + ΔV ΔKᵀ, every head", DAI)
def _four_terms(setup: ModelSetup) -> Iterator[Deviation]:
    """ΔW_FT itself, in float64: next to the base's V₀K₀ᵀ a small update would be lost in rounding.

    κ = Σ_t (‖v₁‖‖k₁‖ + ‖v₀‖‖k₀‖) / ‖ΔW_FT‖: the update is the difference of two sums over tokens.
    """
    patch, start = deltas_of(setup.move().trace), len(setup.prompts.prefix)
    for states in tuned_on_base_states(setup.lm, patch, setup.bare, setup.query.ids, start):
        wide = states.double()
        before = state_weights(wide.base_keys.mT, wide.base_values.mT)
        after = state_weights(wide.tuned_keys.mT, wide.tuned_values.mT)
        kappa = float(wide.summed_size().sum()) / (norm(after - before) or 1.0)
        error = relative_error(wide.four_terms().delta, after - before)
        yield Deviation(error, rounding=summed(before.dtype, wide.base_keys.shape[1], kappa))


def _patch(setup: ModelSetup, token: Token = "last") -> BlockPatches:
    return context_patch(setup.lm, setup.prompts.prefix, setup.query.ids, setup.bare, token)


def _patched(setup: ModelSetup, patch: BlockPatches, right: BlockPatches) -> Deviation:
    """What a patch leaves, with the rounding that the right one is allowed."""
    report = patch_report(setup.lm, setup.prompts.prefix, setup.query.ids, setup.bare, patch)
    return judged(setup, report, patched_rounding(setup, setup.query, right))


@on_model(
    "model: zero-shot with rank-1 patches at the last token = in-context logits (largest difference, or its ratio "
    "to the unpatched one)",
    GOLDWASER + ", Alg. 1",
)
def _at_last_token(setup: ModelSetup) -> Deviation:
    patch = _patch(setup)
    return _patched(setup, patch, patch)


@_at_last_token.misprint("model: another query's patch  [wrong token]", DHERIN, 0.0)
def _wrong_token(setup: ModelSetup) -> Deviation:
    other = replace(setup, prompts=setup.prompts.with_queries(setup.prompts.queries[::-1]))
    return _patched(setup, _patch(other), _patch(setup))


@_at_last_token.misprint("model: ΔW = W (z_C − z) zᵀ  [no 1/‖z‖²]", GOLDWASER, 0.0)
def _without_norm(setup: ModelSetup) -> Deviation:
    """ΔW = W (z_C − z) zᵀ: left is (z_C − z)/‖z‖² and right z, so multiplying by ‖right‖² leaves z_C − z."""
    patch = _patch(setup)
    # In a parallel block z_C = z but for rounding, and ‖left‖‖right‖ = ‖z_C − z‖/‖z‖. Between rounding (ε) and a real
    # change (1) the line is drawn at √ε.
    least = math.sqrt(torch.finfo(setup.lm.dtype).eps)
    moved = [d for d in (block.readers for block in patch.blocks) if d is not None]
    if not any(norm(delta.left) * norm(delta.right) > least for delta in moved) and not any(
        isinstance(block.carrier, LowRank) for block in patch.blocks
    ):
        raise NotApplicable("its blocks are parallel and have biases, so there is no rank-1 patch to get wrong")
    wrong = patch.changed(lambda d: LowRank(d.left * d.right.square().sum(), d.right), lambda vector: vector)
    return _patched(setup, wrong, patch)


@_at_last_token.misprint("model: input patches alone  [no output patch]", GOLDWASER, 0.0)
def _without_output(setup: ModelSetup) -> Deviation:
    patch, none = _patch(setup), _patch(setup).scaled(0.0)
    pairs = zip(patch.blocks, none.blocks, strict=True)
    return _patched(setup, replace(patch, blocks=tuple(replace(b, carrier=no.carrier) for b, no in pairs)), patch)


@on_model("model: the same as a change of weights that every token meets", GOLDWASER + "; " + DHERIN)
def _at_every_token(setup: ModelSetup) -> Deviation:
    patch = _patch(setup, "every")
    return _patched(setup, patch, patch)


@on_model(
    "model: one least-squares patch (ridge 0) gives two queries their in-context logits",
    "Mazzawi et al. 2025, fitted as " + GOLDWASER,
)
def _one_patch_for_both(setup: ModelSetup) -> Iterator[Deviation]:
    lm, prompts = setup.lm, setup.prompts
    places = feed_forwards(lm)
    if any(not isinstance(place.carrier, torch.nn.Linear) and place.kind == "scale" for place in places):
        raise NotApplicable("its blocks end in a norm, whose scale has too few numbers for several queries")
    with torch.no_grad():
        prefix = compute_prefix(lm, prompts.prefix, len(setup.bare))
    aims = in_context_aims(lm, places, prompts.queries, prefix)
    patch = fit_patch(lm, places, prompts.queries, setup.bare, aims, ridge=0.0)
    for query in prompts.queries:
        report = patch_report(lm, prompts.prefix, query.ids, setup.bare, patch)
        yield judged(setup, report, patched_rounding(setup, query, patch))
