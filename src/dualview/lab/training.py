"""The loop of the small trainings: Adam with β₂ = .98 on new problems at every step, resumable.

The learning rate falls to 0 along a cosine, so that the result does not depend on the last few batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dualview.io.progress import Advance
from dualview.lab.units import Unit, capture, restore

Curve = dict[str, list[float]]


@dataclass(frozen=True)
class Schedule:
    """The hyper-parameters of one training."""

    steps: int
    batch_size: int
    lr: float
    clip: float = 1.0
    warm_up: int = 1
    """Steps over which the rate rises."""

    def rate(self, step: int) -> float:
        """The learning rate before this step, counted from 0."""
        warm = min(1.0, (step + 1) / self.warm_up)
        return self.lr * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def training_steps(
    model: nn.Module,
    schedule: Schedule,
    advance: Advance = lambda _steps: None,
    unit: Unit | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    curve: Curve | None = None,
    measure: Callable[[int], None] = lambda _step: None,
) -> Iterator[int]:
    """Every step of a training; the caller computes the gradients (and clips them), this moves the weights.

    From the state in `unit`, if it was stopped: weights, generators and `curve`, which `measure` fills after each step
    (0: before the first).
    """
    unit, named, kept = unit or Unit(None, {}), generators or {}, {} if curve is None else curve
    optimiser = torch.optim.Adam(model.parameters(), lr=schedule.lr, betas=(0.9, 0.98))
    done = 0
    if (state := unit.load()) is not None:
        info = restore(state, model, optimiser, named)
        done = info["step"]
        kept |= info.get("curve", {})
    else:
        measure(0)
    advance(done)
    for step in range(done, schedule.steps):
        optimiser.param_groups[0]["lr"] = schedule.rate(step)
        optimiser.zero_grad()
        yield step
        optimiser.step()
        measure(step + 1)
        advance(1)
        last = step + 1 == schedule.steps
        unit.save(lambda at=step + 1: capture(model, optimiser, named, step=at, curve=kept), now=last)


def clip_each(weights: Iterable[Tensor], most: float, *, leave_out: bool = False) -> None:
    """Clip the gradient's norm of every model by itself; the first dimension of each weight is the model.

    With `leave_out` a gradient that is not finite becomes 0, so that its model stays as it is.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
    factor = (most / norms).clamp(max=1.0)
    if leave_out:
        factor = torch.where(norms.isfinite(), factor, 0.0)
    for gradient in gradients:
        if leave_out:
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        gradient.mul_(factor.reshape(-1, *(1,) * (gradient.ndim - 1)))
