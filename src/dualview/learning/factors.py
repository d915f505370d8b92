"""What fine-tuning left behind, token by token: the factors of every projection's update.

    ΔW = Σ_t e_t x_tᵀ,      e_t = −lr · ∂loss/∂(W x_t)

x_t is what the projection read at training token t, e_t the error signal it got back, both at the weights of that
step (Irie et al. 2022: a trained linear layer is attention over its training data, keys x_t, values e_t).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.learning.finetune import Recipe, Tuned, finetune
from dualview.learning.update import Deltas
from dualview.models.anatomy import Projection
from dualview.models.loading import LanguageModel
from dualview.models.probe import Tap, tapping
from dualview.tasks.prompt import TrainingSequence


@dataclass(frozen=True)
class Factors:
    """One projection's training tokens: inputs and error signals, in the order of the steps."""

    projection: Projection
    inputs: Float[Tensor, "token d_in"]
    errors: Float[Tensor, "token row"]


@dataclass(frozen=True)
class TrainingTokens:
    """Which token each row of the factors is."""

    step: Int[Tensor, " token"]
    demo: Int[Tensor, " token"]
    position: Int[Tensor, " token"]
    """In the training sequence, BOS included."""


@dataclass(frozen=True)
class TrainingTrace:
    """One fine-tuning run with its factors, and the tapped projections' outputs at every training token."""

    tuned: Tuned
    tokens: TrainingTokens
    factors: tuple[Factors, ...]
    tapped: tuple[Float[Tensor, "token row"], ...]
    """Of each projection in `taps`, as it was during training."""


def trace_training(
    lm: LanguageModel,
    sequences: Sequence[TrainingSequence],
    rates: Sequence[float],
    recipe: Recipe,
    taps: Sequence[Projection] = (),
) -> list[TrainingTrace]:
    """Fine-tune once more, all rates side by side, keeping every projection's inputs and error signals.

    At a rate of 0 the weights stay the base's and the error signals are those of a rate of 1: what the gradient says
    at the first pass.
    """
    inputs: dict[str, list[Tensor]] = {}
    errors: dict[str, list[Tensor]] = {}
    scale = torch.tensor([rate if rate else 1.0 for rate in rates], dtype=lm.dtype, device=lm.device)[:, None, None]

    def observe(_step: int, projection: Projection, x: Tensor, g: Tensor) -> None:
        inputs.setdefault(projection.name, []).append(x.expand(len(rates), -1, -1))
        errors.setdefault(projection.name, []).append(-scale * g)

    seen: list[Tap] = []
    with tapping(taps, seen):
        tuned = finetune(lm, sequences, rates, recipe, observe=observe)
    tokens = _tokens(sequences, recipe.epochs)
    whole = {name: (torch.cat(inputs[name], 1), torch.cat(errors[name], 1)) for name in inputs}
    outputs = [torch.cat([t.y.expand(len(rates), -1, -1) for t in seen if t.projection is p], 1) for p in taps]
    patch = tuned[0].patch
    assert isinstance(patch, Deltas)
    trained = {p.name: p for p in patch.projections}
    return [
        TrainingTrace(
            tuned[r],
            tokens,
            tuple(Factors(trained[name], x[r], e[r]) for name, (x, e) in whole.items()),
            tuple(output[r] for output in outputs),
        )
        for r in range(len(rates))
    ]


def _tokens(sequences: Sequence[TrainingSequence], epochs: int) -> TrainingTokens:
    steps = [(e * len(sequences) + d, d, len(s.ids)) for e in range(epochs) for d, s in enumerate(sequences)]
    return TrainingTokens(
        torch.cat([torch.full((n,), step) for step, _, n in steps]),
        torch.cat([torch.full((n,), demo) for _, demo, n in steps]),
        torch.cat([torch.arange(n) for _, _, n in steps]),
    )
