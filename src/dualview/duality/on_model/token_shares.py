"""Each demonstration token's share in what a query reads: of the softmax in context, of the update in fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.anatomy.layers import Role
from dualview.duality.on_model.demo_tokens import DemoTokens
from dualview.duality.on_model.dual_finetuning import role_factors, update_contributions
from dualview.duality.on_model.meta_gradients import projected
from dualview.duality.on_model.softmax_split import record_heads
from dualview.learning.traces import TrainingTrace
from dualview.models.language_model import LanguageModel
from dualview.tasks.prompts import PromptSet


def icl_mass(lm: LanguageModel, prompts: PromptSet, shared: DemoTokens) -> Float[Tensor, "layer head token"]:
    """The softmax mass of the query's last token on every shared token; NaN for heads a layer does not have."""
    layers = record_heads(lm, [*prompts.prefix, *prompts.queries[0].ids])
    widest = max(layer.q.shape[0] for layer in layers)
    mass = torch.full((len(layers), widest, len(shared)), torch.nan, dtype=torch.float64)
    for into, layer in zip(mass, layers, strict=True):
        into[: layer.q.shape[0]] = layer.weights()[:, shared.place.to(layer.q.device)].double().cpu()
    return mass


def ft_shares(
    lm: LanguageModel, trace: TrainingTrace, ids: Sequence[int]
) -> dict[Role, Float[Tensor, "layer training"]]:
    """⟨e_t, ΔW x⟩ (x_t·x) / ‖ΔW x‖² of every training token, for the roles that were trained.

    x is what the projection reads at the prompt's last token in the tuned model. NaN where a layer's update is zero.
    """
    trained = {factors.projection.name for factors in trace.factors}
    roles: list[Role] = [
        role
        for role in ("v", "k")
        if all(any(p.name in trained for p in layer.projections[role]) for layer in lm.anatomy.layers)
    ]
    found: dict[Role, Tensor] = {}
    for role in roles:
        factors = role_factors(lm, trace, role)
        if any(f.errors.shape[1] == 0 for f in factors):
            continue
        with trace.tuned.patch.applied():
            taps = projected(lm, ids, [f.projection for f in factors])
        rows: list[Tensor] = []
        for f, tap in zip(factors, taps, strict=True):
            each = update_contributions(f, tap.x[0, -1]).double().cpu()
            total = each.sum()
            rows.append(each / total if float(total) > 0 else torch.full_like(each, torch.nan))
        found[role] = torch.stack(rows)
    return found
