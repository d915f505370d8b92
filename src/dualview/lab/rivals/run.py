"""`dualview lab rivals`: which rule does a trained in-context learner follow? Gradient descent, or something better?

Linear self-attention is trained on regression in context, by depth and by condition number of the inputs, and compared
with OLS, ridge, gradient descent, GD++, preconditioned GD and GD++, and Newton's method. Every rule has as many steps
as the model has layers and is tuned on problems that are not reported. The closest rule wins by interval over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le

from dualview.lab.harness import Findings, Job, lab
from dualview.lab.problems import named_generator
from dualview.lab.rivals.measure import MEASURES, Answers, answers, closest, distance, distances
from dualview.lab.rivals.models import Models, TokenModels, made, train
from dualview.lab.rivals.problems import Source, draw
from dualview.lab.rivals.report import figures, tables
from dualview.lab.rivals.rules import Rule
from dualview.lab.rivals.tuning import tuned_rules
from dualview.lab.settings import Positive, SeveralSeeds
from dualview.lab.training import Schedule
from dualview.lab.units import Unit
from dualview.options import AtLeastOne, option

VARIANTS = ("shared", "softmax", "separate")
Rules = Mapping[str, Sequence[Mapping[str, Any]]]
"""By name, for each number of steps: `steps`, `loss` and `theta`."""
MATCHING = 1000
"""Problems on which Newton's number of steps is chosen."""


@dataclass(frozen=True, kw_only=True)
class RivalsSettings(SeveralSeeds):
    """Options of `dualview lab rivals`."""

    conditions: tuple[Annotated[float, Ge(1)], ...] = option((1.0, 10.0, 100.0), "condition numbers of Σ, x ~ N(0, Σ)")
    depths: tuple[Annotated[int, Ge(1), Le(16)], ...] = option((1, 2, 3, 4, 6, 8), "layers of linear attention")
    variants: tuple[str, ...] = option(VARIANTS, "other models: shared weights, softmax, separate x and y tokens")
    variant_depths: tuple[Annotated[int, Ge(1), Le(16)], ...] = option((1, 2), "layers of the other models")
    variant_condition: Annotated[float, Ge(1)] = option(10.0, "condition number of their inputs")
    heads: AtLeastOne = option(2, "heads of softmax attention")
    dims: Annotated[int, Ge(2)] = option(5, "inputs")
    demos: Annotated[int, Ge(2)] = option(20, "demonstrations in the context")
    noise: Annotated[float, Ge(0)] = option(0.25, "standard deviation of the noise on the demonstrations' labels")
    steps: AtLeastOne = option(3000, "of training; the other models too")
    batch_size: AtLeastOne = option(64, "new problems a step, for each model")
    lr: Positive = option(0.01, "of Adam, after a warm-up decayed along a cosine")
    clip: Positive = option(0.1, "of each model's gradient")
    tuning_tasks: Annotated[int, Ge(100)] = option(20_000, "problems on which the rules are tuned")
    eval_tasks: Annotated[int, Ge(2)] = option(4000, "problems for the measurement, new ones for each seed")
    seeds: AtLeastOne = option(5, "number of seeds to train, from --seed on")

    ACROSS = ("seed", "seeds", "conditions", "depths", "variants", "variant_depths", "variant_condition")

    @property
    def rule_steps(self) -> list[int]:
        """Steps of the rules: as many as any model has layers."""
        return sorted({*self.depths, *self.variant_depths})

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.variants) - set(VARIANTS)):
            raise ValueError(f"option --variants: there is no {unknown[0]!r}; there are {', '.join(VARIANTS)}")
        if self.demos <= self.dims:
            raise ValueError(
                f"with {self.demos} demonstrations of {self.dims} inputs there is no OLS; give more --demos"
            )
        if not (self.depths and self.conditions):
            raise ValueError("give at least one of --depths and of --conditions")


@lab(RivalsSettings, tables, figures, single_thread=True)
def rivals(job: Job[RivalsSettings]) -> Findings:
    """Train self-attention on regression in context and find the rule it is closest to, by depth and condition number.

    Against OLS, ridge, gradient descent, GD++, preconditioned GD and Newton's method, each at its best; by prediction
    and by ∂ŷ/∂x_q, with intervals over seeds. Also shared weights, softmax, and x and y as separate tokens.
    """
    settings = job.settings
    batches = [Batch(settings, "linear", depth, settings.conditions) for depth in settings.depths]
    for kind in settings.variants:
        depths = [depth for depth in settings.variant_depths if kind != "shared" or depth > 1]  # one shares nothing
        batches += [Batch(settings, kind, depth, (settings.variant_condition,)) for depth in depths]
    trained = [(batch, _trained(job, batch)) for batch in batches]
    job.clock.lap("training")
    tuned = _all_tuned(job)
    job.clock.lap("tuning")
    rows = [row for batch, models in trained for row in _rows(batch, models, tuned)]
    job.clock.lap("measuring")
    return Findings({"tuned": {f"{condition:g}": rules for condition, rules in tuned.items()}, "trained": rows})


