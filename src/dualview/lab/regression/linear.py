"""The regression lab on linear problems: train, then compare with gradient descent, GD++ and constructed weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from dualview.duality.theory.regression import uniform_optimum
from dualview.io.errors import UserError
from dualview.io.progress import Advance
from dualview.lab.harness import Findings, Job
from dualview.lab.problems import LinearTasks, Tasks, named_generator
from dualview.lab.regression.measure import (
    PlusPlus,
    best_plus_plus,
    best_rate,
    first_guess,
    losses,
    mean_loss,
    paired,
    shifted_losses,
    shifts_of,
    similarity,
)
from dualview.lab.regression.models import (
    InContext,
    Predictor,
    gd_layers,
    gradient_descent,
    interpolated,
    plus_plus_layers,
)
from dualview.lab.regression.settings import RegressionSettings
from dualview.lab.regression.training import Schedule, train
from dualview.lab.units import Unit

CURVE_TASKS = 2_000
"""How many of the evaluation's problems the curves use."""
SHIFT_TASKS = 2_000


def run(job: Job[RegressionSettings]) -> Findings:
    """Everything the lab reports on linear problems."""
    settings, device = job.settings, job.device
    base = LinearTasks(settings.dims, settings.demos, settings.input_range, noise=settings.noise)
    tasks = base.draw(named_generator(0, "evaluation", device), settings.eval_tasks)
    with job.progress.part("finding gradient descent's best step", 1) as advance:
        against = references(settings, base, tasks)
        advance(1)
    job.clock.lap("references")
    schedule = schedule_of(settings, base)

    def one_seed(seed: int, unit: Unit) -> dict[str, Any]:
        with job.progress.part(f"training, seed {seed}", schedule.steps) as advance:
            model, curve = trained(settings, schedule, seed, tasks, against, unit, advance)
        job.clock.lap("training")
        with job.progress.part(f"measuring, seed {seed}", 1) as advance:
            found = {**measured(settings, base, model, tasks, against), "curve": curve}
            advance(1)
        job.clock.lap("measuring")
        return found

    results = by_seed(job, schedule, one_seed, tasks, against.to_json())
    if settings.shifts:
        results["shifts"] = {
            shift.name: {
                "title": shift.title,
                "at": shift.at,
                "losses": shifted_losses(base, shift, against.predictors, SHIFT_TASKS, device),
            }
            for shift in shifts_of(base)
        }
        job.clock.lap("shifts")
    return Findings(results)


def by_seed(
    job: Job[RegressionSettings],
    schedule: Schedule,
    one_seed: Callable[[int, Unit], dict[str, Any]],
    tasks: Tasks,
    references: dict[str, Any],
) -> dict[str, Any]:
    """The part of the results that linear problems and sine waves share; every seed is a unit of its own."""
    units = {seed: job.unit(seed, None, **schedule.to_json()) for seed in job.settings.all_seeds}
    found = {str(seed): unit.once(lambda unit, seed=seed: one_seed(seed, unit)) for seed, unit in units.items()}
    return {
        "eval_tasks": len(tasks),
        "curve_tasks": len(tasks.first(CURVE_TASKS)),
        "plan": schedule.to_json(),
        "references": references,
        "by_seed": found,
    }


# -------------------------------------------------------------------------------------------------------- references


@dataclass(frozen=True)
class References:
    """What the trained model is compared with."""

    rate: float
    steps: int
    gd_losses: Float[np.ndarray, " task"]
    constructed: dict[str, float]
    zero: float
    """The loss of predicting 0."""
    closed_form: dict[str, float] | None
    """The best single step on average over all problems, where there is a formula for it."""
    plus_plus: PlusPlus | None
    """None for one step, where γ has no effect: GD++ is then gradient descent."""
    plus_plus_losses: Float[np.ndarray, " task"] | None

    @property
    def predictors(self) -> dict[str, Predictor]:
        """By name; a trained model of this depth should match the last."""
        found: dict[str, Predictor] = {"gd": gradient_descent(self.rate, self.steps)}
        return found if self.plus_plus is None else {**found, "gd_plus_plus": self.plus_plus.predictor}

    def to_json(self) -> dict[str, Any]:
        better = None
        if self.plus_plus is not None and self.plus_plus_losses is not None:
            better = {**vars(self.plus_plus), **_reached(self.plus_plus_losses)}
        return {
            "gd": {"rate": self.rate, "steps": self.steps, **_reached(self.gd_losses)},
            "gd_plus_plus": better,
            "constructed": self.constructed,
            "closed_form": self.closed_form,
            "zero": self.zero,
        }


def _reached(found: Float[np.ndarray, " task"]) -> dict[str, float]:
    """The loss on all problems, and on the few that the training curve uses."""
    return {"loss": float(found.mean()), "curve_loss": float(found[:CURVE_TASKS].mean())}


