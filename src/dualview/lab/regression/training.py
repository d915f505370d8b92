"""The training of the regression lab: new problems at every step, resumable.

AdamW with β₂ = .98, no weight decay, the global gradient norm clipped: von Oswald et al.'s settings. One thing differs:
the learning rate falls to 0 along a cosine, so that the result does not depend on the last few batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.io.errors import UserError
from dualview.io.progress import Advance
from dualview.lab.problems import Distribution, Tasks
from dualview.lab.units import Unit, capture, restore


@dataclass(frozen=True)
class Schedule:
    """The hyper-parameters of one training."""

    distribution: Distribution
    steps: int
    batch_size: int
    lr: float
    clip: float
    points: int = 50
    """How often it is evaluated during training."""

    def to_json(self) -> dict[str, float]:
        """Its numbers, defaults filled in: part of the key of a training's saved state."""
        return {"steps": self.steps, "batch_size": self.batch_size, "lr": self.lr, "clip": self.clip}

    def measured(self, step: int) -> bool:
        every = max(1, self.steps // self.points)
        return step % every == 0 or step == self.steps

    def rate(self, step: int) -> float:
        """The learning rate before this step, counted from 0."""
        return self.lr * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def train(
    model: nn.Module,
    loss: Callable[[Tasks], Float[Tensor, ""]],
    measure: Callable[[], dict[str, float]],
    schedule: Schedule,
    unit: Unit,
    generator: torch.Generator,
    advance: Advance,
) -> dict[str, list[float]]:
    """Train in place and return the curves of `measure`'s values, with their `step`.

    Each child of the model has its own gradient clipping, so that two models can be trained together, independently.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=schedule.lr, betas=(0.9, 0.98), weight_decay=0.0)
    generators = {"tasks": generator}
    curve: dict[str, list[float]] = {}
    done = 0
    if (state := unit.load()) is not None:
        info = restore(state, model, optimiser, generators)
        done, curve = info["step"], info["curve"]
    advance(done)
    for step in range(done, schedule.steps):
        if step == 0:
            _note(curve, 0, measure())
        optimiser.param_groups[0]["lr"] = schedule.rate(step)
        optimiser.zero_grad()
        loss(schedule.distribution.draw(generator, schedule.batch_size)).backward()
        for part in model.children():
            nn.utils.clip_grad_norm_(part.parameters(), schedule.clip)
        optimiser.step()
        if schedule.measured(step + 1):
            _note(curve, step + 1, measure())
        advance(1)
        last = step + 1 == schedule.steps
        unit.save(lambda at=step + 1: capture(model, optimiser, generators, step=at, curve=curve), now=last)
    return curve


def _note(curve: dict[str, list[float]], step: int, values: dict[str, float]) -> None:
    for name, value in {"step": step, **values}.items():
        if not math.isfinite(value) and step == 0:
            raise UserError(
                f"Before any training {name} is {value}: these problems' numbers are too large; "
                "give a smaller --noise or, for the linear task, --input-range."
            )
        if not math.isfinite(value):
            raise UserError(f"The training diverged: {name} is {value} after {step} steps; give a lower --lr.")
        curve.setdefault(name, []).append(value)
