"""Curves of any kind: named series over steps (or lengths, layers, rates), each with a band over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualview.report.charts.spec import Chart, Spec
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Curve:
    """One series: its mean at each x and, where there are several seeds, the band around it."""

    x: Sequence[float]
    mean: Sequence[float | None]
    lo: Sequence[float | None] | None = None
    hi: Sequence[float | None] | None = None


def curves(
    series: Mapping[str, Curve],
    title: str,
    xlabel: str,
    ylabel: str,
    note: str,
    *,
    references: Mapping[str, float] | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """Every series as a line with its band; `references` are horizontal lines (a closed form, chance, a paper's value).

    `note` is the caption: what was trained, on what, how many seeds, and what the band is.
    """
    spec: Spec = {
        "title": title,
        "x": {"label": xlabel, "log": log_x},
        "y": {"label": ylabel, "log": log_y},
        "series": [
            {"name": name, "x": curve.x, "values": curve.mean, "lo": curve.lo, "hi": curve.hi}
            for name, curve in series.items()
        ],
        "rules": [{"name": name, "value": value} for name, value in (references or {}).items()],
    }
    return draw([Chart("lines", spec)], title, note, (6.4, 3.9))
