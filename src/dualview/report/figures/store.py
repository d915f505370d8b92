"""Figures over many runs: accuracy by task, similarity by layer, similarity against the size of the update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dualview.io.errors import UserError
from dualview.report.figures.curves import Curve, curves
from dualview.report.figures.run import norm_figure
from dualview.report.figures.style import (
    BLACK,
    SETTINGS,
    SMALL,
    dress,
    legend,
    new_figure,
    plain,
    short,
    small_print,
)
from dualview.report.overview import Group, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKS = ("D", "v")


def group_caption(group: Group) -> str:
    """What was run, and how many seeds each task has."""
    queries = sorted({run.n_queries for run in group.runs})
    shots = sorted({run.shots for run in group.runs})
    return (
        f"{group.label}; shots {_span(shots)}, n = {_span(queries)} queries; {_seeds(group)}. "
        "Means over draws; 95 % intervals: Student over draws, cut to the values a number can have."
    )


def _seeds(group: Group) -> str:
    """The number of seeds, task by task where they differ."""
    counts = {task: len(group.on(task)) for task in group.tasks}
    if len(set(counts.values())) == 1:
        each = next(iter(counts.values()))
        return f"{each} seed{'' if each == 1 else 's'} on every task"
    return f"number of seeds: {', '.join(f'{count} on {task}' for task, count in counts.items())}"


def _span(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def accuracy_by_task(group: Group) -> Figure:
    """Accuracy of the three settings on each task, means over seeds, with the papers' values."""
    tasks = group.tasks
    figure = new_figure(max(4.5, 1.6 + 0.95 * len(tasks)), 3.7)
    axes = figure.add_subplot()
    dress(axes, ylabel="accuracy")
    for index, bars in enumerate(group.accuracies()):
        how, shift = SETTINGS[bars.setting], (index - 1) * 0.27
        means = {i: mean for i, mean in enumerate(bars.means) if mean is not None}
        axes.bar(
            [i + shift for i in means],
            [mean.value for mean in means.values()],
            0.25,
            color=how.colour,
            hatch=how.hatch,
            edgecolor="white",
            linewidth=0,
            label=bars.name,
        )
        for i, mean in means.items():
            if mean.low is not None and mean.high is not None:
                whiskers = [[mean.value - mean.low], [mean.high - mean.value]]
                axes.errorbar(i + shift, mean.value, yerr=whiskers, color=BLACK, capsize=2.5, linewidth=1)
        for mark, (source, values) in zip(_MARKS, bars.papers.items(), strict=False):
            known = {i: value for i, value in enumerate(values) if value is not None}
            look: dict[str, Any] = {"marker": mark, "markersize": 4.5, "color": BLACK, "markeredgecolor": "white"}
            named = source if bars.setting == "zsl" else None
            axes.plot([i + shift for i in known], list(known.values()), linestyle="none", label=named, **look)
    axes.set_xticks(range(len(tasks)), [plain(short(task, 18)) for task in tasks], fontsize=SMALL + 1)
    axes.set_ylim(0, 1.02)
    legend(axes)
    small_print(figure, "Accuracy by task", group_caption(group))
    return figure


def similarity_by_layer(group: Group, key: str, title: str) -> Figure:
    """One similarity over layers, a curve for each task, with its interval over seeds."""
    series = {
        of.name: Curve(
            list(range(len(of.means))),
            of.values,
            *((of.low, of.high) if any(low is not None for low in of.low) else (None, None)),
        )
        for of in group.layered(key)
    }
    if not series:
        raise UserError(f"No run of {group.label} has {key} by layer.")
    figure = curves(series, f"{title}, by layer", "layer", "cosine", group_caption(group))
    figure.axes[0].set_ylim(*_room(series.values()))
    return figure


def _room(series: Iterable[Curve]) -> tuple[float, float]:
    """The range of the axis: all means, and as much of the bands as keeps the curves distinguishable."""
    drawn = list(series)
    means = [value for curve in drawn for value in curve.mean if value is not None]
    ends = [v for curve in drawn for row in (curve.lo, curve.hi) if row is not None for v in row if v is not None]
    low, high = min(means, default=0.0), max(means, default=1.0)
    most = max(2 * (high - low), 0.1 * max(abs(low), abs(high)), 1e-3)
    low, high = max(min([low, *ends]), low - most), min(max([high, *ends]), high + most)
    room = 0.04 * (high - low) or 0.05
    return low - room, high + room


def similarity_against_norm(runs: Sequence[Run]) -> Figure:
    """Each similarity against the size of fine-tuning's update, for every rule: one point per run."""
    points = [point for run in runs if (point := run.point) is not None]
    if not points:
        raise UserError("No run has an update norm to draw.")
    models = ", ".join(dict.fromkeys(run.model for run in runs))
    tasks = ", ".join(dict.fromkeys(run.task for run in runs))
    queries = _span(sorted({run.n_queries for run in runs}))
    note = (
        f"{models}; {tasks}; one point per run, {len(points)} runs, n = {queries} queries each; "
        "crossed: diverged or collapsed."
    )
    return norm_figure(points, "Similarity against the size of the update, by rule", note, joined=False)
