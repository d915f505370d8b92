"""The charts of one run, for its page and for its figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualview.comparison.result import NormPoint, Result
from dualview.metrics.sim_aou import noise_floor
from dualview.report.catalogue import (
    SETTING_NAMES,
    SIMILARITIES,
    accuracy_interval,
    given_weights,
    setting_title,
    shown,
)
from dualview.report.charts.profiles import Profile
from dualview.report.charts.spec import Chart, Series, Spec, any_known
from dualview.report.published import published_values

NORM_KEYS = {"sim_aou.raw": "sim_aou_raw", "sim_aou.normalised": "sim_aou_normalised", "sim_am.delta": "sim_am_delta"}
"""The similarities drawn against the update norm: key in the result file, and name in a `NormPoint`."""
KENDALL_FORMS = {
    "dual_v": "dual form of W_V",
    "dual_v_lr0": "W_V at lr 0",
    "dual_k": "dual form of W_K",
    "released": "as released (q·q)",
    "released_lr0": "q·q at lr 0",
}


def accuracy_chart(result: Result) -> Chart:
    """The settings' accuracies with their intervals, and the papers' on the same task."""
    task = result.task
    names = ("zsl", "icl", "ft", *given_weights(result))
    values = {name: value for name in names if (value := result.number(f"accuracy.{name}")) is not None}
    intervals = [accuracy_interval(result, name, value) or (None, None) for name, value in values.items()]
    papers = [published_values(task.name, f"accuracy.{name}") for name in values]
    sources = dict.fromkeys(source for found in papers for source in found)
    bars: Series = {
        "name": "accuracy",
        "values": list(values.values()),
        "lo": [low for low, _ in intervals],
        "hi": [high for _, high in intervals],
        "colours": [f"--{name}" if name in SETTING_NAMES else "--patch" for name in values],
    }
    spec: Spec = {
        "title": "Accuracy",
        "y": {"label": f"share of {task.n_queries} queries", "min": 0, "max": 1},
        "groups": [setting_title(name) for name in values],
        "series": [bars],
        "marks": [{"name": source, "values": [found.get(source) for found in papers]} for source in sources],
    }
    if task.labels:  # rows with their own choices have none in common
        spec["rules"] = [{"name": f"one of {len(task.labels)} labels", "value": 1 / len(task.labels)}]
    return Chart("bars", spec, "Whiskers: 95 % intervals, Wilson over queries.")


def profile_chart(profile: Profile) -> Chart:
    """Box plots over queries by layer, or the layers' means where no more is known."""
    title = SIMILARITIES[profile.metric.key]
    layers = list(range(profile.layers))
    spec: Spec = {
        "title": f"{title}, by layer",
        "x": {"label": "layer", "values": layers},
        "y": {"label": f"{title} (cosine)", "zero": True},
        "rules": [{"name": source, "value": value, "colour": "--fg"} for source, value in profile.papers.items()],
    }
    if profile.quantiles is None:
        flat = {"before fine-tuning": profile.before or (), "highest floor": profile.floor, "ceiling": profile.ceiling}
        colours = {"highest floor": "--floor", "ceiling": "--ceiling"}
        mean: Series = {"name": "mean over queries", "values": list(profile.mean), "colour": "--icl"}
        more: list[Series] = [
            {"name": name, "values": list(row), "dashed": True, "bare": True, "colour": colours.get(name, "--fg")}
            for name, row in flat.items()
            if any_known(row)
        ]
        spec["series"] = [mean, *more]
        return Chart("lines", spec, "Means over queries; floor and ceiling are those of all layers together.")
    spec["boxes"] = [
        {"label": i, "mean": mean, **{name: row[i] for name, row in profile.quantiles.items()}}
        for i, mean in enumerate(profile.mean)
    ]
    if profile.before is not None:
        spec["lines"] = [{"name": "before fine-tuning", "values": list(profile.before)}]
    if any_known(profile.floor):
        spec["floor"] = {"name": "highest floor", "values": profile.floor, "from": None}
    if any_known(profile.ceiling):
        spec["ceiling"] = {"name": "ceiling", "values": profile.ceiling, "from": profile.lowest_ceiling}
    return Chart("boxes", spec, "Boxes: quartiles over queries; whiskers: 5 to 95 %; diamonds: means.")


