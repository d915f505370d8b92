"""The regression lab on linear problems: train, then compare with gradient descent, GD++ and constructed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float

from dualview.duality.theory.regression import uniform_optimum
from dualview.io.errors import UserError
from dualview.io.progress import Advance
from dualview.lab.harness import Findings, Job
from dualview.lab.problems import LinearTasks, Tasks, named_generator
from dualview.lab.regression.measure import (
    Shift,
    best_plus_plus,
    best_rate,
    first_guess,
    losses,
    mean_loss,
    paired,
    shifts_of,
    similarity,
)
from dualview.lab.regression.models import (
    InContext,
    Predictor,
    SelfAttention,
    gd_layers,
    gradient_descent,
    interpolated,
    plus_plus_layers,
)
from dualview.lab.regression.settings import RegressionSettings
from dualview.lab.regression.training import train
from dualview.lab.training import Curve, Schedule
from dualview.lab.units import Unit

CURVE_TASKS = 2_000
"""How many of the evaluation's problems the curves use."""
SHIFT_TASKS = 2_000


def run(job: Job[RegressionSettings]) -> Findings:
    """Everything the lab reports on linear problems."""
    settings = job.settings
    base = LinearTasks(settings.dims, settings.demos, settings.input_range, noise=settings.noise)
    tasks = base.draw(named_generator(0, "evaluation", job.device), settings.eval_tasks)
    with job.progress.part("finding gradient descent's best step", 1) as advance:
        bench = Bench(settings, base, tasks, references(settings, base, tasks))
        advance(1)
    job.clock.lap("references")
    schedule = schedule_of(settings)

    def one_seed(seed: int, unit: Unit) -> dict[str, Any]:
        with job.progress.part(f"training, seed {seed}", schedule.steps) as advance:
            model, curve = bench.trained(schedule, seed, unit, advance)
        job.clock.lap("training")
        with job.progress.part(f"measuring, seed {seed}", 1) as advance:
            found = {**bench.measured(model), "curve": curve}
            advance(1)
        job.clock.lap("measuring")
        return found

    results = by_seed(job, schedule, one_seed, tasks, bench.against.found)
    if settings.shifts:
        results["shifts"] = {
            shift.name: {"title": shift.title, "at": shift.at, "losses": bench.shifted(shift, bench.against.predictors)}
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
    plan = {name: getattr(schedule, name) for name in ("steps", "batch_size", "lr", "clip")}  # the defaults filled in
    units = {seed: job.unit(seed, **plan) for seed in job.settings.all_seeds}
    found = {str(seed): unit.once(lambda unit, seed=seed: one_seed(seed, unit)) for seed, unit in units.items()}
    return {
        "eval_tasks": len(tasks),
        "curve_tasks": len(tasks.first(CURVE_TASKS)),
        "plan": plan,
        "references": references,
        "by_seed": found,
    }


# -------------------------------------------------------------------------------------------------------- references


@dataclass(frozen=True)
class References:
    """What the trained model is compared with."""

    found: dict[str, Any]
    """What the result holds of them. GD++ is null for one step, where γ has no effect: it is then gradient descent."""
    predictors: dict[str, Predictor]
    """By name; a trained model of this depth should match the last."""
    losses: dict[str, Float[np.ndarray, " task"]]


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
    predictors, by_name = {"gd": descent}, {"gd": reached}
    found: dict[str, Any] = {"gd": {"rate": rate, "steps": settings.layers, **_reached(reached)}, "gd_plus_plus": None}
    if settings.layers > 1:
        best = best_plus_plus(tasks, settings.layers, rate, shared=settings.recurrent)
        predictors["gd_plus_plus"], by_name["gd_plus_plus"] = best.predictor, losses(best.predictor, tasks)
        found["gd_plus_plus"] = {**vars(best), **_reached(by_name["gd_plus_plus"])}
    constructed = InContext.constructed(gd_layers(rate, settings.layers, tasks.x[0].mT))
    few = tasks.first(CURVE_TASKS)
    with torch.no_grad():
        apart = float((constructed(few) - descent(few)).abs().max())
    found["constructed"] = {"loss": mean_loss(constructed, tasks), "largest_difference_from_gd": apart}
    found["closed_form"] = None
    if settings.layers == 1 and not settings.noise:  # the best single step on average over all problems
        exact = uniform_optimum(base.n_x, base.n_demos, base.input_range / 2)
        found["closed_form"] = {"rate": exact.rate, "loss": exact.loss}
    found["zero"] = zero_loss(tasks)
    return References(found, predictors, by_name)


def _reached(found: Float[np.ndarray, " task"]) -> dict[str, float]:
    """The loss on all problems, and on the few that the training curve uses."""
    return {"loss": float(found.mean()), "curve_loss": float(found[:CURVE_TASKS].mean())}


def zero_loss(tasks: Tasks) -> float:
    """The loss of predicting 0."""
    return float(tasks.y_query.double().square().mean() / 2)


# ---------------------------------------------------------------------------------------------------------- training


def schedule_of(settings: RegressionSettings) -> Schedule:
    """Von Oswald et al.'s hyper-parameters where none are given; for softmax, some that train it well.

    Their 5,000 steps with shared weights and 50,000 without; one layer needs fewer, as the rate decays.
    """
    steps = 2_500 if settings.layers == 1 else 5_000 if settings.recurrent else 50_000
    lr, clip = 5e-4 if settings.layers > 3 else 1e-3, 1e-3 if settings.layers <= 2 else 10.0
    if settings.softmax:
        lr, clip = 3 * lr, 10.0
    return Schedule(settings.steps or steps, settings.batch_size or 2048, settings.lr or lr, settings.clip or clip)


@dataclass(frozen=True)
class Bench:
    """What all trainings share: the problems and what the trained models are compared with."""

    settings: RegressionSettings
    base: LinearTasks
    tasks: Tasks
    against: References

    def trained(self, schedule: Schedule, seed: int, unit: Unit, advance: Advance) -> tuple[InContext, Curve]:
        """One seed's model, and its curves against the best reference."""
        device, few = self.tasks.x.device, self.tasks.first(CURVE_TASKS)
        model = InContext.fresh(self.base.n_x + 1, self.settings, named_generator(seed, "weights", device))
        expected = list(self.against.predictors.values())[-1]

        def measure() -> dict[str, float]:
            return {"loss": mean_loss(model, few), **similarity(model, expected, few)}

        generator = named_generator(seed, "training", device)
        return model, train(
            model, lambda batch: batch.loss(model(batch)), measure, self.base, schedule, unit, generator, advance
        )

    def measured(self, model: InContext) -> dict[str, Any]:
        """The trained model on all evaluation problems, compared with every reference."""
        own = losses(model, self.tasks)
        found: dict[str, Any] = {"loss": float(own.mean())}
        for name, predict in self.against.predictors.items():
            found[name] = {**paired(own, self.against.losses[name]), **similarity(model, predict, self.tasks)}
        found["interpolated"] = self.half_way(model)
        if self.settings.shifts:
            shifts = shifts_of(self.base)
            found["shifts"] = {shift.name: self.shifted(shift, {"trained": model})["trained"] for shift in shifts}
        return found

    def shifted(self, shift: Shift, predictors: Mapping[str, Predictor]) -> dict[str, list[float]]:
        """Each predictor's loss at each value of a shift, all on the same problems."""
        found: dict[str, list[float]] = {name: [] for name in predictors}
        for value in shift.at:
            generator = named_generator(0, f"shift/{shift.name}", self.tasks.x.device)
            tasks = shift.moved(self.base, value).draw(generator, SHIFT_TASKS)
            for name, predict in predictors.items():
                found[name].append(mean_loss(predict, tasks))
        return found

    def half_way(self, model: InContext) -> dict[str, Any] | None:
        """The loss half way between trained and constructed weights; it exists for one linear head only."""
        settings = self.settings
        if settings.softmax or settings.heads > 1 or (settings.layers > 1 and not settings.recurrent):
            return None
        shape, better = self.tasks.x[0].mT, self.against.found["gd_plus_plus"]
        if better is None:
            other = gd_layers(self.against.found["gd"]["rate"], 1, shape)[0]
        else:
            other = plus_plus_layers(better["rates"][:1], better["gammas"][:1], shape)[0]
        middle = interpolated(cast(SelfAttention, model.layers[0]).weights(), other, len(shape))
        loss = mean_loss(InContext.constructed([middle] * settings.layers), self.tasks)
        return {"between": "gd" if better is None else "gd_plus_plus", "loss": loss}
