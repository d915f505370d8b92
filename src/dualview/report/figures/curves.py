"""The lab's curves: named series over steps (or lengths, layers, rates), each with a band over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualview.report.figures.style import GREY, dress, finite, legend, look, new_figure, plain, small_print

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 30
"""Up to this many points, each gets a marker."""


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
    figure = new_figure(6.4, 3.9)
    axes = figure.add_subplot()
    dress(axes, xlabel=xlabel, ylabel=ylabel)
    for index, (name, curve) in enumerate(series.items()):
        how = look(index)
        axes.plot(
            list(curve.x),
            finite(curve.mean),
            color=how.colour,
            linestyle=how.line,
            linewidth=1.4,
            marker=how.marker,
            markersize=3.5,
            markevery=max(1, len(curve.x) // FEW + (len(curve.x) > FEW)),
            label=plain(name),
        )
        if curve.lo is not None and curve.hi is not None:
            axes.fill_between(
                list(curve.x), finite(curve.lo), finite(curve.hi), color=how.colour, alpha=0.18, linewidth=0
            )
    for index, (name, value) in enumerate((references or {}).items()):
        dashes = (0, (6, 3)) if index % 2 == 0 else (0, (2, 2))
        axes.axhline(value, color=GREY, linewidth=1.0, linestyle=dashes, label=plain(name))
    if log_x:
        axes.set_xscale("log")
    elif all(float(x).is_integer() for curve in series.values() for x in curve.x):  # layers, steps: no half ones
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log_y:
        axes.set_yscale("log")
    if len(series) > 1 or references:
        legend(axes)
    small_print(figure, title, note)
    return figure
