"""A chart as plain data, drawn by `html/static/charts.js` in a page and by `figures.draw` with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict

Values = Sequence[float | None]
"""None leaves a gap."""


class Series(TypedDict, total=False):
    """A line, or one bar of every group. Colours are names of CSS variables, such as `--icl`."""

    name: Required[str]
    values: Required[Values]
    x: Sequence[float]
    """Its own places; else the axis'."""
    lo: Values | None
    hi: Values | None
    colour: str
    colours: Sequence[str]
    """Of bars: one for each group."""
    dashed: bool
    points: bool
    """The points are not joined."""
    bare: bool
    """The line has no markers."""
    crossed: Sequence[bool]
    look: int
    """Which colour and marker of the cycle; by default its place among the series."""


class Axis(TypedDict, total=False):
    label: str
    values: Sequence[float]
    min: float
    max: float
    log: bool
    zero: bool
    """Figures draw a line at 0."""


class Rule(TypedDict, total=False):
    """A line across the chart at `value`, or an upright one at `x`."""

    name: Required[str]
    value: float
    x: float
    colour: str


class Mark(TypedDict, total=False):
    """Published values: one for each group of bars, over the bars of `series` where that is given."""

    name: Required[str]
    values: Required[Values]
    series: str


Bound = TypedDict("Bound", {"name": str, "values": Values, "from": Values | None})
"""A floor, or a ceiling with where its band begins (`from`): a number for each box."""


class Spec(TypedDict, total=False):
    """What is drawn; `charts.js` says which keys each kind of chart has."""

    title: Required[str]
    x: Axis
    y: Axis
    series: Sequence[Series]
    groups: Sequence[str]
    boxes: Sequence[dict[str, Any]]
    floor: Bound
    ceiling: Bound
    lines: Sequence[Series]
    marks: Sequence[Mark]
    rules: Sequence[Rule]
    rows: Sequence[int]
    cols: Sequence[int]
    values: Sequence[Values]
    rowLabel: str
    colLabel: str
    unit: str
    min: float
    max: float


@dataclass(frozen=True)
class Chart:
    """One chart: its kind, its data, and the sentence under it."""

    kind: Literal["lines", "bars", "boxes", "heatmap"]
    spec: Spec
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "spec": self.spec}


def any_known(values: Values) -> bool:
    return any(value is not None for value in values)
