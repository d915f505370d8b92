"""Attention to training tokens: does ICL look at the demonstration tokens that fine-tuning's update was made of?

ICL's side is Σ_heads of q·k·scale from the recorded token to every template and label token of the demonstrations.
Fine-tuning's side comes in two forms, each with its control at a learning rate of 0:

- `released`: q_train · q_test, as the program of Dai et al. computes it. W_Q is never trained, so this hardly depends
  on fine-tuning at all; its control says how much.
- `dual_v` and `dual_k`, exact: the update of W is Σ_t e_t x_tᵀ, so token t's share in what it does to an input x is
  ⟨e_t, ΔW x⟩ (x_t·x) / ‖ΔW x‖, signed; these shares sum to ‖ΔW x‖.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.anatomy.layers import Anatomy, Projection, Role
from dualview.comparison.controls.settings import REORDERED, reordered
from dualview.duality.on_model.demo_tokens import DemoTokens, Placing, demo_tokens
from dualview.duality.on_model.dual_finetuning import role_factors, update_contributions
from dualview.learning.recipe import ROLES_OF, TrainingRecipe
from dualview.learning.traces import Factors, TrainingTokens, TrainingTrace
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Asked, TappedQueries
from dualview.records import TokenScores
from dualview.tasks.prompts import PromptSet


def taps_of(anatomy: Anatomy) -> tuple[Projection, ...]:
    """The projections whose inputs and outputs at the recorded token the comparison needs, in the order they run."""
    return tuple(p for layer in anatomy.layers for p in _single(layer.projections).values())


def _single(projections: Mapping[Role, tuple[Projection, ...]]) -> dict[Role, Projection]:
    """Roles made by one projection; where several make it (latent attention) there is no one weight to speak of."""
    return {role: found[0] for role, found in projections.items() if len(found) == 1}


def followed_taps(lm: LanguageModel, recipe: TrainingRecipe) -> tuple[Projection, ...] | None:
    """The projections whose outputs the traces of `token_scores` need; None where there are no such scores.

    That is where the model's layers do not have one projection for each of q, k and v, or training is no sum over
    tokens of changes of projections.
    """
    layers = [_single(layer.projections) for layer in lm.anatomy.layers]
    summed = recipe.params != "all" and recipe.rule != "distilled"
    if not summed or any(set(layer) != {"q", "k", "v"} for layer in layers):
        return None
    return tuple(layer["q"] for layer in layers)


def token_scores(
    lm: LanguageModel,
    prompts: PromptSet,
    recipe: TrainingRecipe,
    traces: Sequence[TrainingTrace],
    passes: Mapping[str, Asked],
) -> TokenScores | None:
    """Every training token's score in context, and by the released and the dual forms with their controls.

    Of `passes`, icl must hold the summed logits, ft and zsl the taps of `taps_of`; `traces` are those of the trainings
    at FT's rate and at 0, with the outputs of `followed_taps`. None where there are none of these.
    """
    icl, queries = passes["icl"], followed_taps(lm, recipe)
    if queries is None or icl.demo_logits is None:
        return None
    layers = [_single(layer.projections) for layer in lm.anatomy.layers]
    shared = demo_tokens(prompts)
    scores = {"icl": icl.demo_logits[:, :, shared.place.numpy()]}
    for suffix, trace, asked in zip(("", "_lr0"), traces, (passes["ft"], passes["zsl"]), strict=True):
        # By the projection itself, not by its name: where one matrix makes q, k and v, they have one name.
        taps = {id(p): tap for p, tap in zip(taps_of(lm.anatomy), asked.tapped, strict=True)}
        scores[f"released{suffix}"] = _released(lm, trace, [taps[id(p)] for p in queries], shared)
        for role in ROLES_OF[recipe.params]:
            if role != "q":
                inputs = [taps[id(layer[role])].x for layer in layers]
                scores[f"dual_{role}{suffix}"] = _dual(lm, trace, role, inputs, shared)
    return TokenScores(shared.demo.numpy(), scores)


def with_ceiling(scores: TokenScores, prompts: PromptSet, icl_reordered: Asked) -> TokenScores:
    """The scores with those of the same tokens in a prompt of another order, whose pass holds the summed logits."""
    if icl_reordered.demo_logits is None:
        return scores
    places = _places_when_reordered(prompts).numpy()
    again = _tied(torch.from_numpy(icl_reordered.demo_logits[:, :, places])).numpy()
    return TokenScores(scores.demo, {**scores.by_rule, "icl_reordered": again})


def _with_ties(by_layer: Sequence[Float[Tensor, "query token"]]) -> Float[np.ndarray, "query layer token"]:
    """The layers' scores, tied, copied from the device once."""
    return _tied(torch.stack([layer.to(by_layer[0].device) for layer in by_layer], 1)).cpu().numpy()


