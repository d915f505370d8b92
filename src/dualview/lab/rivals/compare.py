"""The rivals lab's work: tune every rule, train every model, measure how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from dualview.lab.harness import Findings, Job
from dualview.lab.problems import named_generator
from dualview.lab.rivals.measure import MEASURES, Answers, answers, closest, distance, distances
from dualview.lab.rivals.models import Models, TokenModels, made
from dualview.lab.rivals.problems import Source, draw
from dualview.lab.rivals.rules import Rule
from dualview.lab.rivals.settings import RivalsSettings
from dualview.lab.rivals.training import Plan, train
from dualview.lab.rivals.tuning import tuned_rules
from dualview.lab.units import Unit

Rules = Mapping[str, Sequence[Mapping[str, Any]]]
"""By name, for each number of steps: `steps`, `loss` and `theta`."""
MATCHING = 1000
"""Problems on which Newton's number of steps is chosen."""


def run(job: Job[RivalsSettings]) -> Findings:
    """Everything the lab reports."""
    settings = job.settings
    trained = [_trained(job, "linear", depth, settings.conditions) for depth in settings.depths]
    for kind in settings.variants:
        depths = [depth for depth in settings.variant_depths if kind != "shared" or depth > 1]  # one shares nothing
        trained += [_trained(job, kind, depth, (settings.variant_condition,)) for depth in depths]
    job.clock.lap("training")
    tuned = _all_tuned(job)
    job.clock.lap("tuning")
    rows = [row for each in trained for row in _rows(each, settings, tuned)]
    job.clock.lap("measuring")
    return Findings({"tuned": {f"{condition:g}": rules for condition, rules in tuned.items()}, "trained": rows})


# ---------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Trained:
    """The models of one kind and depth: for each condition number, one for each seed."""

    kind: str
    depth: int
    conditions: Sequence[float]
    sources: Sequence[Source]
    seeds: Sequence[int]
    models: Models

    def generators(self, name: str) -> list[torch.Generator]:
        """One for each model."""
        return _generators(name, self.kind, self.depth, self.conditions, self.seeds, self.models.m.device)


def _generators(
    name: str, kind: str, depth: int, conditions: Sequence[float], seeds: Sequence[int], device: torch.device
) -> list[torch.Generator]:
    pairs = [(condition, seed) for condition in conditions for seed in seeds]
    return [named_generator(seed, f"{name}/{kind}/{depth}/{condition:g}", device) for condition, seed in pairs]


def _trained(job: Job[RivalsSettings], kind: str, depth: int, conditions: Sequence[float]) -> Trained:
    """All seeds and condition numbers of one kind and depth, trained as one batch."""
    settings, seeds = job.settings, job.settings.all_seeds
    start = _generators("weights", kind, depth, conditions, seeds, job.device)
    models = made(kind, settings.dims, depth, settings.heads, start)
    sources = [_source(settings, condition) for condition in conditions for _ in seeds]
    found = Trained(kind, depth, conditions, sources, seeds, models)

    def work(unit: Unit) -> dict[str, Any]:
        plan = Plan(settings.steps, settings.batch_size, settings.lr, settings.clip)
        with job.progress.part(f"training {kind}, depth {depth}", settings.steps) as advance:
            train(models, sources, found.generators("training"), plan, unit, advance)
        return {name: weight.tolist() for name, weight in models.state_dict().items()}

    unit = job.unit(settings.seed, None, kind=kind, depth=depth, conditions=list(conditions), seeds=seeds)
    weights = unit.once(work)
    models.load_state_dict({name: torch.tensor(weight) for name, weight in weights.items()})
    return found


def _source(settings: RivalsSettings, condition: float) -> Source:
    return Source(settings.dims, settings.demos, condition, settings.noise)


# ------------------------------------------------------------------------------------------------------------- rules


def _all_tuned(job: Job[RivalsSettings]) -> dict[float, Rules]:
    """The rules for every condition number, with as many steps as any model has layers."""
    settings = job.settings
    conditions = set(settings.conditions)
    if settings.variants:
        conditions.add(settings.variant_condition)
    found: dict[float, Rules] = {}
    with job.progress.part("tuning the rules", len(conditions)) as advance:
        for condition in sorted(conditions):
            unit = job.unit(0, None, tuning=condition, rule_steps=settings.rule_steps)
            found[condition] = unit.once(lambda _, c=condition: _tuned(settings, c))
            advance(1)
    return found


def _tuned(settings: RivalsSettings, condition: float) -> dict[str, Any]:
    source = _source(settings, condition)
    problems = draw([source], [named_generator(0, f"tuning/{condition:g}")], settings.tuning_tasks).moments()
    found = tuned_rules(source, problems.of_model(0), settings.rule_steps)
    return {
        name: [{"steps": one.rule.steps, "loss": one.loss, "theta": one.rule.theta} for one in each]
        for name, each in found.items()
    }


# --------------------------------------------------------------------------------------------------------- measuring


def _rows(trained: Trained, settings: RivalsSettings, tuned: Mapping[float, Rules]) -> list[dict[str, Any]]:
    """A row for each condition number."""
    models, sources = trained.models, trained.sources
    fresh = answers(models, draw(sources, trained.generators("evaluation"), settings.eval_tasks))
    other = draw(sources, trained.generators("matching"), MATCHING)
    match, copied = answers(models, other), None
    if isinstance(models, TokenModels) and models.separate:
        copied = models.copying(other).tolist()
    size, rows = len(trained.seeds), list[dict[str, Any]]()
    for number, condition in enumerate(trained.conditions):
        part = slice(number * size, (number + 1) * size)
        row = _compared(fresh[part], match[part], tuned[condition], trained.depth)
        if copied is not None:
            row["copied"] = [way[part] for way in copied]
        rows.append({"kind": trained.kind, "condition": condition, "depth": trained.depth, **row})
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
