"""Figures over many runs: accuracy by task, similarity by layer, similarity against the size of the update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dualview.io.errors import UserError
from dualview.report.charts.run import norm_charts
from dualview.report.charts.spec import Series
from dualview.report.charts.store import accuracy_by_task_chart, layer_chart
from dualview.report.figures.draw import draw
from dualview.report.figures.run import NORM_SIZE, NORM_TITLES
from dualview.report.overview import RunGroup, RunSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def group_caption(group: RunGroup) -> str:
    """What was run, and how many seeds each task has."""
    queries = sorted({run.n_queries for run in group.runs})
    shots = sorted({run.shots for run in group.runs})
    return (
        f"{group.label}; shots {_span(shots)}, n = {_span(queries)} queries; {_seeds(group)}. "
        "Means over draws; 95 % intervals: Student over draws, cut to the values a number can have."
    )


def _seeds(group: RunGroup) -> str:
    """The number of seeds, task by task where they differ."""
    counts = {task: len(group.on(task)) for task in group.tasks}
    if len(set(counts.values())) == 1:
        each = next(iter(counts.values()))
        return f"{each} seed{'' if each == 1 else 's'} on every task"
    return f"number of seeds: {', '.join(f'{count} on {task}' for task, count in counts.items())}"


def _span(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def accuracy_by_task(group: RunGroup) -> Figure:
    """Accuracy of the three settings on each task, means over seeds, with the papers' values."""
    size = (max(4.5, 1.6 + 0.95 * len(group.tasks)), 3.7)
    return draw([accuracy_by_task_chart(group)], "Accuracy by task", group_caption(group), size)


def similarity_by_layer(group: RunGroup, key: str, title: str) -> Figure:
    """One similarity over layers, a curve for each task, with its interval over seeds."""
    chart = layer_chart(group, key)
    if chart is None:
        raise UserError(f"No run of {group.label} has {key} by layer.")
    figure = draw([chart], f"{title}, by layer", group_caption(group), (6.4, 3.9))
    figure.axes[0].set_ylim(*_room(chart.spec.get("series", ())))
    return figure


def _room(series: Iterable[Series]) -> tuple[float, float]:
    """The range of the axis: all means, and as much of the bands as keeps the curves distinguishable."""
    drawn = list(series)
    means = [value for one in drawn for value in one["values"] if value is not None]
    rows = [row for one in drawn for row in (one.get("lo"), one.get("hi")) if row is not None]
    ends = [value for row in rows for value in row if value is not None]
    low, high = min(means, default=0.0), max(means, default=1.0)
    most = max(2 * (high - low), 0.1 * max(abs(low), abs(high)), 1e-3)
    low, high = max(min([low, *ends]), low - most), min(max([high, *ends]), high + most)
    room = 0.04 * (high - low) or 0.05
    return low - room, high + room


def similarity_against_norm(runs: Sequence[RunSummary]) -> Figure:
    """Each similarity against the size of fine-tuning's update, for every rule: one point per run."""
    points = [point for run in runs if (point := run.point) is not None]
    if not points:
        raise UserError("No run has an update norm to draw.")
    models = ", ".join(dict.fromkeys(run.model for run in runs))
    tasks = ", ".join(dict.fromkeys(run.task for run in runs))
    queries = _span(sorted({run.n_queries for run in runs}))
    note = f"{models}; {tasks}; one point per run, {len(points)} runs, n = {queries} queries each."
    charts = norm_charts(points, note, joined=False)
    title = "Similarity against the size of the update, by rule"
    return draw(charts, title, charts[0].note, NORM_SIZE, across=NORM_TITLES)
