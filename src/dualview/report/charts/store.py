"""The charts of many runs, for their page and for their figures."""

from __future__ import annotations

from collections.abc import Sequence

from dualview.report.catalogue import SETTING_NAMES, SIMILARITIES
from dualview.report.charts.run import NORM_KEYS
from dualview.report.charts.spec import Chart, Mark, Series, Spec
from dualview.report.overview import Mean, RunGroup
from dualview.report.published import published_values

PAPERS = ("Dai et al., 1.3B", "Dai et al., 2.7B")
"""The papers whose accuracies are drawn with a group's."""


def group_charts(group: RunGroup) -> list[Chart]:
    """Accuracy by task, and each similarity by layer."""
    layered = (layer_chart(group, key) for key in SIMILARITIES if key in NORM_KEYS)
    return [accuracy_by_task_chart(group), *(chart for chart in layered if chart is not None)]


def accuracy_by_task_chart(group: RunGroup) -> Chart:
    """The three settings on every task, with the papers' values."""
    series: list[Series] = []
    marks: list[Mark] = []
    for setting in ("zsl", "icl", "ft"):
        key, name = f"accuracy.{setting}", SETTING_NAMES[setting]
        series.append({**_series(name, [group.mean(task, key) for task in group.tasks]), "colour": f"--{setting}"})
        for source in PAPERS:
            values = [published_values(task, key).get(source) for task in group.tasks]
            if any(value is not None for value in values):
                marks.append({"name": source, "values": values, "series": name})
    spec: Spec = {
        "title": f"Accuracy by task: {group.label}",
        "y": {"label": "accuracy", "min": 0, "max": 1},
        "groups": group.tasks,
        "series": series,
        "marks": marks,
    }
    note = "Means over draws; whiskers: 95 % intervals, Student over draws, cut at 0 and 1"
    return Chart("bars", spec, f"{note}; marks: the papers' models." if marks else f"{note}.")


def layer_chart(group: RunGroup, key: str) -> Chart | None:
    """One similarity over layers, a line for each task that has it; None if no task has."""
    found = {task: means for task in group.tasks if (means := group.layers(task, key))}
    series: list[Series] = [{**_series(task, means), "x": list(range(len(means)))} for task, means in found.items()]
    if not series:
        return None
    spec: Spec = {
        "title": f"{SIMILARITIES[key]}, by layer: {group.label}",
        "x": {"label": "layer", "values": []},
        "y": {"label": "cosine"},
        "series": series,
    }
    return Chart("lines", spec, "Means over draws; bands: 95 % intervals, Student over draws, cut at ±1.")


def _series(name: str, means: Sequence[Mean]) -> Series:
    values, lo, hi = ([getattr(mean, part) for mean in means] for part in ("value", "low", "high"))
    return {"name": name, "values": values, "lo": lo, "hi": hi}
