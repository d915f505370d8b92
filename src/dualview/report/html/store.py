"""The report of many runs: the numbers by task next to the papers', verdicts, figures, and every run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dualview.comparison.result import NormPoint, Result
from dualview.io.assets import about_model
from dualview.io.atomic import write_text
from dualview.io.display import TextTable
from dualview.io.errors import UserError
from dualview.metrics.measured import VerdictPart
from dualview.report.catalogue import NUMBERS, SIMILARITIES, Number, shown
from dualview.report.charts.run import NORM_KEYS, norm_charts
from dualview.report.charts.store import group_charts
from dualview.report.figures.store import (
    accuracy_by_task,
    group_caption,
    similarity_against_norm,
    similarity_by_layer,
)
from dualview.report.figures.style import save
from dualview.report.html.page import render_page
from dualview.report.overview import Mean, RunGroup, RunSummary, groups_of, ordered, tasks_of
from dualview.report.published import published
from dualview.report.tables import levels_table, span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPERS = ("Dai et al., 1.3B", "Dai et al., 2.7B", "Deutch et al., 1.3B", "Deutch et al., 1.3B, layer-causal")
DRAWN = 8
"""Groups that get charts."""
TABLED = 60
"""Groups that get a table of their own."""
LISTED = 2000
"""Runs in the list of every run."""
POINTS = 2000
"""Points of one scatter plot."""
_CONTENTS = {
    "verdicts": "Verdicts",
    "table": "By task",
    "figures": "Figures",
    "norms": "Size of the update",
    "runs": "Every run",
}


def render_store(results: Iterable[Result | RunSummary], title: str = "Many runs") -> str:
    """The report of many runs as HTML."""
    runs = ordered(result if isinstance(result, RunSummary) else RunSummary.of(result) for result in results)
    if not runs:
        raise UserError("There are no finished runs to report.")
    groups, tasks = groups_of(runs), tasks_of(runs)
    figures = [chart for group in groups[:DRAWN] for chart in group_charts(group)]
    points = [point for run in runs if (point := run.point) is not None]
    grid = [point for run in runs for point in run.points]
    per_run = f"One point per run; compare rules at equal size only.{_first(points)}"
    per_rate = f"One point per learning rate of a run.{_first(grid)}"
    norms = norm_charts(points[:POINTS], per_run, joined=False)
    norms += norm_charts(grid[:POINTS], per_rate, joined=False, more=", over the learning rates")
    norms = [chart for chart in norms if chart.spec.get("series")]
    return render_page(
        "store.html",
        title,
        {"charts": [chart.to_json() for chart in (*figures, *norms)], "prompts": None},
        lines=[
            f"{len(runs)} runs, {len(groups)} group{'s' if len(groups) != 1 else ''} of equal options",
            f"models: {', '.join(dict.fromkeys(run.model for run in runs))}",
            f"tasks: {', '.join(dict.fromkeys(run.task for run in runs))}",
            *(about for model in dict.fromkeys(run.model for run in runs) if (about := about_model(model))),
        ],
        contents=_CONTENTS,
        groups=groups,
        tabled=groups[:TABLED],
        over={group.label: _over_draws(group) for group in groups[:TABLED]},
        drawn=DRAWN,
        tasks=tasks,
        caption=group_caption,
        lines_by_task=lines_by_task,
        catalogue=NUMBERS,
        figures=figures,
        norms=norms,
        runs=runs_table(runs),
    )


@dataclass(frozen=True)
class OverDraws:
    """The verdict over the draws of one task, with its levels."""

    verdict: VerdictPart
    levels: TextTable | None

    @classmethod
    def of(cls, verdict: VerdictPart, where: str) -> OverDraws:
        levels = levels_table(verdict)
        label = f"The verdict over draws, level by level: {where}"
        return cls(verdict, None if levels is None else replace(levels, label=label))


def _over_draws(group: RunGroup) -> dict[str, OverDraws]:
    """By task; a task with a single draw has none."""
    found = {task: group.over_draws(task) for task in group.tasks}
    return {task: OverDraws.of(over, f"{group.label}, {task}") for task, over in found.items() if over is not None}


def _first(points: Sequence[NormPoint]) -> str:
    return f" The first {POINTS} of {len(points)} points." if len(points) > POINTS else ""


def store_report(results: Iterable[Result | RunSummary], path: Path, *, title: str = "Many runs") -> Path:
    """Write the report of many runs, whole or not at all."""
    return write_text(path, render_store(results, title))


def write_store_figures(runs: Sequence[RunSummary], folder: Path) -> list[Path]:
    """Write the figures of many runs as PDF, SVG and PNG into a folder, named after the group if there are several."""
    figures: dict[str, Figure] = {}
    groups = groups_of(ordered(runs))
    for name, group in zip(_file_names(groups), groups, strict=True):
        figures[f"accuracy{name}"] = accuracy_by_task(group)
        for key in NORM_KEYS:
            if any(group.layers(task, key) for task in group.tasks):
                figures[f"{key.replace('.', '_')}{name}"] = similarity_by_layer(group, key, SIMILARITIES[key])
    if any(run.point is not None for run in runs):
        figures["update_norm"] = similarity_against_norm(runs)
    return [path for name, figure in figures.items() for path in save(figure, folder / name)]


def _file_names(groups: Sequence[RunGroup]) -> list[str]:
    """What to append to a figure's name: the model and the group's own options; nothing if there is one group."""
    if len(groups) == 1:
        return [""]
    names: list[str] = []
    for group in groups:
        model, *more = group.label.split(", ")
        plain = re.sub(r"[^A-Za-z0-9_]+", "-", " ".join([Path(model).name, *more])).strip("-")[:80]
        again = sum(name == f"-{plain}" or name.startswith(f"-{plain}-again") for name in names)
        names.append(f"-{plain}-again{again}" if again else f"-{plain}")
    return names


@dataclass(frozen=True)
class Cell:
    """A number with small print under it."""

    value: str = ""
    small: Sequence[str] = ()


@dataclass(frozen=True)
class Line:
    """One line of the table by task: a number of ours, or a paper's (and chance) under it."""

    name: str
    cells: Sequence[Cell]
    own: bool = False


