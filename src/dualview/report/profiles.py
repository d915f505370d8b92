"""Similarities layer by layer: the spread over queries, and the floor and ceiling of each layer.

They come from the result's controls. A run without controls has its spread from the records, and no bounds; with
neither there are the layers' means alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dualview.comparison.result import Result
from dualview.metrics.controls import layer_bounds
from dualview.metrics.measured import LayerBounds
from dualview.metrics.summary import compute_metrics
from dualview.records import Records
from dualview.report.catalogue import at
from dualview.report.chart_data import TITLES
from dualview.report.published import published_values


@dataclass(frozen=True)
class Metric:
    """A similarity that has a value for each layer: its key in the result file and its name among the controls."""

    key: str
    control: str

    @property
    def title(self) -> str:
        return TITLES[self.key]


METRICS = (
    Metric("sim_aou.raw", "sim_aou"),
    Metric("sim_aou.normalised", "sim_aou_normalised"),
    Metric("sim_am.delta", "sim_am"),
    Metric("sim_am.after", "sim_am_after"),
)


@dataclass(frozen=True)
class Profile:
    """One similarity over layers; None where a layer has no defined value."""

    metric: Metric
    mean: Sequence[float | None]
    quantiles: Mapping[str, Sequence[float | None]] | None = None
    """Over queries, by the names of `QUANTILES`; None without records."""
    floors: Mapping[str, Sequence[float | None]] = field(default_factory=dict[str, "Sequence[float | None]"])
    """Each floor's mean over queries, layer by layer; the same number for all layers without records."""
    ceilings: Mapping[str, Sequence[float | None]] = field(default_factory=dict[str, "Sequence[float | None]"])
    papers: Mapping[str, float] = field(default_factory=dict[str, float])
    """What was published for the task: means over layers, other models."""
    before: Sequence[float | None] | None = None
    """The same before fine-tuning, of a similarity of whole maps, which is read against it."""

    @property
    def layers(self) -> int:
        return len(self.mean)

    @property
    def floor(self) -> list[float | None]:
        """The highest floor of each layer."""
        return _highest(self.floors, self.layers)

    @property
    def ceiling(self) -> list[float | None]:
        """The highest ceiling of each layer."""
        return _highest(self.ceilings, self.layers)

    @property
    def lowest_ceiling(self) -> list[float | None]:
        """Where the band of ceilings begins."""
        known = [[v for row in self.ceilings.values() if (v := row[i]) is not None] for i in range(self.layers)]
        return [min(values, default=None) for values in known]


def _highest(rows: Mapping[str, Sequence[float | None]], layers: int) -> list[float | None]:
    known = [[value for row in rows.values() if (value := row[layer]) is not None] for layer in range(layers)]
    return [max(values, default=None) for values in known]


def profiles(result: Result, records: Records | None = None) -> list[Profile]:
    """Every similarity the result has layers of."""
    content = result.to_json()
    spread = _from_result(content)
    if not spread and records is not None:
        spread = _without_bounds(records)
    found: list[Profile] = []
    for metric in METRICS:
        mean = at(content, f"{metric.key}_per_layer")
        if mean is None:
            continue
        papers = published_values(result.task.name, metric.key)
        papers = {source: value for source, value in papers.items() if _comparable(source, result)}
        before = result.sim_am.before_per_layer if metric.key == "sim_am.after" else None
        if metric.control in spread:
            own = spread[metric.control]
            found.append(Profile(metric, mean, own.quantiles, own.floors, own.ceilings, papers, before))
        else:
            found.append(Profile(metric, mean, None, *_flat(content, metric, len(mean)), papers, before))
    return found


def _comparable(source: str, result: Result) -> bool:
    """Whether a paper's row is of the rule that was run: layer-causal beside layer-causal, descent beside descent."""
    return "untrained" not in source and ("layer-causal" in source) == (result.ft.rule == "layer-causal")


_Rows = dict[str, Sequence[float | None]]


def _flat(content: Mapping[str, Any], metric: Metric, layers: int) -> tuple[_Rows, _Rows]:
    control = at(content, f"controls.{metric.control}") or {}
    floors: _Rows = {name: [value] * layers for name, value in (control.get("floors") or {}).items()}
    ceilings: _Rows = {name: [value] * layers for name, value in (control.get("ceilings") or {}).items()}
    return floors, ceilings


def _from_result(content: Mapping[str, Any]) -> dict[str, LayerBounds]:
    told = {metric.control: at(content, f"controls.{metric.control}.per_layer") for metric in METRICS}
    return {name: LayerBounds(**layers) for name, layers in told.items() if layers is not None}


def _without_bounds(records: Records) -> dict[str, LayerBounds]:
    """A run that asked for no controls gets its quantiles, and no floors."""
    measured = compute_metrics(records)
    parts = {
        "sim_aou": measured.sim_aou_raw,
        "sim_aou_normalised": measured.sim_aou_normalised,
        "sim_am": measured.sim_am_delta,
        "sim_am_after": measured.sim_am_after,
    }
    return {name: layer_bounds(part.per_query, {}, {}) for name, part in parts.items() if part is not None}
