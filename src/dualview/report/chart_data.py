"""The series that both the figures (matplotlib) and the report's charts draw, taken from a result once for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dualview.comparison.result import NormPoint, Result
from dualview.metrics.controls import PerLayer as LayerSpread
from dualview.metrics.measured import LayerBounds, Measured
from dualview.metrics.sim_aou import noise_floor
from dualview.metrics.statistics import wilson_interval
from dualview.metrics.summary import compute_metrics
from dualview.records import Records
from dualview.report.published import published_values

TITLES = {
    "sim_aou.raw": "SimAOU, raw",
    "sim_aou.normalised": "SimAOU, normalised",
    "sim_am.delta": "SimAM, delta",
    "sim_am.after": "SimAM, after",
}
"""The name of each similarity, by its key in the result file."""
SETTING_NAMES = {"zsl": "zero-shot", "icl": "in-context", "ft": "fine-tuned", "patch": "patched"}


def per_layer(measured: Measured, key: str) -> list[float | None] | None:
    """The layers behind a similarity, by its key."""
    part, name = key.split(".")
    return getattr(getattr(measured, part), f"{name}_per_layer")


# ---------------------------------------------------------------------------------------------------------- accuracy


@dataclass(frozen=True)
class Share:
    """The accuracy of one setting, with its 95 % interval (Wilson over queries) and the published values."""

    setting: str
    value: float
    low: float
    high: float
    papers: Mapping[str, float]

    @property
    def name(self) -> str:
        return SETTING_NAMES[self.setting]


def accuracies(result: Result) -> list[Share]:
    """The settings' accuracies: zero-shot, in-context, fine-tuned and, where the run has a patch, patched."""
    shares: list[Share] = []
    n = result.task.n_queries
    for setting in SETTING_NAMES:
        key = f"accuracy.{setting}"
        if (value := result.number(key)) is not None:
            interval = wilson_interval(round(value * n), n)
            low, high = (value, value) if interval is None else (interval.low, interval.high)
            shares.append(Share(setting, value, low, high, published_values(result.task.name, key)))
    return shares


def n_candidates(result: Result) -> int | None:
    """The number of labels of the task; None where rows have their own choices."""
    return len(result.task.labels or ()) or None


# -------------------------------------------------------------------------------------------- similarity by layer


@dataclass(frozen=True)
class LayeredMetric:
    """A similarity with a value for each layer: its key in the result file and its name in the controls."""

    key: str
    control: str

    @property
    def title(self) -> str:
        return TITLES[self.key]


LAYERED = (
    LayeredMetric("sim_aou.raw", "sim_aou"),
    LayeredMetric("sim_aou.normalised", "sim_aou_normalised"),
    LayeredMetric("sim_am.delta", "sim_am"),
    LayeredMetric("sim_am.after", "sim_am_after"),
)
_Rows = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Profile:
    """One similarity over layers; None where a layer has no defined value."""

    metric: LayeredMetric
    mean: Sequence[float | None]
    quantiles: _Rows | None = None
    """Over queries, by the names of `QUANTILES`; None where only the means are known."""
    floors: _Rows = field(default_factory=dict[str, "Sequence[float | None]"])
    """Each floor's mean over queries, layer by layer; one number for all layers where no more is known."""
    ceilings: _Rows = field(default_factory=dict[str, "Sequence[float | None]"])
    papers: Mapping[str, float] = field(default_factory=dict[str, float])
    """Published for the task: means over layers, other models."""
    before: Sequence[float | None] | None = None
    """The same before fine-tuning: a similarity of whole maps must be compared with it."""

    @property
    def layers(self) -> int:
        return len(self.mean)

    @property
    def floor(self) -> list[float | None]:
        """The highest floor of each layer."""
        return [max(column, default=None) for column in self._columns(self.floors)]

    @property
    def ceiling(self) -> list[float | None]:
        """The highest ceiling of each layer."""
        return [max(column, default=None) for column in self._columns(self.ceilings)]

    @property
    def lowest_ceiling(self) -> list[float | None]:
        return [min(column, default=None) for column in self._columns(self.ceilings)]

    def _columns(self, rows: _Rows) -> list[list[float]]:
        """The defined values of each layer."""
        return [[value for row in rows.values() if (value := row[layer]) is not None] for layer in range(self.layers)]


