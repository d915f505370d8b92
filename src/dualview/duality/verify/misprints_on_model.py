"""The misprints on a language model, for `verify --wrong --model`: every one must fail (see `misprints`)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import torch

from dualview.duality.on_model.context_patch import BlockPatch, ContextPatch, context_patch, patch_report
from dualview.duality.on_model.dual_finetuning import DualPatch, dual_patch
from dualview.duality.on_model.softmax_split import record_heads
from dualview.duality.theory.implicit import RankOne
from dualview.duality.theory.linalg import norm
from dualview.duality.theory.recorder import weight_matrix
from dualview.duality.theory.toy_attention import relative_error
from dualview.duality.verify.check import Draws, Measured, ModelIdentity, NotApplicable, worst_of
from dualview.duality.verify.implicit import DHERIN, GOLDWASER
from dualview.duality.verify.linear import DAI, IRIE
from dualview.duality.verify.on_model import Trial, head_rounding, judged, missed, patched_rounding, trial


def _patch(setup: Trial) -> ContextPatch:
    return context_patch(setup.lm, setup.prompts.prefix, setup.query.ids, setup.bare)


def _error(setup: Trial, wrong: ContextPatch, right: ContextPatch) -> Measured:
    """What a wrong patch leaves, beside the rounding that the right one is allowed."""
    report = patch_report(setup.lm, setup.prompts.prefix, setup.query.ids, setup.bare, wrong)
    return judged(setup, report, patched_rounding(setup, setup.query, right))


def _wrong_token(draws: Draws, model: object) -> Measured:
    setup = trial(draws, model)
    other = replace(setup, prompts=setup.prompts.with_queries(setup.prompts.queries[::-1]))
    return _error(setup, _patch(other), _patch(setup))


def _without_norm(draws: Draws, model: object) -> Measured:
    """ΔW = W (z_C − z) zᵀ: right is z/‖z‖², so dividing by ‖right‖² leaves z."""
    setup = trial(draws, model)
    patch = _patch(setup)

    def undivided(delta: RankOne | torch.Tensor) -> RankOne | torch.Tensor:
        return RankOne(delta.left, delta.right / (delta.right @ delta.right)) if isinstance(delta, RankOne) else delta

    blocks = [
        BlockPatch(b.place, tuple(cast(RankOne, undivided(d)) for d in b.inputs), undivided(b.output))
        for b in patch.blocks
    ]
    if not any(_has_rank_one(block, setup.lm.dtype) for block in patch.blocks):
        raise NotApplicable("its blocks are parallel and have biases, so there is no rank-1 patch to get wrong")
    return _error(setup, ContextPatch(tuple(blocks), patch.token), patch)


def _has_rank_one(block: BlockPatch, dtype: torch.dtype) -> bool:
    """Whether a block's patch has a part of rank 1 that is more than rounding.

    In a parallel block z_C = z but for rounding, so W (z_C − z) is compared with W z = W right / ‖right‖². Between
    rounding (ε) and a real change (1) the line is drawn at √ε.
    """
    if isinstance(block.output, RankOne):
        return True
    least = math.sqrt(torch.finfo(dtype).eps)
    pairs = zip(block.place.readers, block.inputs, strict=True)
    return any(norm(d.left) * norm(d.right) ** 2 > least * norm(weight_matrix(m) @ d.right) for m, d in pairs)


def _without(block: BlockPatch) -> RankOne | torch.Tensor:
    output = block.output
    return RankOne(torch.zeros_like(output.left), output.right) if isinstance(output, RankOne) else output * 0


def _without_output(draws: Draws, model: object) -> Measured:
    setup = trial(draws, model)
    patch = _patch(setup)
    blocks = [replace(block, output=_without(block)) for block in patch.blocks]
    return _error(setup, ContextPatch(tuple(blocks), patch.token), patch)


def _without_masses(draws: Draws, model: object) -> Measured:
    """y = y_demos + y_own, as if softmax attention were linear."""
    setup = trial(draws, model)
    layers = record_heads(setup.lm, setup.in_context_ids)
    splits = [layer.split(setup.demo_places) for layer in layers]
    if all(float(split.mass.max()) == 0 for split in splits):
        raise NotApplicable("its windows are so short that no layer sees the demonstrations")
    pairs = zip(splits, layers, strict=True)
    return worst_of(
        [Measured(relative_error(s.demos + s.own, layer.out), rounding=head_rounding(layer)) for s, layer in pairs]
    )


def _wrong_sign(draws: Draws, model: object) -> Measured:
    setup = trial(draws, model)
    moved = setup.move()
    right = dual_patch(setup.lm, moved.trace)
    return missed(setup, moved, DualPatch(tuple(replace(f, errors=-f.errors) for f in right.factors)), right)


def _errors_at_start(draws: Draws, model: object) -> Measured:
    setup = trial(draws, model)
    # Far enough for the gradients of the later steps to be others than those of the first.
    moved = setup.move(share=0.1, epochs=3)
    still = setup.train(0.0, epochs=3)  # a rate of 0 keeps the gradients of the base weights
    rate = moved.trace.tuned.lr
    wrong = DualPatch(tuple(replace(f, errors=rate * f.errors) for f in still.factors))
    return missed(setup, moved, wrong, dual_patch(setup.lm, moved.trace))


MODEL_MISPRINTS = (
    ModelIdentity("model: +η for −η in the error signals  [sign]", IRIE, _wrong_sign),
    ModelIdentity("model: error signals all at W₀  [not at step t]", IRIE, _errors_at_start),
    ModelIdentity("model: attention = y_demos + y_own  [no masses]", DAI, _without_masses),
    ModelIdentity("model: another query's patch  [wrong token]", DHERIN, _wrong_token),
    ModelIdentity("model: ΔW = W (z_C − z) zᵀ  [no 1/‖z‖²]", GOLDWASER, _without_norm),
    ModelIdentity("model: input patches alone  [no output patch]", GOLDWASER, _without_output),
)
