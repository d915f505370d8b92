"""Many runs at once: grouped by everything but task and seed, averaged over seeds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualview.comparison.result import Result
from dualview.metrics.statistics import draw_interval
from dualview.report.catalogue import ANY, NUMBERS, Limits, at, limits
from dualview.report.chart_data import NORM_KEYS, SETTING_NAMES, NormPoint, norm_points
from dualview.report.published import SIX_TASKS, published_values

PAPERS_DRAWN = ("Dai et al., 1.3B", "Dai et al., 2.7B")
"""Whose accuracies stand beside a group's."""
LAYERED = ("sim_aou.raw", "sim_aou.normalised", "sim_am.delta", "sim_am.after")
_NO_MATTER = {"task", "seed", "data", "save_records", "model", "protocol", "batch_size"}
"""Options that do not set groups apart: the table's own axes, and what changes no number."""


@dataclass(frozen=True)
class Run:
    """What a report over many runs needs of one: its numbers, without queries."""

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
    verdict: str | None
    options: Mapping[str, Any]

    @classmethod
    def of(cls, result: Result) -> Run:
        content = result.model_dump(mode="json", by_alias=True, exclude={"queries"})
        layers = {key: at(content, f"{key}_per_layer") for key in LAYERED}
        options = result.provenance.options
        return cls(
            model=result.provenance.model,
            task=result.task.name,
            seed=result.provenance.seeds.demos,
            shots=result.task.shots_used,
            n_queries=result.task.n_queries,
            rule=result.ft.rule,
            lr=result.ft.lr,
            status=result.ft.status,
            numbers={number.key: at(content, number.key) for number in NUMBERS}
            | {"rec2ftp.chance": at(content, "rec2ftp.chance")},
            layers={key: row for key, row in layers.items() if row is not None},
            points=norm_points(result),
            verdict=at(content, "verdict.overall"),
            options={name: value for name, value in options.items() if name not in _NO_MATTER},
        )

    @property
    def point(self) -> NormPoint | None:
        """The run itself, as one point of similarity against update norm."""
        norm = self.numbers["update_norm.ft"]
        if norm is None or norm <= 0:
            return None
        sims = {key: self.numbers[key] for key in NORM_KEYS}
        where = f"{self.model} on {self.task}, seed {self.seed}"
        return NormPoint(self.rule, self.lr, norm, self.status, self.numbers["accuracy.ft"], sims, where)


@dataclass(frozen=True)
class Mean:
    """The mean of one number over seeds, with Student's 95 % interval where there are at least two.

    `n`: over how many of them, for a number need not be defined for every seed.
    """

    value: float
    low: float | None
    high: float | None
    n: int


def mean_of(values: Iterable[float | None], within: Limits = ANY) -> Mean | None:
    """Over the values that are defined; None if there are none. The interval is cut to what the number can be.

    >>> found = mean_of([1.0, 3.0, None])
    >>> found.value, round(found.low, 3), round(found.high, 3), found.n
    (2.0, -10.706, 14.706, 2)
    """
    known = [value for value in values if value is not None]
    n = len(known)
    if n == 0:
        return None
    mean, found = sum(known) / n, draw_interval(known)
    if found is None:
        return Mean(mean, None, None, n)
    return Mean(mean, within.cut(found.low), within.cut(found.high), n)


@dataclass(frozen=True)
class Bars:
    """One setting's accuracy on every task of a group, and what the papers found there."""

    setting: str
    means: Sequence[Mean | None]
    papers: Mapping[str, Sequence[float | None]]

    @property
    def name(self) -> str:
        return SETTING_NAMES[self.setting]


@dataclass(frozen=True)
class Layers:
    """One similarity on one task, layer by layer."""

    task: str
    means: Sequence[Mean | None]

    @property
    def values(self) -> list[float | None]:
        return [None if mean is None else mean.value for mean in self.means]

    @property
    def low(self) -> list[float | None]:
        return [None if mean is None else mean.low for mean in self.means]

    @property
    def high(self) -> list[float | None]:
        return [None if mean is None else mean.high for mean in self.means]


@dataclass(frozen=True)
class Group:
    """Runs that differ in task and seed alone."""

    label: str
    runs: Sequence[Run]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(run.task for run in self.runs))

    def on(self, task: str) -> list[Run]:
        return [run for run in self.runs if run.task == task]

    def mean(self, task: str, key: str, beside: str | None = None) -> Mean | None:
        """Over the task's seeds; with `beside`, over those seeds alone for which that number is defined."""
        runs = [run for run in self.on(task) if beside is None or run.numbers.get(beside) is not None]
        return mean_of((run.numbers.get(key) for run in runs), limits(key))

    def accuracies(self) -> list[Bars]:
        """The three settings on every task."""
        found: list[Bars] = []
        for setting in ("zsl", "icl", "ft"):
            key = f"accuracy.{setting}"
            papers = {s: [published_values(task, key).get(s) for task in self.tasks] for s in PAPERS_DRAWN}
            known = {source: row for source, row in papers.items() if any(value is not None for value in row)}
            found.append(Bars(setting, [self.mean(task, key) for task in self.tasks], known))
        return found

    def layered(self, key: str) -> list[Layers]:
        """A similarity by layer on every task that has it."""
        return [Layers(task, means) for task in self.tasks if (means := self.layers(task, key))]

    def verdicts(self, task: str | None = None) -> Counter[str]:
        runs = self.runs if task is None else self.on(task)
        return Counter(run.verdict or "none" for run in runs)

    def layers(self, task: str, key: str) -> list[Mean | None]:
        """Each layer's mean over seeds; runs of another depth than the first are left out."""
        rows = [run.layers[key] for run in self.on(task) if key in run.layers]
        rows = [row for row in rows if len(row) == len(rows[0])]
        return [mean_of(column, limits(key)) for column in zip(*rows, strict=True)]


def ordered(runs: Iterable[Run]) -> list[Run]:
    """By model, options (fewest first), task (the papers' six first) and seed, whichever was finished first."""
    six = {task: place for place, task in enumerate(SIX_TASKS)}

    def place(run: Run) -> tuple[Any, ...]:
        seed = -1 if run.seed is None else run.seed
        return (run.model, len(run.options), _options(run), six.get(run.task, len(six)), run.task, seed)

    return sorted(runs, key=place)


def _options(run: Run) -> str:
    return json.dumps(run.options, sort_keys=True, default=str)


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Runs by model and options, each labelled by what sets it apart from the others."""
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        by_key.setdefault(f"{run.model} {_options(run)}", []).append(run)
    found = [group[0] for group in by_key.values()]
    names = sorted({name for run in found for name in run.options})
    telling = [name for name in names if len({str(run.options.get(name)) for run in found}) > 1]
    return [Group(_label(group[0], telling), group) for group in by_key.values()]


def _label(run: Run, telling: Sequence[str]) -> str:
    """The model and what sets the group apart; a model that was not trained is called so in any case."""
    said = [f"{name} {run.options[name]}" for name in dict.fromkeys(["weights", *telling]) if name in run.options]
    return ", ".join([run.model, *said])


def tasks_of(runs: Sequence[Run]) -> list[str]:
    """The columns of the table: the papers' six if any of them was run, then the others."""
    known = list(dict.fromkeys(run.task for run in runs))
    six = list(SIX_TASKS) if any(task in SIX_TASKS for task in known) else []
    return [*six, *(task for task in known if task not in SIX_TASKS)]