def profiles(result: Result, records: Records | None = None) -> list[Profile]:
    """Every similarity that the result has layer by layer.

    The spread and the bounds come from the result's controls. A run without controls has its spread from the records,
    and no bounds; with neither there are only the layers' means.
    """
    controls = result.controls or {}
    spread: dict[str, LayerBounds | LayerSpread] = {
        name: control.per_layer for name, control in controls.items() if control.per_layer is not None
    }
    if not spread and records is not None:
        spread = dict(_without_bounds(records))
    found: list[Profile] = []
    for metric in LAYERED:
        mean = per_layer(result, metric.key)
        if mean is None:
            continue
        papers = published_values(result.task.name, metric.key)
        papers = {source: value for source, value in papers.items() if _comparable(source, result)}
        before = result.sim_am.before_per_layer if metric.key == "sim_am.after" else None
        own, control = spread.get(metric.control), controls.get(metric.control)
        if own is not None:
            found.append(Profile(metric, mean, own.quantiles, own.floors, own.ceilings, papers, before))
        else:
            groups = ({}, {}) if control is None else (control.floors, control.ceilings)
            floors, ceilings = ({name: [v] * len(mean) for name, v in group.items()} for group in groups)
            found.append(Profile(metric, mean, None, floors, ceilings, papers, before))
    return found


def _comparable(source: str, result: Result) -> bool:
    """Whether a paper's row has the rule of this run: layer-causal or plain gradient descent."""
    return "untrained" not in source and ("layer-causal" in source) == (result.ft.rule == "layer-causal")


def _without_bounds(records: Records) -> dict[str, LayerSpread]:
    """A run without controls has quantiles but no floors."""
    measured = compute_metrics(records)
    parts = {
        "sim_aou": measured.sim_aou_raw,
        "sim_aou_normalised": measured.sim_aou_normalised,
        "sim_am": measured.sim_am_delta,
        "sim_am_after": measured.sim_am_after,
    }
    return {name: LayerSpread.of(part.per_query, {}, {}) for name, part in parts.items() if part is not None}


# -------------------------------------------------------------------------------------- similarity by update norm

NORM_KEYS = {"sim_aou.raw": "sim_aou_raw", "sim_aou.normalised": "sim_aou_normalised", "sim_am.delta": "sim_am_delta"}
"""The similarities drawn against the update norm: key in the result file, and name in a `NormPoint`."""


def norm_points(result: Result) -> list[NormPoint]:
    """One point for every rule and learning rate of the grid; empty without the full controls."""
    return [point for point in result.norm_curve or () if point.update_norm is not None and point.update_norm > 0]


@dataclass(frozen=True)
class NormSeries:
    """One rule's points that have the similarity, by update norm; `index` is the rule's among all rules."""

    rule: str
    index: int
    norms: list[float]
    values: list[float]
    crossed: list[bool]
    """Which points are of a fine-tuning that diverged or collapsed."""


def norm_series(points: Sequence[NormPoint], key: str) -> list[NormSeries]:
    """The similarity `key` of every rule that has any: it may be undefined throughout (SimAM of a first layer)."""
    found: list[NormSeries] = []
    for index, rule in enumerate(dict.fromkeys(point.rule for point in points)):
        own = sorted(
            (point.update_norm, value, point.status != "ok")
            for point in points
            if point.rule == rule and point.update_norm and (value := getattr(point, NORM_KEYS[key])) is not None
        )
        if own:
            norms, values, crossed = (list(column) for column in zip(*own, strict=True))
            found.append(NormSeries(rule, index, norms, values, crossed))
    return found


def noise_at(sizes: Sequence[float], icl: float) -> list[float]:
    """Normalised SimAOU of two independent random updates: one of ICL's size, one of each of these sizes."""
    return [float(value) for value in noise_floor(np.full(len(sizes), icl), np.array(sizes))]


# ----------------------------------------------------------------------------------------------------------- Kendall

KENDALL_FORMS = {
    "dual_v": "dual form of W_V",
    "dual_v_lr0": "W_V at lr 0",
    "dual_k": "dual form of W_K",
    "released": "as released (q·q)",
    "released_lr0": "q·q at lr 0",
}


def kendall_layers(result: Result) -> dict[str, list[float | None]]:
    """Kendall's tau of every layer, by form; empty where it was not measured."""
    forms = {form: getattr(result.kendall, form, None) for form in KENDALL_FORMS}
    return {form: part.tau_token_per_layer for form, part in forms.items() if part is not None}
