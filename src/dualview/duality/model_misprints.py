"""The misprints on a language model, for `verify --wrong --model`: every one must fail (see `misprints`)."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from dualview.duality.algebra import norm
from dualview.duality.context_patch import BlockPatch, ContextPatch, context_patch, patch_report
from dualview.duality.heads import record_heads
from dualview.duality.identities_implicit import DHERIN, GOLDWASER
from dualview.duality.identities_linear import DAI, IRIE
from dualview.duality.identity import Draws, ModelIdentity, NotApplicable
from dualview.duality.implicit import RankOne
from dualview.duality.model_identities import Moved, Trial, judged, trial
from dualview.duality.rows import last_logits
from dualview.duality.tensors import relative_error
from dualview.duality.tuning import DualPatch, dual_patch


def _patch(setup: Trial) -> ContextPatch:
    return context_patch(setup.lm, setup.prompts.prefix, setup.query.ids, setup.bare)


def _error(setup: Trial, patch: ContextPatch) -> float:
    return judged(setup, patch_report(setup.lm, setup.prompts.prefix, setup.query.ids, setup.bare, patch)).error


def _wrong_token(draws: Draws, model: object) -> float:
    setup = trial(draws, model)
    other = replace(setup, prompts=setup.prompts.with_queries(setup.prompts.queries[::-1]))
    return _error(setup, _patch(other))


def _without_norm(draws: Draws, model: object) -> float:
    """ΔW = W (z_C − z) zᵀ: right is z/‖z‖², so dividing by ‖right‖² leaves z."""
    setup = trial(draws, model)
    patch = _patch(setup)

    def undivided(delta: RankOne | torch.Tensor) -> RankOne | torch.Tensor:
        return RankOne(delta.left, delta.right / (delta.right @ delta.right)) if isinstance(delta, RankOne) else delta

    blocks = [
        BlockPatch(b.place, tuple(cast(RankOne, undivided(d)) for d in b.inputs), undivided(b.output))
        for b in patch.blocks
    ]
    ranked = [d for b in patch.blocks for d in (*b.inputs, b.output) if isinstance(d, RankOne)]
    if all(norm(delta.left) < 1e-4 for delta in ranked):
        raise NotApplicable("its blocks are parallel and have biases, so there is no rank-1 patch to get wrong")
    return _error(setup, ContextPatch(tuple(blocks), patch.token))


def _without(block: BlockPatch) -> RankOne | torch.Tensor:
    output = block.output
    return RankOne(torch.zeros_like(output.left), output.right) if isinstance(output, RankOne) else output * 0


def _without_output(draws: Draws, model: object) -> float:
    setup = trial(draws, model)
    patch = _patch(setup)
    blocks = [replace(block, output=_without(block)) for block in patch.blocks]
    return _error(setup, ContextPatch(tuple(blocks), patch.token))


def _without_masses(draws: Draws, model: object) -> float:
    """y = y_demos + y_own, as if softmax attention were linear."""
    setup = trial(draws, model)
    layers = record_heads(setup.lm, setup.in_context_ids)
    splits = [layer.split(setup.demo_places) for layer in layers]
    if all(float(split.mass.max()) == 0 for split in splits):
        raise NotApplicable("its windows are so short that no layer sees the demonstrations")
    return max(relative_error(s.demos + s.own, layer.out) for s, layer in zip(splits, layers, strict=True))


def _dual_error(setup: Trial, moved: Moved, dual: DualPatch) -> float:
    return moved.miss(last_logits(setup.lm, setup.zero_shot_ids, dual))


def _wrong_sign(draws: Draws, model: object) -> float:
    setup = trial(draws, model)
    moved = setup.move()
    right = dual_patch(setup.lm, moved.trace)
    return _dual_error(setup, moved, DualPatch(tuple(replace(f, errors=-f.errors) for f in right.factors)))


def _errors_at_start(draws: Draws, model: object) -> float:
    setup = trial(draws, model)
    # Far enough for the gradients of the later steps to be others than those of the first.
    moved = setup.move(share=0.1, epochs=3)
    still = setup.train(0.0, epochs=3)  # a rate of 0 keeps the gradients of the base weights
    rate = moved.trace.tuned.lr
    return _dual_error(setup, moved, DualPatch(tuple(replace(f, errors=rate * f.errors) for f in still.factors)))


MODEL_MISPRINTS = (
    ModelIdentity("model: +η for −η in the error signals  [sign]", IRIE, _wrong_sign, 1e-3),
    ModelIdentity("model: error signals all at W₀  [not at step t]", IRIE, _errors_at_start, 1e-3),
    ModelIdentity("model: attention = y_demos + y_own  [no masses]", DAI, _without_masses, 1e-3),
    ModelIdentity("model: another query's patch  [wrong token]", DHERIN, _wrong_token, 1e-3),
    ModelIdentity("model: ΔW = W (z_C − z) zᵀ  [no 1/‖z‖²]", GOLDWASER, _without_norm, 1e-3),
    ModelIdentity("model: input patches alone  [no output patch]", GOLDWASER, _without_output, 1e-3),
)
