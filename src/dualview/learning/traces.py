"""The factors of every projection's update in fine-tuning, token by token.

    ΔW = Σ_t e_t x_tᵀ,      e_t = −lr · ∂loss/∂(W x_t)

x_t is what the projection read at training token t, e_t the error signal it got back, both at the weights of that
step (Irie et al. 2022: a trained linear layer is attention over its training data, keys x_t, values e_t).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.anatomy.layers import Projection
from dualview.learning.finetune import Step, Watch, batches, train
from dualview.learning.recipe import Training, TrainingRecipe, Tuned, differentiable, steps_of
from dualview.learning.weight_patches import Deltas
from dualview.models.language_model import LanguageModel
from dualview.tasks.prompts import TrainingSequence


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
    recipe: TrainingRecipe,
    taps: Sequence[Projection] = (),
    progress: Callable[[int], None] | None = None,
) -> list[TrainingTrace]:
    """Fine-tune once more, keeping every projection's inputs and error signals; one trace for each rate.

    At a rate of 0 the weights stay the base's and the error signals are those of a rate of 1: what the gradient says
    at the first pass. `progress` is called for every step, once for each rate.
    """
    wide = differentiable(lm, recipe)  # if a copy is trained, it is the copy that is watched
    own = {p.name: p.module for p in wide.anatomy.projections(("q", "k", "v"))}
    tapped = tuple(Projection(p.name, own[p.name], p.rows) for p in taps)
    together = batches(wide, [Training(sequences, rate) for rate in rates], recipe)
    return [trace for batch in together for trace in _trace_batch(wide, batch, recipe, tapped, progress)]


def _trace_batch(
    lm: LanguageModel,
    trainings: Sequence[Training],
    recipe: TrainingRecipe,
    taps: tuple[Projection, ...],
    progress: Callable[[int], None] | None,
) -> list[TrainingTrace]:
    inputs: dict[int, list[Tensor]] = {}
    errors: dict[int, list[Tensor]] = {}
    outputs: dict[str, list[Tensor]] = {p.name: [] for p in taps}
    steps = steps_of(trainings[0].sequences, recipe)
    factors = [training.rate or 1.0 for training in trainings]
    scale = torch.tensor(factors, dtype=torch.promote_types(lm.dtype, torch.float32), device=lm.device)[:, None, None]

    def on_step(step: Step) -> None:
        length = len(steps[step.number].ids)  # what follows is padding
        # A list of rows would be sent to the GPU, which waits for it, once for every tensor.
        each = slice(None) if step.rows == list(range(len(trainings))) else step.rows
        for (index, x, _), g in zip(step.tape.calls, step.signals, strict=True):
            inputs.setdefault(index, []).append(x[each, :length].clone())
            errors.setdefault(index, []).append(-scale.to(g.device) * g[each, :length])
        for tap in step.tape.tapped:
            outputs[tap.projection.name].append(tap.y[each, :length].clone())

    tuned = train(lm, trainings, recipe, progress, Watch(on_step, taps))
    patch = tuned[0].patch
    assert isinstance(patch, Deltas)
    # One projection at a time: the parts of all of them and the whole of all of them would be twice the memory.
    x, e = ({index: torch.cat(side.pop(index), 1) for index in list(side)} for side in (inputs, errors))
    y = [torch.cat(outputs[p.name], 1) for p in taps]
    tokens = _tokens(trainings[0].sequences, recipe.epochs)
    return [
        TrainingTrace(
            tuned[r],
            tokens,
            tuple(Factors(patch.projections[index], x[index][r], e[index][r]) for index in x),
            tuple(output[r] for output in y),
        )
        for r in range(len(trainings))
    ]


def _tokens(sequences: Sequence[TrainingSequence], epochs: int) -> TrainingTokens:
    steps = [(e * len(sequences) + d, d, len(s.ids)) for e in range(epochs) for d, s in enumerate(sequences)]
    return TrainingTokens(
        torch.cat([torch.full((n,), step) for step, _, n in steps]),
        torch.cat([torch.full((n,), demo) for _, demo, n in steps]),
        torch.cat([torch.arange(n) for _, _, n in steps]),
    )