def lines_by_task(group: RunGroup, tasks: Sequence[str]) -> list[Line]:
    """Every number on every task: the mean over seeds with its interval, the papers' values under it.

    A number that some seeds or tasks lack (Rec2FTP where fine-tuning fixed nothing) shows how many have it.
    """
    lines: list[Line] = []
    for number in NUMBERS:
        means = [group.mean(task, number.key) for task in tasks]
        if all(mean.value is None for mean in means):
            continue
        lines.append(Line(number.name, _own_cells(group, tasks, means, number), own=True))
        if number.key == "rec2ftp.value":
            chances = [group.mean(task, "rec2ftp.chance", where=number.key) for task in tasks]
            lines.append(Line("chance", _own_cells(group, tasks, chances, number)))
        lines += _papers(number, tasks)
    return lines


def _own_cells(group: RunGroup, tasks: Sequence[str], means: Sequence[Mean], number: Number) -> list[Cell]:
    cells = [_mean_cell(mean, number, len(group.on(task))) for task, mean in zip(tasks, means, strict=True)]
    return [*cells, _over_tasks([mean.value for mean in means], number)]


def _mean_cell(mean: Mean, number: Number, seeds: int) -> Cell:
    if mean.value is None:
        return Cell()
    interval = [span((mean.low, mean.high), number.style)] if mean.low is not None and mean.high is not None else []
    fewer = [f"{mean.n} of {seeds} seeds"] if mean.n < seeds else []
    return Cell(shown(mean.value, number.style), [*interval, *fewer])


def _over_tasks(values: Sequence[float | None], number: Number) -> Cell:
    """The mean over tasks; where some lack the number, over how many."""
    known = [value for value in values if value is not None]
    if not known:
        return Cell()
    fewer = [f"of {len(known)} task{'' if len(known) == 1 else 's'}"] if len(known) < len(values) else []
    return Cell(shown(sum(known) / len(known), number.style), fewer)


def _papers(number: Number, tasks: Sequence[str]) -> list[Line]:
    lines: list[Line] = []
    keys = {number.key: ""} | ({"rec2ftp.chance": ", chance"} if number.key == "rec2ftp.value" else {})
    for source in PAPERS:
        for key, what in keys.items():
            values = [published(task).get(source, {}).get(key) for task in tasks]
            if any(value is not None for value in values):
                cells = [Cell() if value is None else Cell(shown(value, number.style)) for value in values]
                lines.append(Line(f"{source}{what}", [*cells, _over_tasks(values, number)]))
    return lines


def runs_table(runs: Sequence[RunSummary]) -> TextTable:
    """The first runs, one per line."""
    shown_keys = ("accuracy.zsl", "accuracy.icl", "accuracy.ft", "rec2ftp.value", "sim_aou.raw", "sim_am.delta")
    numbers = [number for number in NUMBERS if number.key in shown_keys]
    head = ["model", "task", "seed", "rule", "lr", *(number.name for number in numbers), "verdict"]
    rows = [
        [
            run.model,
            run.task,
            "given" if run.seed is None else str(run.seed),
            run.rule if run.status == "ok" else f"{run.rule}, {run.status}",
            f"{run.lr:g}",
            *(shown(run.numbers[number.key], number.style) for number in numbers),
            "none" if run.verdict is None else run.verdict.overall,
        ]
        for run in runs[:LISTED]
    ]
    note = f"The first {LISTED} of {len(runs)}; `dualview export` gives all." if len(runs) > LISTED else ""
    return TextTable("Every run", head, rows, range(4, 5 + len(numbers)), note)