def _tied(scores: Float[Tensor, "query layer token"]) -> Float[Tensor, "query layer token"]:
    """Make scores equal that are equal on paper (a token that occurs twice) and differ in the last digit only."""
    # tau counts pairs that are in order; rounding would decide the order of equal ones.
    unit = scores.abs().amax(-1, keepdim=True).clamp(min=1e-300) * 1e-12
    return torch.round(scores / unit) * unit


def _places_when_reordered(prompts: PromptSet) -> Int[Tensor, " token"]:
    """The places of the demonstrations' tokens, in the order of `demo_tokens(prompts)`, in the reordered prompt."""
    other = reordered(prompts, REORDERED)
    number = {id(demo): i for i, demo in enumerate(prompts.demos)}
    tokens = demo_tokens(other)
    first = torch.tensor([number[id(demo)] for demo in other.demos])[tokens.demo]
    return tokens.place[torch.argsort(first, stable=True)]


def _released(
    lm: LanguageModel, trace: TrainingTrace, asked: list[TappedQueries], shared: DemoTokens
) -> Float[np.ndarray, "query layer token"]:
    """q_train · q_test / d_head, with the q of the last epoch."""
    step = trace.tokens.step
    # Each epoch has its own q of a token; the released program reads the last.
    last = step > step.max() - len(shared.demo.unique())
    tokens = TrainingTokens(step[last], trace.tokens.demo[last], trace.tokens.position[last])
    placing, chosen = _Placings(shared, tokens), torch.nonzero(last)[:, 0]
    by_layer: list[Tensor] = []
    for tap, trained, layer in zip(asked, trace.tapped, lm.anatomy.layers, strict=True):
        chosen = chosen.to(trained.device)
        q_train = placing.at(trained.device)(trained.index_select(0, chosen).double())
        by_layer.append(_doubles(tap.y, q_train.device) @ q_train.T / layer.d_head)
    return _with_ties(by_layer)


def _dual(
    lm: LanguageModel,
    trace: TrainingTrace,
    role: Role,
    inputs: list[Float[np.ndarray, "query d_in"]],
    shared: DemoTokens,
) -> Float[np.ndarray, "query layer token"]:
    """⟨e_t, ΔW x⟩ (x_t·x) / ‖ΔW x‖, summed over epochs, in double precision: ranks depend on the last digits."""
    placing, by_layer = _Placings(shared, trace.tokens), list[Tensor]()
    for factors, asked in zip(role_factors(lm, trace, role), inputs, strict=True):
        # One projection at a time: all of them in double precision would not fit for a large model.
        wide = Factors(factors.projection, factors.inputs.double(), factors.errors.double())
        x = _doubles(asked, wide.errors.device)
        by_layer.append(placing.at(x.device)(update_contributions(wide, x).T).T)
    return _with_ties(by_layer)


class _Placings:
    """Which training token is which shared one, on each device once: a GPU waits for every copy from the host."""

    def __init__(self, shared: DemoTokens, tokens: TrainingTokens):
        self._made: dict[torch.device, Placing] = {}
        self._make = partial(shared.placing, tokens)

    def at(self, device: torch.device) -> Placing:
        if device not in self._made:
            self._made[device] = self._make(device)
        return self._made[device]


def _doubles(x: Any, device: torch.device) -> Float[Tensor, "query width"]:
    """What was tapped, made wide where it is needed: the host would take longer over it, and copy twice as much."""
    return torch.as_tensor(x).to(device).double()