# ---------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Batch:
    """Models that are trained together: those of one kind and depth, for each condition number one for each seed."""

    settings: RivalsSettings
    kind: str
    depth: int
    conditions: Sequence[float]

    @property
    def sources(self) -> list[Source]:
        return [_source(self.settings, condition) for condition in self.conditions for _ in self.settings.all_seeds]

    def generators(self, name: str, device: torch.device) -> list[torch.Generator]:
        pairs = [(condition, seed) for condition in self.conditions for seed in self.settings.all_seeds]
        named = f"{name}/{self.kind}/{self.depth}"
        return [named_generator(seed, f"{named}/{condition:g}", device) for condition, seed in pairs]


def _trained(job: Job[RivalsSettings], batch: Batch) -> Models:
    settings, kind, depth = job.settings, batch.kind, batch.depth
    models = made(kind, settings.dims, depth, settings.heads, batch.generators("weights", job.device))

    def work(unit: Unit) -> dict[str, Any]:
        warm_up = max(1, settings.steps // 20)
        schedule = Schedule(settings.steps, settings.batch_size, settings.lr, settings.clip, warm_up)
        with job.progress.part(f"training {kind}, depth {depth}", settings.steps) as advance:
            train(models, batch.sources, batch.generators("training", job.device), schedule, unit, advance)
        return {name: weight.tolist() for name, weight in models.state_dict().items()}

    conditions, seeds = list(batch.conditions), settings.all_seeds
    weights = job.unit(settings.seed, kind=kind, depth=depth, conditions=conditions, seeds=seeds).once(work)
    models.load_state_dict({name: torch.tensor(weight) for name, weight in weights.items()})
    return models


def _source(settings: RivalsSettings, condition: float) -> Source:
    return Source(settings.dims, settings.demos, condition, settings.noise)


# ------------------------------------------------------------------------------------------------------------- rules


def _all_tuned(job: Job[RivalsSettings]) -> dict[float, Rules]:
    """The rules for every condition number, with as many steps as any model has layers."""
    settings = job.settings
    conditions = sorted({*settings.conditions, *([settings.variant_condition] if settings.variants else ())})
    found = job.each(
        "tuning the rules",
        conditions,
        lambda condition: _tuned(settings, condition),
        lambda condition: {"seed": 0, "tuning": condition, "rule_steps": settings.rule_steps},
    )
    return dict(zip(conditions, found, strict=True))


def _tuned(settings: RivalsSettings, condition: float) -> dict[str, Any]:
    source = _source(settings, condition)
    problems = draw([source], [named_generator(0, f"tuning/{condition:g}")], settings.tuning_tasks).moments()
    found = tuned_rules(source, problems.of_model(0), settings.rule_steps)
    return {
        name: [{"steps": one.rule.steps, "loss": one.loss, "theta": one.rule.theta} for one in each]
        for name, each in found.items()
    }


# --------------------------------------------------------------------------------------------------------- measuring


def _rows(batch: Batch, models: Models, tuned: Mapping[float, Rules]) -> list[dict[str, Any]]:
    """A row for each condition number."""
    device, count = models.m.device, batch.settings.eval_tasks
    fresh = answers(models, draw(batch.sources, batch.generators("evaluation", device), count))
    other = draw(batch.sources, batch.generators("matching", device), MATCHING)
    match, copied = answers(models, other), None
    if isinstance(models, TokenModels) and models.separate:
        copied = models.copying(other).tolist()
    size, rows = batch.settings.seeds, list[dict[str, Any]]()
    for number, condition in enumerate(batch.conditions):
        part = slice(number * size, (number + 1) * size)
        row = _compared(fresh[part], match[part], tuned[condition], batch.depth)
        if copied is not None:
            row["copied"] = [way[part] for way in copied]
        rows.append({"kind": batch.kind, "condition": condition, "depth": batch.depth, **row})
    return rows


def _compared(fresh: Sequence[Answers], match: Sequence[Answers], tuned: Rules, depth: int) -> dict[str, Any]:
    """One kind, depth and condition number against every rule; `match` chooses Newton's number of steps."""
    every = {name: [Rule(name, one["steps"], one["theta"]) for one in each] for name, each in tuned.items()}
    chosen = {name: [one for one in each if one.steps in (None, depth)] for name, each in every.items()}
    rules = {name: each[0] for name, each in chosen.items() if each}
    fitting = min(every["newton"], key=lambda rule: fmean(distance(each, rule)["prediction"] for each in match))
    if fitting.steps != depth:
        rules["newton_any"] = fitting
    by_rule = distances(fresh, rules)
    return {
        "loss": [each.loss for each in fresh],
        "rules": by_rule,
        "closest": {measure: closest(by_rule, measure) for measure in MEASURES},
    }
