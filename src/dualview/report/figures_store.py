"""Figures over many runs: accuracy by task, similarity by layer, similarity against the size of the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dualview.errors import UserError
from dualview.report.extracts import NormPoint
from dualview.report.figures import norm_figure
from dualview.report.figures_lab import Curve, curves
from dualview.report.figures_style import (
    BLACK,
    NAMES,
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
from dualview.report.published import published_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAPERS = (("Dai et al., 1.3B", "D"), ("Dai et al., 2.7B", "v"))


def group_caption(group: Group) -> str:
    """What was run, and how many seeds each task has."""
    seeds = ", ".join(f"{task} {len(group.on(task))}" for task in group.tasks)
    queries = sorted({run.n_queries for run in group.runs})
    shots = sorted({run.shots for run in group.runs})
    return (
        f"{group.label}; shots {_span(shots)}, n = {_span(queries)} queries; seeds a task: {seeds}. "
        "Means over seeds; intervals: 95 %, Student's, over seeds."
    )


def _span(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def accuracy_by_task(group: Group) -> Figure:
    """Accuracy of the three settings on each task, means over seeds, with the papers' values."""
    tasks = group.tasks
    figure = new_figure(max(4.5, 1.6 + 0.95 * len(tasks)), 3.7)
    axes = figure.add_subplot()
    dress(axes, ylabel="accuracy")
    for index, (setting, how) in enumerate(SETTINGS.items()):
        key, aside = f"accuracy.{setting}", (index - 1) * 0.27
        means = {i: mean for i, task in enumerate(tasks) if (mean := group.mean(task, key)) is not None}
        axes.bar(
            [i + aside for i in means],
            [mean.value for mean in means.values()],
            0.25,
            color=how.colour,
            hatch=how.hatch,
            edgecolor="white",
            linewidth=0,
            label=NAMES[setting],
        )
        for i, mean in means.items():
            if mean.low is not None and mean.high is not None:
                whiskers = [[mean.value - mean.low], [mean.high - mean.value]]
                axes.errorbar(i + aside, mean.value, yerr=whiskers, color=BLACK, capsize=2.5, linewidth=1)
        for source, mark in _PAPERS:
            known = {i: published_values(task, key).get(source) for i, task in enumerate(tasks)}
            told = {i: value for i, value in known.items() if value is not None}
            look: dict[str, Any] = {"marker": mark, "markersize": 4.5, "color": BLACK, "markeredgecolor": "white"}
            named = source if told and setting == "zsl" else None
            axes.plot([i + aside for i in told], list(told.values()), linestyle="none", label=named, **look)
    axes.set_xticks(range(len(tasks)), [plain(short(task, 18)) for task in tasks], fontsize=SMALL + 1)
    axes.set_ylim(0, 1.02)
    legend(axes)
    small_print(figure, "Accuracy by task", group_caption(group))
    return figure


def similarity_by_layer(group: Group, key: str, title: str) -> Figure:
    """One similarity over layers, a curve for each task, with its interval over seeds."""
    series: dict[str, Curve] = {}
    for task in group.tasks:
        means = group.layers(task, key)
        if means:
            banded = any(mean is not None and mean.low is not None for mean in means)
            series[task] = Curve(
                list(range(len(means))),
                [None if mean is None else mean.value for mean in means],
                [None if mean is None else mean.low for mean in means] if banded else None,
                [None if mean is None else mean.high for mean in means] if banded else None,
            )
    if not series:
        raise UserError(f"No run of {group.label} has {key} by layer.")
    return curves(series, f"{title}, by layer", "layer", "cosine", group_caption(group))


def similarity_against_norm(runs: Sequence[Run]) -> Figure:
    """Each similarity against the size of fine-tuning's update, for every rule: one point a run."""
    points: list[NormPoint] = [point for run in runs if (point := run.point) is not None]
    if not points:
        raise UserError("No run has an update norm to draw.")
    models = ", ".join(dict.fromkeys(run.model for run in runs))
    tasks = ", ".join(dict.fromkeys(run.task for run in runs))
    said = f"{models}; {tasks}; a point a run, {len(points)} runs; crossed: diverged or collapsed."
    return norm_figure(points, "Similarity against the size of the update, by rule", said)
