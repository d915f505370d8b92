"""Each similarity layer by layer, with its spread over queries and its bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dualview.comparison.result import Result
from dualview.metrics.measured import LayerBounds, Measured
from dualview.metrics.summary import compute_metrics, layer_bounds
from dualview.records import Records
from dualview.report.catalogue import NUMBERS, SIMILARITIES, Number
from dualview.report.published import published_values

LAYERED = tuple(next(number for number in NUMBERS if number.key == key) for key in SIMILARITIES)
_Rows = Mapping[str, Sequence[float | None]]


def per_layer(measured: Measured, key: str) -> list[float | None] | None:
    """The layers behind a similarity, by its key."""
    part, name = key.split(".")
    return getattr(getattr(measured, part), f"{name}_per_layer")


@dataclass(frozen=True)
class Profile:
    """One similarity over layers; None where a layer has no defined value."""

    metric: Number
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
    spread: dict[str, LayerBounds] = {
        name: control.per_layer for name, control in controls.items() if control.per_layer is not None
    }
    if not spread and records is not None:
        spread = dict(_without_bounds(records))
    found: list[Profile] = []
    for metric in LAYERED:
        mean = per_layer(result, metric.key)
        if mean is None:
            continue
        papers = {  # of the same rule: layer-causal or plain gradient descent
            source: value
            for source, value in published_values(result.task.name, metric.key).items()
            if "untrained" not in source and ("layer-causal" in source) == (result.ft.rule == "layer-causal")
        }
        before = result.sim_am.before_per_layer if metric.key == "sim_am.after" else None
        own, control = spread.get(metric.control or ""), result.control_of(metric.key)
        if own is not None:
            found.append(Profile(metric, mean, own.quantiles, own.floors, own.ceilings, papers, before))
        else:
            groups = ({}, {}) if control is None else (control.floors, control.ceilings)
            floors, ceilings = ({name: [v] * len(mean) for name, v in group.items()} for group in groups)
            found.append(Profile(metric, mean, None, floors, ceilings, papers, before))
    return found


def _without_bounds(records: Records) -> dict[str, LayerBounds]:
    """A run without controls has quantiles but no floors."""
    measured = compute_metrics(records)
    parts = {
        "sim_aou": measured.sim_aou_raw,
        "sim_aou_normalised": measured.sim_aou_normalised,
        "sim_am": measured.sim_am_delta,
        "sim_am_after": measured.sim_am_after,
    }
    return {name: layer_bounds(part.per_query, {}, {}) for name, part in parts.items() if part is not None}
