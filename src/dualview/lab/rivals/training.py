"""Several models trained at once, each on its own new problems at every step; resumable.

Adam with β₂ = .98; the rate rises linearly during a twentieth of the steps and falls to 0 along a cosine; each model's
gradient is clipped by its own norm. A step whose gradient is not finite is left out for that model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dualview.io.errors import UserError
from dualview.io.progress import Advance
from dualview.lab.rivals.models import Models
from dualview.lab.rivals.problems import Source, draw
from dualview.lab.units import Unit, capture, restore


@dataclass(frozen=True)
class Plan:
    """The hyper-parameters of one training."""

    steps: int
    batch_size: int
    lr: float
    clip: float

    def rate(self, step: int) -> float:
        """The learning rate before this step, counted from 0."""
        warm = min(1.0, (step + 1) / max(1, self.steps // 20))
        return self.lr * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def train(
    models: Models,
    sources: Sequence[Source],
    generators: Sequence[torch.Generator],
    plan: Plan,
    unit: Unit,
    advance: Advance,
) -> None:
    """Train in place; every model has a source and a generator."""
    optimiser = torch.optim.Adam(models.parameters(), lr=plan.lr, betas=(0.9, 0.98))
    named = {str(number): each for number, each in enumerate(generators)}
    done = 0
    if (state := unit.load()) is not None:
        done = restore(state, models, optimiser, named)["step"]
    advance(done)
    for step in range(done, plan.steps):
        optimiser.param_groups[0]["lr"] = plan.rate(step)
        optimiser.zero_grad()
        models.losses(draw(sources, generators, plan.batch_size)).sum().backward()
        _clip(models, plan.clip)
        optimiser.step()
        advance(1)
        last = step + 1 == plan.steps
        unit.save(lambda at=step + 1: capture(models, optimiser, named, step=at), now=last)
    if not all(bool(weight.isfinite().all()) for weight in models.parameters()):
        raise UserError("The training diverged: some weights are not finite; give a lower --lr.")


def _clip(models: Models, most: float) -> None:
    """Scale each model's gradient to a norm of `most` if it is longer; 0 where it is not finite."""
    gradients = [weight.grad for weight in models.parameters() if weight.grad is not None]
    norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
    factor = torch.where(norms.isfinite(), most / norms.clamp_min(most), 0.0)
    for gradient in gradients:
        gradient.nan_to_num_(0.0, 0.0, 0.0).mul_(factor.reshape(-1, *(1,) * (gradient.ndim - 1)))
