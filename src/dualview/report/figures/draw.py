"""Charts drawn with matplotlib, from the same data that the page's script draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dualview.report.charts.spec import Bound, Chart, Rule, Series, Spec, any_known
from dualview.report.figures.style import (
    BLACK,
    CEILING,
    FLOOR,
    GREY,
    NORMAL,
    SETTINGS,
    SMALL,
    Look,
    dress,
    finite,
    legend,
    look,
    new_figure,
    plain,
    short,
    small_print,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW = 30
"""Up to this many points of a line, each gets a marker."""
_COLOURS = {"--floor": GREY, "--ceiling": CEILING, "--muted": GREY, "--fg": BLACK}
_DASHES: tuple[Any, ...] = ((0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 1)))
_MARKS = ("D", "v", "o", "P")
_QUANTILES = {"q05": "whislo", "q25": "q1", "q50": "med", "q75": "q3", "q95": "whishi"}
"""What `Axes.bxp` calls them."""


def draw(
    charts: Sequence[Chart],
    title: str,
    note: str,
    size: tuple[float, float],
    *,
    across: Sequence[str] = (),
    columns: int = 0,
) -> Figure:
    """Charts as the panels of one figure, one below the other; with `across`, their titles, side by side.

    note      the small print under the figure: what was run
    size      in inches
    columns   panels in a row, with `across`; 0: all
    """
    figure = new_figure(*size)
    columns = columns or len(charts) if across else 1
    labels = [chart.spec.get("x", {}).get("label", "") for chart in charts]
    shared = not across and len(set(labels)) == 1
    grid = figure.subplots(len(charts) // columns, columns, sharex=shared, squeeze=False)
    panels: list[Axes] = list(grid.flat)
    for number, (axes, chart) in enumerate(zip(panels, charts, strict=True)):
        spec = chart.spec
        dress(axes, xlabel=labels[number] if not shared or axes is panels[-1] else "")
        scale = spec.get("y", {}).get("label", "")
        new = number % columns == 0 or scale != charts[number - 1].spec.get("y", {}).get("label", "")
        axes.set_ylabel(scale if new else "", fontsize=NORMAL)
        {"lines": _lines, "bars": _bars, "boxes": _boxes}[chart.kind](axes, spec)
        alone = chart.kind == "lines" and len(spec.get("series", ())) == 1 and not spec.get("rules")
        if not across and not alone:
            legend(axes)
    if across:
        for axes, name in zip(panels, across, strict=True):
            axes.set_title(name, fontsize=NORMAL - 0.5)
        how: dict[str, Any] = {"fontsize": SMALL, "frameon": False, "handlelength": 2.6}
        for row in grid:
            names: dict[str, Any] = {}
            for axes in row:
                handles, shown = axes.get_legend_handles_labels()
                names |= dict(zip(shown, handles, strict=True))
            if len(grid) == 1:
                figure.legend(list(names.values()), list(names), loc="outside right upper", **how)
            else:
                row[-1].legend(list(names.values()), list(names), loc="upper left", bbox_to_anchor=(1.02, 1.0), **how)
    small_print(figure, title, note)
    return figure


def _look(colour: str | None, place: int) -> Look:
    """The look of a setting, of a place in the cycle, or of a place with another colour."""
    from dataclasses import replace

    setting = (colour or "").removeprefix("--")
    if setting in SETTINGS:
        return SETTINGS[setting]
    how = look(place)
    return replace(how, colour=_COLOURS[colour]) if colour in _COLOURS else how


def _rules(axes: Axes, rules: Sequence[Rule]) -> None:
    for index, rule in enumerate(rules):
        style: dict[str, Any] = {"linewidth": 1.0, "linestyle": _DASHES[index % len(_DASHES)]}
        style["color"] = _look(rule.get("colour", "--muted"), 0).colour
        if "value" in rule:
            axes.axhline(rule["value"], label=plain(rule["name"]), **style)
        elif "x" in rule:
            axes.axvline(rule["x"], label=plain(rule["name"]), **style)


def _range(axes: Axes, spec: Spec) -> None:
    y = spec.get("y", {})
    if y.get("zero"):
        axes.axhline(0, color=BLACK, linewidth=0.7)
    if y.get("log"):
        axes.set_yscale("log")
    if "min" in y and "max" in y:
        axes.set_ylim(y["min"], y["max"] + 0.04 * (y["max"] - y["min"]))


# -------------------------------------------------------------------------------------------------------------- lines


def _lines(axes: Axes, spec: Spec) -> None:
    series = spec.get("series", ())
    axis = spec.get("x", {})
    places = [list(one.get("x", axis.get("values", ())))[: len(one["values"])] for one in series]
    for index, (one, x) in enumerate(zip(series, places, strict=True)):
        _line(axes, one, x, _look(one.get("colour"), one.get("look", index)))
    _rules(axes, spec.get("rules", ()))
    _range(axes, spec)
    if not series:
        axes.annotate("undefined", (0.5, 0.6), xycoords="axes fraction", ha="center", fontsize=SMALL, color=GREY)
    known = {float(x) for own in places for x in own}
    whole = all(x.is_integer() for x in known)  # layers, steps: no half ones
    if axis.get("log"):
        _log_ticks(axes, sorted(known) if whole and len(known) <= 8 else ())
    elif whole:
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _line(axes: Axes, series: Series, x: Sequence[float], how: Look) -> None:
    line = "none" if series.get("points") else _DASHES[0] if series.get("dashed") else how.line
    style: dict[str, Any] = {"color": how.colour, "linewidth": 1.4, "linestyle": line}
    if series.get("bare"):
        style["linestyle"] = _DASHES[0] if series.get("dashed") else "-"
    else:
        style |= {"marker": how.marker, "markersize": 3.5, "markevery": max(1, len(x) // FEW + (len(x) > FEW))}
    axes.plot(x, finite(series["values"]), label=plain(series["name"]), **style)
    low, high = series.get("lo"), series.get("hi")
    if low is not None and high is not None and any_known(low):
        axes.fill_between(x, finite(low), finite(high), color=how.colour, alpha=0.18, linewidth=0)
    marked = [(at, y) for at, y, bad in zip(x, series["values"], series.get("crossed", ()), strict=False) if bad]
    if "crossed" in series:
        style = {"color": BLACK, "linestyle": "none", "marker": "x", "markersize": 8}
        axes.plot([at for at, _ in marked], finite([y for _, y in marked]), **style)


def _log_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic scale with readable labels even over less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 50 * low else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if ticks:
        axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axes.minorticks_off()


# --------------------------------------------------------------------------------------------------------------- bars


def _bars(axes: Axes, spec: Spec) -> None:
    groups, series = spec.get("groups", ()), spec.get("series", ())
    pitch = 0.64 if len(series) == 1 else 0.81 / len(series)
    shifts = {one["name"]: (index - (len(series) - 1) / 2) * pitch for index, one in enumerate(series)}
    for index, one in enumerate(series):
        values = {place: value for place, value in enumerate(one["values"]) if value is not None}
        colours = one.get("colours")
        looks = [_look(colours[place] if colours else one.get("colour"), 3 if colours else index) for place in values]
        x = [place + shifts[one["name"]] for place in values]
        style: dict[str, Any] = {"color": [how.colour for how in looks], "hatch": [how.hatch for how in looks]}
        name = "_nolegend_" if colours else plain(one["name"])
        axes.bar(x, list(values.values()), pitch - 0.02, edgecolor="white", linewidth=0, label=name, **style)
        tops = _whiskers(axes, one, values, x)
        if len(series) == 1:
            near: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": SMALL}
            for at, top, value in zip(x, tops, values.values(), strict=True):
                axes.annotate(f"{value:.3f}", (at, top), (0, 3), **near)
    sources: list[str] = []
    for mark in spec.get("marks", ()):
        shift = shifts[mark["series"]] if "series" in mark else 0.22  # next to the whisker of its bar
        known = {place + shift: value for place, value in enumerate(mark["values"]) if value is not None}
        named = "_nolegend_" if mark["name"] in sources else plain(mark["name"])
        sources += [mark["name"]] if mark["name"] not in sources else []
        style = {"marker": _MARKS[sources.index(mark["name"]) % len(_MARKS)], "color": BLACK, "markersize": 5}
        style |= {"markeredgecolor": "white", "linestyle": "none", "label": named}
        axes.plot(list(known), list(known.values()), **style)
    _rules(axes, spec.get("rules", ()))
    _range(axes, spec)
    axes.set_xticks(range(len(groups)), [plain(short(group, 18)) for group in groups], fontsize=SMALL + 1)
    axes.set_xlim(-0.6, len(groups) - 0.4)


def _whiskers(axes: Axes, series: Series, values: Mapping[int, float], x: Sequence[float]) -> list[float]:
    """Draw the intervals of a series' bars; where each bar ends with its interval."""
    low, high = series.get("lo") or (), series.get("hi") or ()
    ends = [(low[place], high[place]) if low and high else (None, None) for place in values]
    known = [
        (at, value, value - bottom, top - value)
        for at, value, (bottom, top) in zip(x, values.values(), ends, strict=True)
        if bottom is not None and top is not None
    ]
    if known:
        at, middle, down, up = (list(column) for column in zip(*known, strict=True))
        axes.errorbar(at, middle, yerr=[down, up], fmt="none", ecolor=BLACK, capsize=3, linewidth=1.1)
    return [value if top is None else top for value, (_, top) in zip(values.values(), ends, strict=True)]


