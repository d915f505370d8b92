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
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dualview.learning.factors import Factors, TrainingTrace, trace_training
from dualview.learning.finetune import Recipe
from dualview.metrics.ranking import RankAgreement, RankedTokens
from dualview.models.anatomy import Anatomy, Projection, Role
from dualview.models.loading import LanguageModel
from dualview.models.passes import Asked
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
    tuned, untuned = trace_training(lm, prompts.training_sequences, (lr, 0.0), recipe, queries)
    columns, demo_of_token = demo_columns(prompts)
    ours = RankedTokens.of(icl.demo_logits[:, :, columns], demo_of_token)
    forms: dict[str, RankAgreement] = {}
    for suffix, trace, asked in (("", tuned, ft), ("_lr0", untuned, zsl)):
        rows = _rows(prompts, trace)
        taps = {id(p): tap for p, tap in zip(taps_of(lm.anatomy), asked.tapped, strict=True)}
        q = [taps[id(p)].y for p in queries]
        scale = [1.0 / layer.d_head for layer in lm.anatomy.layers]
        released = [
            (asked_q @ _host(trained)[rows[-1]].T) * s
            for asked_q, trained, s in zip(q, trace.tapped, scale, strict=True)
        ]
        forms[f"released{suffix}"] = ours.agreement(RankedTokens.of(np.stack(released, 1), demo_of_token))
        by_name = {factors.projection.name: factors for factors in trace.factors}
        for role in ("v", "k"):
            chosen = [by_name.get(layer[role].name) for layer in layers]
            if any(factors is None for factors in chosen):
                continue
            shares = [
                sum(_shares(f, layer[role], taps[id(layer[role])].x)[:, epoch] for epoch in rows)
                for f, layer in zip(chosen, layers, strict=True)
                if f is not None
            ]
            forms[f"dual_{role}{suffix}"] = ours.agreement(RankedTokens.of(np.stack(shares, 1), demo_of_token))
    return Kendall(forms, len(columns), len(icl.demo_logits))


def demo_columns(prompts: PromptSet) -> tuple[Int[np.ndarray, " token"], Int[np.ndarray, " token"]]:
    """Where the demonstrations' template and label tokens stand in the prefix, and whose they are."""
    spans = prompts.demo_spans
    columns = [i for span in spans for part in (span.template, span.label) for i in part]
    owners = [d for d, span in enumerate(spans) for _ in range(len(span.template) + len(span.label))]
    return np.array(columns), np.array(owners)


def _rows(prompts: PromptSet, trace: TrainingTrace) -> list[Int[np.ndarray, " token"]]:
    """The training tokens that are template or label, for each epoch: all but BOS."""
    position, step = trace.tokens.position.numpy(), trace.tokens.step.numpy()
    real = position >= len(prompts.zero_prefix)
    epoch = step // len(prompts.demos)
    return [np.flatnonzero(real & (epoch == e)) for e in range(int(epoch.max()) + 1)]


def _shares(
    factors: Factors, projection: Projection, x: Float[np.ndarray, "query d_in"]
) -> Float[np.ndarray, "query token"]:
    """⟨e_t, ΔW x⟩ (x_t·x) / ‖ΔW x‖ for every training token t, over the rows that make this role."""
    inputs, errors = _host(factors.inputs), _host(factors.errors)
    if factors.projection.rows is not None and projection.rows is not None:
        trained = {int(row): i for i, row in enumerate(factors.projection.rows)}
        errors = errors[:, [trained[int(row)] for row in projection.rows]]
    elif projection.rows is not None:
        errors = errors[:, projection.rows.cpu().numpy()]
    match = x.astype(np.float64) @ inputs.T  # [query, token]
    update = match @ errors  # [query, row]
    length = np.linalg.norm(update, axis=1, keepdims=True)
    direction = np.divide(update, length, out=np.zeros_like(update), where=length > 0)
    return (direction @ errors.T) * match


def _host(x: object) -> np.ndarray:
    import torch

    assert isinstance(x, torch.Tensor)
    return x.detach().double().cpu().numpy()
