"""The rivals lab's work: tune every rule, train every model, measure how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from dualview.lab.harness import Findings, Job
from dualview.lab.problems import named_generator
from dualview.lab.rivals.measure import MEASURES, Answers, answers, closest, distance, distances
from dualview.lab.rivals.models import made
from dualview.lab.rivals.problems import Source, draw
from dualview.lab.rivals.rules import Rule
from dualview.lab.rivals.settings import RivalsSettings
from dualview.lab.rivals.training import Plan, train
from dualview.lab.rivals.tuning import tuned_rules
from dualview.lab.units import Unit

Rules = Mapping[str, Sequence[Mapping[str, Any]]]
"""By name, for each number of steps: `steps`, `loss` and `theta`."""


def run(job: Job[RivalsSettings]) -> Findings:
    """Everything the lab reports."""
    settings = job.settings
    tuned = _all_tuned(job)
    job.clock.lap("tuning")
    trained: list[dict[str, Any]] = []
    for depth in settings.depths:
        trained += _trained(job, "linear", depth, settings.conditions, tuned)
    for kind in settings.variants:
        for depth in settings.variant_depths:
            if kind != "shared" or depth > 1:  # one layer shares nothing
                trained += _trained(job, kind, depth, (settings.variant_condition,), tuned)
    job.clock.lap("training")
    return Findings({"tuned": {f"{condition:g}": rules for condition, rules in tuned.items()}, "trained": trained})


def _all_tuned(job: Job[RivalsSettings]) -> dict[float, Rules]:
    """The rules for every condition number, with as many steps as any model has layers."""
    settings = job.settings
    wanted = {condition: set(settings.depths) for condition in settings.conditions}
    if settings.variants:
        wanted.setdefault(settings.variant_condition, set()).update(settings.variant_depths)
    found: dict[float, Rules] = {}
    with job.progress.part("tuning the rules", len(wanted)) as advance:
        for condition, depths in wanted.items():
            unit = job.unit(0, None, tuning=condition, depths=sorted(depths))
            found[condition] = unit.once(lambda _, c=condition, d=depths: _tuned(settings, c, sorted(d)))
            advance(1)
    return found


def _source(settings: RivalsSettings, condition: float) -> Source:
    return Source(settings.dims, settings.demos, condition, settings.noise)


def _tuned(settings: RivalsSettings, condition: float, depths: Sequence[int]) -> dict[str, Any]:
    source = _source(settings, condition)
    problems = draw([source], [named_generator(0, f"tuning/{condition:g}")], settings.tuning_tasks).moments()
    found = tuned_rules(source, problems.of_model(0), depths)
    return {
        name: [{"steps": one.rule.steps, "loss": one.loss, "theta": one.rule.theta} for one in each]
        for name, each in found.items()
    }


def _trained(
    job: Job[RivalsSettings], kind: str, depth: int, conditions: Sequence[float], tuned: Mapping[float, Rules]
) -> list[dict[str, Any]]:
    """All seeds and condition numbers of one kind and depth, trained as one batch: a row for each condition number."""
    settings, device = job.settings, job.device
    pairs = [(condition, seed) for condition in conditions for seed in settings.all_seeds]
    sources = [_source(settings, condition) for condition, _ in pairs]

    def generators(name: str) -> list[torch.Generator]:
        return [named_generator(seed, f"{name}/{kind}/{depth}/{c:g}", device) for c, seed in pairs]

    def work(unit: Unit) -> dict[str, Any]:
        models = made(kind, settings.dims, depth, settings.heads, generators("weights"))
        plan = Plan(settings.steps, settings.batch_size, settings.lr, settings.clip)
        with job.progress.part(f"training {kind}, depth {depth}", settings.steps) as advance:
            train(models, sources, generators("training"), plan, unit, advance)
        fresh = answers(models, draw(sources, generators("evaluation"), settings.eval_tasks))
        match = answers(models, draw(sources, generators("matching"), settings.tuning_tasks))
        size, rows = len(settings.all_seeds), list[dict[str, Any]]()
        for number, condition in enumerate(conditions):
            part = slice(number * size, (number + 1) * size)
            row = _compared(fresh[part], match[part], tuned[condition], depth)
            rows.append({"kind": kind, "condition": condition, "depth": depth, **row})
        return {"rows": rows}

    return job.unit(settings.seed, None, kind=kind, depth=depth, seeds=settings.all_seeds).once(work)["rows"]


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
