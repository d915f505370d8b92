"""The report's charts as plain data, for `static/charts.js` to draw: what the figures show, with values on hover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dualview.comparison.result import Result
from dualview.report.catalogue import at
from dualview.report.chart_data import (
    KENDALL_FORMS,
    NORM_KEYS,
    TITLES,
    NormPoint,
    accuracies,
    kendall_layers,
    n_candidates,
    noise_at,
    norm_points,
    norm_series,
)
from dualview.report.overview import Group
from dualview.report.profiles import Profile
from dualview.report.published import published_values

COLOURS = {"zsl": "--zsl", "icl": "--icl", "ft": "--ft", "patch": "--patch"}


@dataclass(frozen=True)
class Chart:
    """One chart: which function draws it, and what; `said` is the sentence beneath it."""

    kind: Literal["lines", "bars", "boxes", "heatmap"]
    spec: Mapping[str, Any]
    said: str = ""

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
    return Chart("bars", spec, "Whiskers: 95 % intervals over queries (Wilson).")


def profile_chart(profile: Profile) -> Chart:
    """Box plots over queries by layer, or the layers' means where nothing more is known."""
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
    mass = at(result.to_json(), "demo_mass")
    if mass is None:
        return None
    spec = {
        "title": "λ: softmax mass on the demonstrations",
        "rows": list(range(len(mass["per_head"]))),
        "cols": list(range(len(mass["per_head"][0]))),
        "values": mass["per_head"],
        "rowLabel": "layer",
        "colLabel": "head",
        "unit": "",
        "min": 0,
        "max": 1,
    }
    said = f"Means over queries; 0 none of the attention, 1 all of it; mean of all {mass['mean']:.3f}."
    return Chart("heatmap", spec, said)


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
    return Chart("lines", spec, "Each form is to be read against itself at a learning rate of 0.")


def norm_charts(points: Sequence[NormPoint], said: str, *, icl: float | None = None) -> list[Chart]:
    """Each similarity against the size of fine-tuning's update, a series for each rule; `icl`: ICL's own size."""
    charts: list[Chart] = []
    for key in NORM_KEYS:
        series: list[dict[str, Any]] = [
            {"name": one.rule, "x": one.norms, "values": list(one.values), "crossed": one.crossed, "look": one.index}
            for one in norm_series(points, key)
        ]
        if not series:
            continue
        if icl is not None and key == "sim_aou.normalised":
            sizes = sorted({point.norm for point in points})
            noise = {"name": "noise alone", "x": sizes, "values": noise_at(sizes, icl), "colour": "--muted"}
            series.append({**noise, "bare": True})
        spec: dict[str, Any] = {
            "title": f"{TITLES[key]}, by size of the update",
            "x": {"label": "update norm of FT, relative", "values": [], "log": True},
            "y": {"label": "cosine"},
            "series": series,
        }
        if icl is not None:
            spec["rules"] = [{"name": "ICL's own update norm", "x": icl, "colour": "--icl"}]
        crossed = any(any(one.get("crossed", ())) for one in series)
        charts.append(Chart("lines", spec, f"{said} Crossed: diverged or collapsed." if crossed else said))
    return charts


def loss_chart(result: Result) -> Chart | None:
    losses = at(result.to_json(), "ft.losses")
    if not losses:
        return None
    spec = {
        "title": "Fine-tuning's loss, a demonstration a step",
        "x": {"label": "step", "values": list(range(1, len(losses) + 1))},
        "y": {"label": "mean cross-entropy"},
        "series": [{"name": "loss", "values": losses, "colour": "--ft"}],
    }
    return Chart("lines", spec, "Each step is another demonstration, so the loss need not fall from step to step.")


def run_charts(result: Result, found: Sequence[Profile]) -> list[Chart]:
    """Every chart of a run's report, in order, but that of its loss."""
    said = "A point a learning rate, on the first queries; rules compare at equal size only."
    norms = norm_charts(norm_points(result), said, icl=result.update_norm.icl)
    charts = [accuracy_chart(result), *(profile_chart(profile) for profile in found)]
    return [*charts, *(chart for chart in (demo_mass_chart(result), kendall_chart(result)) if chart), *norms]


# ---------------------------------------------------------------------------------------------------- of many runs


def group_charts(group: Group) -> list[Chart]:
    """Accuracy by task, and each similarity by layer."""
    charts = [_accuracy_by_task(group)]
    for key in NORM_KEYS:
        series: list[dict[str, Any]] = [
            {"name": of.task, "x": list(range(len(of.means))), "values": of.values, "lo": of.low, "hi": of.high}
            for of in group.layered(key)
        ]
        if series:
            spec = {
                "title": f"{TITLES[key]}, by layer: {group.label}",
                "x": {"label": "layer", "values": []},
                "y": {"label": "cosine"},
                "series": series,
            }
            said = "Means over seeds; bands: 95 % intervals over seeds, cut at ±1."
            charts.append(Chart("lines", spec, said))
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
                "values": [None if mean is None else mean.value for mean in bars.means],
                "lo": [None if mean is None else mean.low for mean in bars.means],
                "hi": [None if mean is None else mean.high for mean in bars.means],
            }
            for bars in found
        ],
        "marks": [
            {"name": source, "values": list(values), "series": bars.name}
            for bars in found
            for source, values in bars.papers.items()
        ],
    }
    said = "Means over seeds; whiskers: 95 % intervals over seeds, cut at 0 and 1; marks: the papers' models."
    return Chart("bars", spec, said)


def scattered(chart: Chart, more: str = "") -> Chart:
    """The same chart with points that are not joined: they are runs, not a curve."""
    spec = dict(chart.spec)
    spec["series"] = [{**one, "points": True} for one in spec["series"]]
    spec["title"] = f"{spec['title']}, {more}" if more else spec["title"]
    return Chart(chart.kind, spec, chart.said)
