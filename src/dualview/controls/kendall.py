"""Attention to training tokens: does ICL look at the demonstration tokens that fine-tuning's update was made of?

ICL's side is Σ_heads of q·k·scale from the recorded token to every template and label token of the demonstrations.
Fine-tuning's side comes in two forms, each with its control at a learning rate of 0:

- `released`: q_train · q_test, as the program of Dai et al. computes it. W_Q is never trained, so this hardly depends
  on fine-tuning at all; its control says how much.
- `dual_v` and `dual_k`, exact: the update of W is Σ_t e_t x_tᵀ, so token t's share in what it does to an input x is
  ⟨e_t, ΔW x⟩ (x_t·x) / ‖ΔW x‖, signed; these shares sum to ‖ΔW x‖.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.demo_tokens import DemoTokens, demo_tokens
from dualview.duality.tuning import role_factors, update_contributions
from dualview.learning.factors import Factors, TrainingTokens, TrainingTrace, trace_training
from dualview.learning.finetune import ROLES_OF, Recipe
from dualview.metrics.ranking import RankAgreement, RankedTokens
from dualview.models.anatomy import Anatomy, Projection, Role
from dualview.models.loading import LanguageModel
from dualview.models.passes import Asked, TappedQueries
from dualview.tasks.prompt import PromptSet


@dataclass(frozen=True)
class Kendall:
    """Agreement of ICL with each form of fine-tuning's attention, by name; `…_lr0` are the controls."""

    forms: Mapping[str, RankAgreement]
    tokens: int
    queries: int

    def to_json(self) -> dict[str, object]:
        return {
            "value": None if "dual_v" not in self.forms else self.forms["dual_v"].to_json()["tau_token"],
            **{name: agreement.to_json() for name, agreement in self.forms.items()},
            "tokens": self.tokens,
            "queries": self.queries,
        }


def taps_of(anatomy: Anatomy) -> tuple[Projection, ...]:
    """The projections whose inputs and outputs at the recorded token the comparison needs, in the order they run."""
    return tuple(p for layer in anatomy.layers for p in _single(layer.projections).values())


def _single(projections: Mapping[Role, tuple[Projection, ...]]) -> dict[Role, Projection]:
    """Roles made by one projection; where several make it (latent attention) there is no one weight to speak of."""
    return {role: found[0] for role, found in projections.items() if len(found) == 1}


def kendall(
    lm: LanguageModel, prompts: PromptSet, recipe: Recipe, lr: float, icl: Asked, ft: Asked, zsl: Asked
) -> Kendall | None:
    """Kendall's tau, by token and by demonstration, for the released form and the dual forms with their controls.

    `icl` must hold the summed logits, `ft` and `zsl` the taps of `taps_of`. None where the model's layers do not have
    one projection for each of q, k and v, or other parameters than projections are trained.
    """
    layers = [_single(layer.projections) for layer in lm.anatomy.layers]
    if recipe.params == "all" or any(set(layer) != {"q", "k", "v"} for layer in layers) or icl.demo_logits is None:
        return None
    queries = [layer["q"] for layer in layers]
    traces = trace_training(lm, prompts.training_sequences, (lr, 0.0), recipe, queries)
    shared = demo_tokens(prompts)
    scores: dict[str, Float[np.ndarray, "query layer token"]] = {}
    for suffix, trace, asked in zip(("", "_lr0"), traces, (ft, zsl), strict=True):
        taps = {p.name: tap for p, tap in zip(taps_of(lm.anatomy), asked.tapped, strict=True)}
        scores[f"released{suffix}"] = _released(lm, trace, [taps[p.name] for p in queries], shared)
        for role in ROLES_OF[recipe.params]:
            if role != "q":
                scores[f"dual_{role}{suffix}"] = _dual(lm, trace, role, taps, shared)
    owner = shared.demo.numpy()
    ours = RankedTokens.of(icl.demo_logits[:, :, shared.place.numpy()], owner)

    def agreement(found: Float[np.ndarray, "query layer token"]) -> RankAgreement:
        return ours.agreement(RankedTokens.of(found, owner))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # nearly all of it is sorting, which lets threads run
        forms = dict(zip(scores, pool.map(agreement, scores.values()), strict=True))
    return Kendall(forms, len(shared), len(icl.demo_logits))


def _released(
    lm: LanguageModel, trace: TrainingTrace, asked: list[TappedQueries], shared: DemoTokens
) -> Float[np.ndarray, "query layer token"]:
    """q_train · q_test / d_head, with the q of the last epoch."""
    step = trace.tokens.step
    last = step > step.max() - len(shared.demo.unique())
    tokens = TrainingTokens(step[last], trace.tokens.demo[last], trace.tokens.position[last])
    by_layer = [
        tap.y.astype(np.float64)
        @ _host(shared.from_training(trained[last.to(trained.device)], tokens)).T
        / layer.d_head
        for tap, trained, layer in zip(asked, trace.tapped, lm.anatomy.layers, strict=True)
    ]
    return np.stack(by_layer, 1)


def _dual(
    lm: LanguageModel, trace: TrainingTrace, role: Role, taps: Mapping[str, TappedQueries], shared: DemoTokens
) -> Float[np.ndarray, "query layer token"]:
    """⟨e_t, ΔW x⟩ (x_t·x) / ‖ΔW x‖, summed over epochs, in double precision: ranks care for the last digits."""
    by_layer: list[np.ndarray] = []
    for factors in role_factors(lm, trace, role):
        wide = Factors(factors.projection, factors.inputs.double(), factors.errors.double())
        x = torch.from_numpy(taps[factors.projection.name].x).to(wide.errors)
        by_layer.append(_host(shared.from_training(update_contributions(wide, x).T, trace.tokens)).T)
    return np.stack(by_layer, 1)


def _host(x: Tensor) -> np.ndarray:
    return x.double().cpu().numpy()
