"""The report's charts as plain data for `static/charts.js`: what the figures show, with values on hover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dualview.comparison.result import NormPoint, Result
from dualview.report.catalogue import shown
from dualview.report.chart_data import (
    KENDALL_FORMS,
    NORM_KEYS,
    TITLES,
    Profile,
    accuracies,
    kendall_layers,
    n_candidates,
    noise_at,
    norm_points,
    norm_series,
)
from dualview.report.overview import Group
from dualview.report.published import published_values

COLOURS = {"zsl": "--zsl", "icl": "--icl", "ft": "--ft", "patch": "--patch"}


@dataclass(frozen=True)
class Chart:
    """One chart: the function that draws it, its data, and the sentence under it."""

    kind: Literal["lines", "bars", "boxes", "heatmap"]
    spec: Mapping[str, Any]
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "spec": dict(self.spec)}


def accuracy_chart(result: Result) -> Chart:
    shares = accuracies(result)
    sources = list(dict.fromkeys(source for share in shares for source in share.papers))
    spec: dict[str, Any] = {
        "title": "Accuracy",
        "y": {"label": f"share of {result.task.n_queries} queries", "min": 0, "max": 1},
        "groups": [share.name for share in shares],
        "series": [
            {
                "name": "accuracy",
                "values": [share.value for share in shares],
                "lo": [share.low for share in shares],
                "hi": [share.high for share in shares],
                "colours": [COLOURS[share.setting] for share in shares],
            }
        ],
        "marks": [{"name": s, "values": [share.papers.get(s) for share in shares]} for s in sources],
    }
    if labels := n_candidates(result):
        spec["rules"] = [{"name": f"one of {labels} labels", "value": 1 / labels}]
    return Chart("bars", spec, "Whiskers: 95 % intervals, Wilson over queries.")


def profile_chart(profile: Profile) -> Chart:
    """Box plots over queries by layer, or the layers' means where no more is known."""
    marks = [{"name": source, "value": value} for source, value in profile.papers.items()]
    title = f"{profile.metric.title}, by layer"
    if profile.quantiles is not None:
        boxes = [
            {"label": i, "mean": mean, **{name: row[i] for name, row in profile.quantiles.items()}}
            for i, mean in enumerate(profile.mean)
        ]
        layers: dict[str, Any] = {"label": "layer"}
        spec: dict[str, Any] = {"title": title, "x": layers, "y": {"label": "cosine"}, "boxes": boxes, "marks": marks}
        if profile.before is not None:
            spec["lines"] = [{"name": "before fine-tuning", "values": list(profile.before)}]
        if _any(profile.floor):
            spec["floor"] = {"name": "highest floor", "values": profile.floor}
        if _any(profile.ceiling):
            spec["ceiling"] = {"name": "ceiling", "values": profile.ceiling, "from": profile.lowest_ceiling}
        return Chart("boxes", spec, "Boxes: quartiles over queries; whiskers: 5 to 95 %; diamonds: means.")
    flat = {"before fine-tuning": profile.before or (), "highest floor": profile.floor, "ceiling": profile.ceiling}
    flat |= {source: [value] * profile.layers for source, value in profile.papers.items()}
    colours = {"highest floor": "--floor", "ceiling": "--ceiling"}
    series: list[dict[str, Any]] = [{"name": "mean over queries", "values": list(profile.mean), "colour": "--icl"}]
    series += [
        {"name": name, "values": list(values), "dashed": True, "colour": colours.get(name, "--fg")}
        for name, values in flat.items()
        if _any(values)
    ]
    layers = {"label": "layer", "values": list(range(profile.layers))}
    spec = {"title": title, "x": layers, "y": {"label": "cosine"}, "series": series}
    return Chart("lines", spec, "Means over queries; floor and ceiling are those of all layers together.")