def references(settings: RegressionSettings, base: LinearTasks, tasks: Tasks) -> References:
    """The best gradient descent and GD++ on the evaluation's problems, and the constructed weights."""
    rate = best_rate(tasks, settings.layers, first_guess(base))
    descent = gradient_descent(rate, settings.layers)
    reached = losses(descent, tasks)
    if not np.isfinite(reached).all():
        raise UserError(
            "Gradient descent has no finite loss: these problems' numbers are too large; "
            "give a smaller --noise or --input-range."
        )
    constructed = InContext.constructed(gd_layers(rate, settings.layers, tasks.x[0].mT))
    closed = None
    if settings.layers == 1 and not settings.noise:
        best = uniform_optimum(base.n_x, base.n_demos, base.input_range / 2)
        closed = {"rate": best.rate, "loss": best.loss}
    plus_plus = None
    if settings.layers > 1:
        plus_plus = best_plus_plus(tasks, settings.layers, rate, shared=settings.recurrent)
    few = tasks.first(CURVE_TASKS)
    with torch.no_grad():
        apart = float((constructed(few) - descent(few)).abs().max())
    return References(
        rate=rate,
        steps=settings.layers,
        gd_losses=reached,
        constructed={"loss": mean_loss(constructed, tasks), "largest_difference_from_gd": apart},
        zero=float(tasks.y_query.double().square().mean() / 2),
        closed_form=closed,
        plus_plus=plus_plus,
        plus_plus_losses=None if plus_plus is None else losses(plus_plus.predictor, tasks),
    )


# ---------------------------------------------------------------------------------------------------------- training


def schedule_of(settings: RegressionSettings, base: LinearTasks) -> Schedule:
    """Von Oswald et al.'s hyper-parameters where none are given; for softmax, some that train it well."""
    few, deep = settings.layers <= 2, settings.layers > 3
    lr, clip = 5e-4 if deep else 1e-3, 1e-3 if few else 10.0
    if settings.softmax:
        lr, clip = 3 * lr, 10.0
    return Schedule(
        distribution=base,
        steps=settings.steps or default_steps(settings),
        batch_size=settings.batch_size or 2048,
        lr=settings.lr or lr,
        clip=settings.clip or clip,
    )


def default_steps(settings: RegressionSettings) -> int:
    """Their 5,000 with shared weights and 50,000 without; one layer needs fewer, as the rate decays."""
    if settings.layers == 1:
        return 2_500
    return 5_000 if settings.recurrent else 50_000


def trained(
    settings: RegressionSettings,
    schedule: Schedule,
    seed: int,
    tasks: Tasks,
    against: References,
    unit: Unit,
    advance: Advance,
) -> tuple[InContext, dict[str, list[float]]]:
    """One seed's model, and its curves against the best reference."""
    device = tasks.x.device
    model = InContext.fresh(
        tasks.x.shape[-1] + 1,
        settings.layers,
        recurrent=settings.recurrent,
        heads=settings.heads,
        softmax=settings.softmax,
        generator=named_generator(seed, "weights", device),
    )
    few = tasks.first(CURVE_TASKS)
    expected = list(against.predictors.values())[-1]

    def measure() -> dict[str, float]:
        return {"loss": mean_loss(model, few), **similarity(model, expected, few).to_json()}

    def loss(batch: Tasks) -> torch.Tensor:
        return 0.5 * (model(batch) - batch.y_query).square().mean()

    generator = named_generator(seed, "training", device)
    curve = train(model, loss, measure, schedule, unit, generator, advance)
    return model, curve


def measured(
    settings: RegressionSettings, base: LinearTasks, model: InContext, tasks: Tasks, against: References
) -> dict[str, Any]:
    """The trained model on all evaluation problems, compared with every reference."""
    own = losses(model, tasks)
    found: dict[str, Any] = {"loss": float(own.mean())}
    reached = {"gd": against.gd_losses, "gd_plus_plus": against.plus_plus_losses}
    for name, predict in against.predictors.items():
        other = reached[name]
        assert other is not None
        found[name] = {**paired(own, other), **similarity(model, predict, tasks).to_json()}
    found["interpolated"] = half_way(settings, model, tasks, against)
    if settings.shifts:
        device = tasks.x.device
        found["shifts"] = {
            shift.name: shifted_losses(base, shift, {"trained": model}, SHIFT_TASKS, device)["trained"]
            for shift in shifts_of(base)
        }
    return found


def half_way(
    settings: RegressionSettings, model: InContext, tasks: Tasks, against: References
) -> dict[str, Any] | None:
    """The loss half way between trained and constructed weights; it exists for one linear head only."""
    if settings.softmax or settings.heads > 1 or (settings.layers > 1 and not settings.recurrent):
        return None
    shape = tasks.x[0].mT
    if against.plus_plus is None:
        other = gd_layers(against.rate, 1, shape)[0]
    else:
        other = plus_plus_layers(against.plus_plus.rates[:1], against.plus_plus.gammas[:1], shape)[0]
    middle = interpolated(model.first_layer(), other, len(shape))
    loss = mean_loss(InContext.constructed([middle] * settings.layers), tasks)
    return {"between": "gd" if against.plus_plus is None else "gd_plus_plus", "loss": loss}
