"""Panels of the labs' figures, for `report.figures.draw`: lines with bands, and bars with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualview.report.charts.spec import Axis, Chart, Series
from dualview.report.figures.curves import Curve


def lines(
    series: Mapping[str, Curve],
    x: Axis,
    y: Axis,
    rules: Mapping[str, float] | None = None,
    like: Sequence[str] = (),
) -> Chart:
    """A line for each curve, with its band; `rules` are horizontal lines.

    `like` names the curves of another panel: one of the same name gets the same colour and marker here.
    """
    places = {name: place for place, name in enumerate(like)}
    drawn: list[Series] = [
        {
            "name": name,
            "x": curve.x,
            "values": curve.mean,
            "lo": curve.lo,
            "hi": curve.hi,
            "look": places.get(name, number),
        }
        for number, (name, curve) in enumerate(series.items())
    ]
    across = [{"name": name, "value": value} for name, value in (rules or {}).items()]
    return Chart("lines", {"title": "", "x": x, "y": y, "series": drawn, "rules": across})  # pyright: ignore


def bars(series: Mapping[str, Sequence[Mapping[str, Any]]], groups: Sequence[str], y: Axis) -> Chart:
    """Bars side by side in each group; a series has a `mean` and its interval `ci` for every group."""

    def ends(rows: Sequence[Mapping[str, Any]], end: int) -> list[float | None]:
        return [None if row["ci"] is None else row["ci"][end] for row in rows]

    drawn: list[Series] = [
        {"name": name, "values": [row["mean"] for row in rows], "lo": ends(rows, 0), "hi": ends(rows, 1)}
        for name, rows in series.items()
    ]
    return Chart("bars", {"title": "", "series": drawn, "groups": groups, "y": y})
