"""The training of the regression lab: new problems at every step, measured along the way.

Von Oswald et al.'s settings: Adam with β₂ = .98, the global gradient norm clipped. Only the decay of the rate is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.io.errors import UserError
from dualview.io.progress import Advance
from dualview.lab.problems import LinearTasks, SineTasks, Tasks
from dualview.lab.training import Curve, Schedule, training_steps
from dualview.lab.units import Unit

POINTS = 50
"""How often a model is measured during its training."""


def train(
    model: nn.Module,
    loss: Callable[[Tasks], Float[Tensor, ""]],
    measure: Callable[[], dict[str, float]],
    distribution: LinearTasks | SineTasks,
    schedule: Schedule,
    unit: Unit,
    generator: torch.Generator,
    advance: Advance,
) -> Curve:
    """Train in place and return the curves of `measure`'s values, with their `step`.

    Each child of the model has its own gradient clipping, so that two models can be trained together, independently.
    """
    curve: Curve = {}
    every = max(1, schedule.steps // POINTS)

    def note(step: int) -> None:
        if step % every == 0 or step == schedule.steps:
            _note(curve, step, measure())

    for _ in training_steps(model, schedule, advance, unit, {"tasks": generator}, curve, note):
        loss(distribution.draw(generator, schedule.batch_size)).backward()
        for part in model.children():
            nn.utils.clip_grad_norm_(part.parameters(), schedule.clip)
    return curve


def _note(curve: Curve, step: int, values: dict[str, float]) -> None:
    for name, value in {"step": step, **values}.items():
        if not math.isfinite(value) and step == 0:
            raise UserError(
                f"Before any training {name} is {value}: these problems' numbers are too large; "
                "give a smaller --noise or, for the linear task, --input-range."
            )
        if not math.isfinite(value):
            raise UserError(f"The training diverged: {name} is {value} after {step} steps; give a lower --lr.")
        curve.setdefault(name, []).append(value)