# -------------------------------------------------------------------------------------------------------------- boxes


def _boxes(axes: Axes, spec: Spec) -> None:
    boxes = spec.get("boxes", ())
    layers = list(range(len(boxes)))
    stats = [
        {"mean": _nan(box["mean"]), **{ours: _nan(box[name]) for name, ours in _QUANTILES.items()}, "fliers": []}
        for box in boxes
    ]
    axes.bxp(
        stats,
        positions=layers,
        widths=0.6,
        showfliers=False,
        showmeans=True,
        patch_artist=True,
        boxprops={"facecolor": "#A9CBE3", "edgecolor": "#0072B2", "linewidth": 0.8},
        medianprops={"color": "#D55E00", "linewidth": 1.4},
        whiskerprops={"color": "#0072B2", "linewidth": 0.8},
        capprops={"color": "#0072B2", "linewidth": 0.8},
        meanprops={"marker": "D", "markersize": 2.6, "markerfacecolor": BLACK, "markeredgecolor": BLACK},
    )
    for line in spec.get("lines", ()):
        axes.plot(layers, finite(line["values"]), color=BLACK, linewidth=1.1, linestyle=":", label=plain(line["name"]))
    _rules(axes, spec.get("rules", ()))
    bounds = [bound for bound in (spec.get("floor"), spec.get("ceiling")) if bound is not None]
    low, high = axes.get_ylim()
    known = [0.0, *(value for bound in bounds for value in bound["values"] if value is not None)]
    low, high = min(low, *known), max(high, *known)
    axes.set_ylim(low - 0.03 * (high - low), high + 0.05 * (high - low))
    axes.set_xlim(-0.7, len(boxes) - 0.3)
    shown = layers[:: max(1, -(-len(boxes) // 24))]
    axes.set_xticks(shown, [str(layer) for layer in shown])
    _range(axes, spec)
    _bounds(axes, spec.get("floor"), spec.get("ceiling"))


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _bounds(axes: Axes, floor: Bound | None, ceiling: Bound | None) -> None:
    """The area up to the highest floor is shaded; the ceilings are a band."""

    def steps(values: Sequence[float | None]) -> tuple[list[float], list[float]]:
        filled = finite(values)
        return [i - 0.5 for i in range(len(filled) + 1)], [*filled, filled[-1]]

    if floor is not None:
        edges, top = steps(floor["values"])
        shade: dict[str, Any] = {"facecolor": FLOOR, "edgecolor": "#8A8A8A", "hatch": "////", "alpha": 0.45}
        name = f"up to the {floor['name']}"
        axes.fill_between(edges, axes.get_ylim()[0], top, step="post", linewidth=0, label=name, **shade)
        axes.step(edges, top, where="post", color=GREY, linewidth=1.1)
    if ceiling is not None:
        edges, top = steps(ceiling["values"])
        axes.fill_between(
            edges,
            steps(ceiling["from"] or ceiling["values"])[1],
            top,
            step="post",
            color=CEILING,
            alpha=0.25,
            linewidth=0,
        )
        axes.step(edges, top, where="post", color=CEILING, linewidth=1.3, linestyle="--", label=ceiling["name"])