def _any(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def demo_mass_chart(result: Result) -> Chart | None:
    mass = result.demo_mass
    if mass is None:
        return None
    spec = {
        "title": "λ: softmax mass on the demonstrations",
        "rows": list(range(len(mass.per_head))),
        "cols": list(range(len(mass.per_head[0]))),
        "values": mass.per_head,
        "rowLabel": "layer",
        "colLabel": "head",
        "unit": "",
        "min": 0,
        "max": 1,
    }
    note = f"Means over queries; 0: none of the attention, 1: all of it; mean of all {shown(mass.mean)}."
    return Chart("heatmap", spec, note)


def kendall_chart(result: Result) -> Chart | None:
    found = kendall_layers(result)
    if not found:
        return None
    layers = list(range(max(len(row) for row in found.values())))
    series = [
        {"name": KENDALL_FORMS[form], "values": row, "dashed": form.endswith("_lr0")} for form, row in found.items()
    ]
    series += [
        {"name": f"{source}, as released", "values": [value] * len(layers), "dashed": True}
        for source, value in published_values(result.task.name, "kendall.released.tau_token").items()
    ]
    spec = {
        "title": "Attention to training tokens, ICL against fine-tuning",
        "x": {"label": "layer", "values": layers},
        "y": {"label": "Kendall's tau-b"},
        "series": series,
    }
    return Chart("lines", spec, "Compare each form with itself at a learning rate of 0.")


def norm_charts(
    points: Sequence[NormPoint], note: str, *, icl: float | None = None, joined: bool = True, more: str = ""
) -> list[Chart]:
    """Each similarity against the size of fine-tuning's update, a series for each rule.

    icl       the size of ICL's own update
    joined    points of one run make a curve; those of several do not
    more      added to the titles
    """
    charts: list[Chart] = []
    for key in NORM_KEYS:
        series: list[dict[str, Any]] = [
            {"name": one.rule, "x": one.norms, "values": one.values, "crossed": one.crossed, "look": one.index}
            | ({} if joined else {"points": True})
            for one in norm_series(points, key)
        ]
        if not series:
            continue
        if icl is not None and key == "sim_aou.normalised":
            sizes = sorted({point.update_norm for point in points if point.update_norm})
            noise = {"name": "noise alone", "x": sizes, "values": noise_at(sizes, icl), "colour": "--muted"}
            series.append({**noise, "bare": True})
        spec: dict[str, Any] = {
            "title": f"{TITLES[key]}, by size of the update{more}",
            "x": {"label": "update norm of FT, relative", "values": [], "log": True},
            "y": {"label": "cosine"},
            "series": series,
        }
        if icl is not None:
            spec["rules"] = [{"name": "ICL's own update norm", "x": icl, "colour": "--icl"}]
        crossed = any(any(one.get("crossed", ())) for one in series)
        charts.append(Chart("lines", spec, f"{note} Crossed: diverged or collapsed." if crossed else note))
    return charts


def loss_charts(result: Result) -> list[Chart]:
    losses = result.ft.losses
    if not losses:
        return []
    spec = {
        "title": "Fine-tuning's loss, one demonstration per step",
        "x": {"label": "step", "values": list(range(1, len(losses) + 1))},
        "y": {"label": "mean cross-entropy"},
        "series": [{"name": "loss", "values": losses, "colour": "--ft"}],
    }
    note = "Each step is a different demonstration, so the loss need not fall from step to step."
    return [Chart("lines", spec, note)]


def run_charts(result: Result, found: Sequence[Profile]) -> list[Chart]:
    """Every chart of a run's report, in order, except the loss."""
    note = "One point per learning rate, on the first queries; compare rules at equal size only."
    norms = norm_charts(norm_points(result), note, icl=result.update_norm.icl)
    charts = [accuracy_chart(result), *(profile_chart(profile) for profile in found)]
    return [*charts, *(chart for chart in (demo_mass_chart(result), kendall_chart(result)) if chart), *norms]


# ---------------------------------------------------------------------------------------------------- of many runs


def group_charts(group: Group) -> list[Chart]:
    """Accuracy by task, and each similarity by layer."""
    charts = [_accuracy_by_task(group)]
    for key in NORM_KEYS:
        series: list[dict[str, Any]] = [
            {"name": of.name, "x": list(range(len(of.means))), "values": of.values, "lo": of.low, "hi": of.high}
            for of in group.layered(key)
        ]
        if series:
            spec = {
                "title": f"{TITLES[key]}, by layer: {group.label}",
                "x": {"label": "layer", "values": []},
                "y": {"label": "cosine"},
                "series": series,
            }
            note = "Means over draws; bands: 95 % intervals, Student over draws, cut at ±1."
            charts.append(Chart("lines", spec, note))
    return charts


def _accuracy_by_task(group: Group) -> Chart:
    found = group.accuracies()
    spec = {
        "title": f"Accuracy by task: {group.label}",
        "y": {"label": "accuracy", "min": 0, "max": 1},
        "groups": group.tasks,
        "series": [
            {
                "name": bars.name,
                "colour": COLOURS[bars.setting],
                "values": bars.values,
                "lo": bars.low,
                "hi": bars.high,
            }
            for bars in found
        ],
        "marks": [
            {"name": source, "values": list(values), "series": bars.name}
            for bars in found
            for source, values in bars.papers.items()
        ],
    }
    note = "Means over draws; whiskers: 95 % intervals, Student over draws, cut at 0 and 1; marks: the papers' models."
    return Chart("bars", spec, note)