def demo_mass_chart(result: Result) -> Chart | None:
    mass = result.demo_mass
    if mass is None:
        return None
    spec: Spec = {
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
    """Kendall's tau of every form by layer; None where it was not measured."""
    parts = {form: getattr(result.kendall, form, None) for form in KENDALL_FORMS}
    found = {form: part.tau_token_per_layer for form, part in parts.items() if part is not None}
    if not found or result.kendall is None:
        return None
    papers = published_values(result.task.name, "kendall.released.tau_token")
    note = f"Means over the first {result.kendall.queries} queries; compare each form with itself at learning rate 0."
    spec: Spec = {
        "title": "Attention to training tokens, ICL against fine-tuning",
        "x": {"label": "layer", "values": list(range(max(map(len, found.values()))))},
        "y": {"label": "Kendall's tau-b"},
        "series": [
            {"name": KENDALL_FORMS[form], "values": row, "dashed": form.endswith("_lr0")} for form, row in found.items()
        ],
        "rules": [{"name": source, "value": value} for source, value in papers.items()],
    }
    return Chart("lines", spec, f"{note} The papers' values are of the released form." if papers else note)


def norm_points(result: Result) -> list[NormPoint]:
    """One point for every rule and learning rate of the grid; empty without the full controls."""
    return [point for point in result.norm_curve or () if point.update_norm is not None and point.update_norm > 0]


def norm_charts(
    points: Sequence[NormPoint], note: str, *, icl: float | None = None, joined: bool = True, more: str = ""
) -> list[Chart]:
    """Each similarity against the size of fine-tuning's update, a series for each rule.

    A similarity that is undefined throughout (SimAM of a one-layer model) has no series.

    icl       the size of ICL's own update
    joined    points of one run make a curve; those of several do not
    more      added to the titles
    """
    note += " Crossed: diverged or collapsed." if any(point.status != "ok" for point in points) else ""
    charts: list[Chart] = []
    for key, title in SIMILARITIES.items():
        if key not in NORM_KEYS:
            continue
        series = _by_rule(points, NORM_KEYS[key], joined=joined)
        if icl is not None and key == "sim_aou.normalised" and series:
            known = [point.update_norm for point in points if point.update_norm]
            sizes = [float(size) for size in np.geomspace(min(known), max(known), 16)]
            # Two independent random updates, one of ICL's size and one of each of these sizes.
            noise = [float(value) for value in noise_floor(np.full(len(sizes), icl), np.array(sizes))]
            series.append({"name": "noise alone", "x": sizes, "values": noise, "colour": "--muted", "bare": True})
        spec: Spec = {
            "title": f"{title}, by size of the update{more}",
            "x": {"label": "update norm of FT, relative", "values": [], "log": True},
            "y": {"label": "cosine", "zero": True},
            "series": series,
        }
        if icl is not None:
            spec["rules"] = [{"name": "ICL's own update norm", "x": icl, "colour": "--icl"}]
        charts.append(Chart("lines", spec, note))
    return charts


def _by_rule(points: Sequence[NormPoint], name: str, *, joined: bool) -> list[Series]:
    found: list[Series] = []
    # The first look of the cycle has ICL's colour.
    for place, rule in enumerate(dict.fromkeys(point.rule for point in points), start=1):
        own = sorted(
            (point.update_norm, value, point.status != "ok")
            for point in points
            if point.rule == rule and point.update_norm and (value := getattr(point, name)) is not None
        )
        if own:
            x, values, crossed = (list(column) for column in zip(*own, strict=True))
            one: Series = {"name": rule, "x": x, "values": values, "crossed": crossed, "look": place}
            found.append(one if joined else {**one, "points": True})
    return found


def run_norm_charts(result: Result) -> list[Chart]:
    points = norm_points(result)
    queries = points[0].queries if points else 0
    note = f"One point per learning rate, on the first {queries} queries; compare rules at equal size only."
    return norm_charts(points, note, icl=result.update_norm.icl)


def loss_charts(result: Result) -> list[Chart]:
    losses = result.ft.losses
    if not losses:
        return []
    spec: Spec = {
        "title": "Fine-tuning's loss, one demonstration per step",
        "x": {"label": "step", "values": list(range(1, len(losses) + 1))},
        "y": {"label": "mean cross-entropy"},
        "series": [{"name": "loss", "values": losses, "colour": "--ft"}],
    }
    note = "Each step is a different demonstration, so the loss need not fall from step to step."
    return [Chart("lines", spec, note)]


def run_charts(result: Result, found: Sequence[Profile]) -> list[Chart]:
    """Every chart of a run's page, in order, except the loss."""
    charts = [accuracy_chart(result), *(profile_chart(profile) for profile in found)]
    charts += [chart for chart in (demo_mass_chart(result), kendall_chart(result)) if chart is not None]
    return [*charts, *(chart for chart in run_norm_charts(result) if chart.spec.get("series"))]
