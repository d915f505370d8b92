"""Many runs at once: grouped by everything except task and seed, and averaged over seeds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualview.comparison.result import NormPoint, Result
from dualview.metrics.measured import VerdictPart, limits_of
from dualview.metrics.statistics import draw_interval
from dualview.metrics.verdict import over_verdicts
from dualview.report.catalogue import NUMBERS, SIMILARITIES
from dualview.report.charts.profiles import per_layer
from dualview.report.charts.run import NORM_KEYS, norm_points
from dualview.report.published import SIX_TASKS

_IGNORED = {"task", "seed", "data", "save_records", "model", "protocol", "batch_size"}
"""Options that do not separate groups: the axes of the table, and those that change no number."""


@dataclass(frozen=True)
class RunSummary:
    """The part of a result that a report over many runs needs: its numbers, without queries."""

    model: str
    task: str
    seed: int | None
    shots: int
    n_queries: int
    rule: str
    lr: float
    status: str
    numbers: Mapping[str, float | None]
    layers: Mapping[str, Sequence[float | None]]
    points: Sequence[NormPoint]
    verdict: VerdictPart | None
    options: Mapping[str, Any]

    @classmethod
    def of(cls, result: Result) -> RunSummary:
        keys = [*(number.key for number in NUMBERS), "rec2ftp.chance"]
        layers = {key: per_layer(result, key) for key in SIMILARITIES}
        return cls(
            model=result.provenance.model,
            task=result.task.name,
            seed=result.provenance.seeds.demos,
            shots=result.task.shots_used,
            n_queries=result.task.n_queries,
            rule=result.ft.rule,
            lr=result.ft.lr,
            status=result.ft.status,
            numbers={key: result.number(key) for key in keys},
            layers={key: row for key, row in layers.items() if row is not None},
            points=norm_points(result),
            verdict=result.verdict,
            options={name: value for name, value in result.provenance.options.items() if name not in _IGNORED},
        )

    @property
    def point(self) -> NormPoint | None:
        """The run itself, as one point of similarity against update norm."""
        norm = self.numbers["update_norm.ft"]
        if norm is None or norm <= 0:
            return None
        sims: dict[str, Any] = {name: self.numbers[key] for key, name in NORM_KEYS.items()}
        accuracy = self.numbers["accuracy.ft"]
        return NormPoint(
            rule=self.rule,
            lr=self.lr,
            status=self.status,
            queries=self.n_queries,
            accuracy=accuracy,
            update_norm=norm,
            **sims,
        )


@dataclass(frozen=True)
class Mean:
    """The mean of one number over seeds, with its 95 % interval (Student over draws) where there are at least two.

    `n` is the number of seeds for which it is defined; without any, all others are None.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int


def mean_of(values: Iterable[float | None], key: str = "") -> Mean:
    """Over the defined values. The interval is cut to the values that number `key` can have.

    >>> found = mean_of([1.0, 3.0, None])
    >>> found.value, round(found.low, 3), round(found.high, 3), found.n
    (2.0, -10.706, 14.706, 2)
    """
    known = [value for value in values if value is not None]
    n, found = len(known), draw_interval(known, limits_of(key)) if known else None
    low, high = (None, None) if found is None else (found.low, found.high)
    return Mean(sum(known) / n if known else None, low, high, n)


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in task and seed."""

    label: str
    runs: Sequence[RunSummary]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(run.task for run in self.runs))

    def on(self, task: str) -> list[RunSummary]:
        return [run for run in self.runs if run.task == task]

    def mean(self, task: str, key: str, where: str | None = None) -> Mean:
        """Over the task's seeds; with `where`, only over those for which that number is defined."""
        runs = [run for run in self.on(task) if where is None or run.numbers.get(where) is not None]
        return mean_of((run.numbers.get(key) for run in runs), key)

    def verdicts(self, task: str | None = None) -> Counter[str]:
        runs = self.runs if task is None else self.on(task)
        return Counter("none" if run.verdict is None else run.verdict.overall for run in runs)

    def over_draws(self, task: str) -> VerdictPart | None:
        """The verdict over the task's draws, the draw being the unit; None with fewer than two."""
        return over_verdicts([run.verdict for run in self.on(task) if run.verdict is not None])

    def layers(self, task: str, key: str) -> list[Mean]:
        """Each layer's mean over seeds; runs of another depth than the first are left out."""
        rows = [run.layers[key] for run in self.on(task) if key in run.layers]
        rows = [row for row in rows if len(row) == len(rows[0])]
        return [mean_of(column, key) for column in zip(*rows, strict=True)]


def ordered(runs: Iterable[RunSummary]) -> list[RunSummary]:
    """By model, options (fewest first), task (the papers' six first) and seed, in whatever order they finished."""
    six = {task: place for place, task in enumerate(SIX_TASKS)}

    def place(run: RunSummary) -> tuple[Any, ...]:
        seed = -1 if run.seed is None else run.seed
        return (run.model, len(run.options), _options(run), six.get(run.task, len(six)), run.task, seed)

    return sorted(runs, key=place)


def _options(run: RunSummary) -> str:
    return json.dumps(run.options, sort_keys=True, default=str)


def groups_of(runs: Sequence[RunSummary]) -> list[RunGroup]:
    """Runs by model and options, each labelled by the options that differ between groups."""
    by_key: dict[str, list[RunSummary]] = {}
    for run in runs:
        by_key.setdefault(f"{run.model} {_options(run)}", []).append(run)
    found = [group[0] for group in by_key.values()]
    names = sorted({name for run in found for name in run.options})
    differing = [name for name in names if len({str(run.options.get(name)) for run in found}) > 1]
    labelled = dict.fromkeys(["weights", *differing])  # an untrained model is always labelled as such
    named = [[f"{name} {run.options[name]}" for name in labelled if name in run.options] for run in found]
    labels = [", ".join([run.model, *options]) for run, options in zip(found, named, strict=True)]
    return [RunGroup(label, group) for label, group in zip(labels, by_key.values(), strict=True)]


def tasks_of(runs: Sequence[RunSummary]) -> list[str]:
    """The columns of the table: the papers' six if any of them was run, then the others."""
    known = list(dict.fromkeys(run.task for run in runs))
    six = list(SIX_TASKS) if any(task in SIX_TASKS for task in known) else []
    return [*six, *(task for task in known if task not in SIX_TASKS)]
