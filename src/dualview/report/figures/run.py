"""Figures of one run: one function each, from a result to a matplotlib figure.

`save(figure, path)` writes PDF, SVG and PNG. Every figure has a caption that says what was run, and draws the papers'
values for the task, which are of other models, where they exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualview.comparison.result import NormPoint, Result
from dualview.io.errors import UserError
from dualview.metrics.controls import QUANTILES
from dualview.records import Records
from dualview.report.catalogue import caption, shown
from dualview.report.chart_data import (
    KENDALL_FORMS,
    NORM_KEYS,
    TITLES,
    NormSeries,
    Profile,
    accuracies,
    kendall_layers,
    n_candidates,
    noise_at,
    norm_points,
    norm_series,
    profiles,
)
from dualview.report.figures.curves import Curve, curves
from dualview.report.figures.explanation import attention
from dualview.report.figures.style import (
    BLACK,
    CEILING,
    FLOOR,
    GREY,
    SETTINGS,
    SMALL,
    dress,
    finite,
    legend,
    look,
    new_figure,
    plain,
    save,
    small_print,
)
from dualview.report.published import published_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Curve",
    "accuracy",
    "attention",
    "curves",
    "demo_mass",
    "kendall",
    "norm_curve",
    "run_figures",
    "save",
    "sim_am",
    "sim_aou",
    "write_figures",
]

_PAPER_MARKS = ("D", "o", "v", "P")
_PAPER_LINES: tuple[Any, ...] = ((0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)))


def accuracy(result: Result) -> Figure:
    """Accuracy of the settings with 95 % intervals (Wilson over queries), and the papers' on the same task."""
    shares = accuracies(result)
    figure = new_figure(5.6, 3.6)
    axes = figure.add_subplot()
    dress(axes, ylabel=f"accuracy (share of {result.task.n_queries} queries)")
    for index, share in enumerate(shares):
        how = SETTINGS.get(share.setting, look(3))
        axes.bar(index, share.value, 0.62, color=how.colour, edgecolor="white", hatch=how.hatch, linewidth=0)
        whiskers = [[share.value - share.low], [share.high - share.value]]
        axes.errorbar(index, share.value, yerr=whiskers, color=BLACK, capsize=4, linewidth=1.2)
        axes.annotate(
            f"{share.value:.3f}", (index, share.high), (0, 3), textcoords="offset points", ha="center", fontsize=SMALL
        )
    sources = list(dict.fromkeys(source for share in shares for source in share.papers))
    for mark, source in zip(_PAPER_MARKS, sources, strict=False):
        known = [(i, share.papers[source]) for i, share in enumerate(shares) if source in share.papers]
        axes.plot(
            [i + 0.22 for i, _ in known],
            [value for _, value in known],
            linestyle="none",
            marker=mark,
            markersize=6,
            color=BLACK,
            markeredgecolor="white",
            label=plain(source),
        )
    if candidates := n_candidates(result):
        axes.axhline(1 / candidates, color=GREY, linewidth=1, linestyle=":", label=f"one of {candidates} labels")
    axes.set_xticks(range(len(shares)), [share.name for share in shares], fontsize=SMALL + 1)
    axes.set_ylim(0, 1.04)
    axes.set_xlim(-0.6, len(shares) - 0.4)
    legend(axes)
    small_print(figure, "Accuracy of the settings", f"{caption(result)} Whiskers: 95 % intervals, Wilson over queries.")
    return figure


def sim_aou(result: Result, records: Records | None = None) -> Figure:
    """SimAOU by layer, raw and normalised, as box plots over queries (figure 2 of Dai et al.) with floors and ceiling.

    Without records: the layers' means, and one floor and ceiling for all layers.
    """
    return _by_layer(result, profiles(result, records), "sim_aou", "SimAOU: attention's output")


def sim_am(result: Result, records: Records | None = None) -> Figure:
    """SimAM by layer, of the changes and of the whole maps (figure 3 of Dai et al.), with floors and ceiling."""
    return _by_layer(result, profiles(result, records), "sim_am", "SimAM: attention's logits")


def _by_layer(result: Result, found: Sequence[Profile], family: str, title: str) -> Figure:
    chosen = [profile for profile in found if profile.metric.key.startswith(f"{family}.")]
    if not chosen:
        raise UserError(f"This result has no {family} by layer: the run did not record it.")
    figure = new_figure(7.2, 2.75 * len(chosen) + 0.6)
    panels = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    for axes, profile in zip(panels, chosen, strict=True):
        dress(axes, ylabel=f"{profile.metric.title} (cosine)")
        _draw_profile(axes, profile)
        if profile.before is not None:
            before = finite(profile.before)
            axes.plot(range(len(before)), before, color=BLACK, linewidth=1.1, linestyle=":", label="before")
        legend(axes)
    panels[-1].set_xlabel("layer", fontsize=SMALL + 1)
    spread = "Boxes: quartiles over queries; whiskers: 5 to 95 %; diamonds: means."
    flat = "Means over queries; floor and ceiling are those of all layers together."
    small_print(figure, f"{title}, by layer", f"{caption(result)} {flat if chosen[0].quantiles is None else spread}")
    return figure


def _draw_profile(axes: Axes, profile: Profile) -> None:
    layers = list(range(profile.layers))
    if profile.quantiles is None:
        how = SETTINGS["icl"]
        axes.plot(layers, finite(profile.mean), color=how.colour, marker="D", markersize=4, label="mean over queries")
    else:
        axes.bxp(
            _boxes(profile),
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
    for line, (source, value) in zip(_PAPER_LINES, profile.papers.items(), strict=False):
        axes.axhline(value, color=BLACK, linewidth=0.9, linestyle=line, label=plain(source))
    low, high = axes.get_ylim()
    known = [v for v in (*profile.floor, *profile.ceiling) if v is not None]
    low, high = min(low, 0.0, *known), max(high, *known, 0.0)
    axes.set_ylim(low - 0.03 * (high - low), high + 0.05 * (high - low))
    axes.set_xlim(-0.7, profile.layers - 0.3)
    step = max(1, -(-profile.layers // 24))
    axes.set_xticks(layers[::step], [str(layer) for layer in layers[::step]])
    axes.axhline(0, color=BLACK, linewidth=0.7)
    _bands(axes, profile)


def _boxes(profile: Profile) -> list[dict[str, Any]]:
    """One box per layer, as `Axes.bxp` takes it; a layer without values is not drawn."""
    assert profile.quantiles is not None
    rows = {name: finite(profile.quantiles[name]) for name in QUANTILES}
    names = {"q05": "whislo", "q25": "q1", "q50": "med", "q75": "q3", "q95": "whishi"}
    means = finite(profile.mean)
    return [
        {"mean": means[i], **{names[name]: row[i] for name, row in rows.items()}, "fliers": []}
        for i in range(profile.layers)
    ]


def _bands(axes: Axes, profile: Profile) -> None:
    """The area up to the highest floor is shaded; the ceilings are a band."""
    bottom = axes.get_ylim()[0]
    edges = [i - 0.5 for i in range(profile.layers + 1)]

    def steps(values: Sequence[float | None]) -> list[float]:
        filled = finite(values)
        return [*filled, filled[-1]]

    if any(value is not None for value in profile.floor):
        top = steps(profile.floor)
        shade: dict[str, Any] = {"facecolor": FLOOR, "edgecolor": "#8A8A8A", "hatch": "////", "alpha": 0.45}
        axes.fill_between(edges, bottom, top, step="post", linewidth=0, label="up to the highest floor", **shade)
        axes.step(edges, top, where="post", color=GREY, linewidth=1.1)
    if any(value is not None for value in profile.ceiling):
        axes.fill_between(
            edges, steps(profile.lowest_ceiling), steps(profile.ceiling), step="post", color=CEILING, alpha=0.25, lw=0
        )
        axes.step(edges, steps(profile.ceiling), where="post", color=CEILING, linewidth=1.3, ls="--", label="ceiling")


def demo_mass(result: Result) -> Figure:
    """λ, the softmax mass on the demonstrations, of every layer and head: 0 none of it, 1 all of it."""
    mass = result.demo_mass
    if mass is None:
        raise UserError("This result has no λ: the run did not record the mass on the demonstrations.")
    layers, heads = len(mass.per_head), len(mass.per_head[0])
    figure = new_figure(6.4, 2.2 + 0.085 * layers)
    map_axes, line_axes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    dress(map_axes, xlabel="head", ylabel="layer")
    map_axes.grid(visible=False)
    image = map_axes.imshow(
        [finite(row) for row in mass.per_head], aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest"
    )
    map_axes.set_xticks(range(0, heads, max(1, heads // 16)))
    map_axes.set_yticks(range(0, layers, max(1, layers // 15)))
    bar = figure.colorbar(image, ax=map_axes, pad=0.02)
    bar.set_label("λ: share of the softmax mass", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    dress(line_axes, xlabel="mean of heads")
    line_axes.plot(finite(mass.per_layer), range(layers), color=SETTINGS["icl"].colour, marker="o", markersize=3)
    line_axes.set_xlim(0, 1)
    note = f"{caption(result)} Means over queries; mean of all {shown(mass.mean)}."
    small_print(figure, "λ: attention to the demonstrations, by layer and head", note)
    return figure


def norm_curve(result: Result) -> Figure:
    """Each similarity against the size of fine-tuning's update, over the learning rates, for every rule.

    Rules can only be compared at equal size. The grey curve with normalised SimAOU is what two independent random
    updates of these sizes would give (`metrics.sim_aou.noise_floor`).
    """
    points = norm_points(result)
    if not points:
        raise UserError("This result has no similarity by update norm: run it with --controls full.")
    n = points[0].queries
    note = f"{caption(result)} The first {n} queries; one point per learning rate; crossed: diverged or collapsed."
    return norm_figure(points, "Similarity against the size of the update", note, icl=result.update_norm.icl)


def norm_figure(
    points: Sequence[NormPoint], title: str, note: str, *, icl: float | None = None, joined: bool = True
) -> Figure:
    """Points by rule, a panel for each similarity; `icl` is the size of ICL's own update.

    `joined`: points of one run make a curve; those of several do not.
    """
    import numpy as np

    figure = new_figure(8.2, 3.7)
    panels = figure.subplots(1, len(NORM_KEYS))
    norms = [point.update_norm for point in points if point.update_norm]
    for axes, key in zip(panels, NORM_KEYS, strict=True):
        dress(axes, xlabel="update norm of FT (relative)", ylabel=f"{TITLES[key]} (cosine)")
        axes.axhline(0, color=BLACK, linewidth=0.7)
        found = norm_series(points, key)
        for series in found:
            _draw_rule(axes, series, joined=joined)
        if not found:
            axes.annotate("undefined", (0.5, 0.6), xycoords="axes fraction", ha="center", fontsize=SMALL, color=GREY)
        if icl is not None:
            axes.axvline(icl, color=SETTINGS["icl"].colour, linewidth=1, linestyle=":", label="ICL's own update norm")
        if icl is not None and key == "sim_aou.normalised":
            sizes = [float(size) for size in np.geomspace(min(norms), max(norms), 60)]
            axes.plot(sizes, noise_at(sizes, icl), color=GREY, linewidth=1.4, label="noise alone")
        _log_ticks(axes)
    panels[1].legend(fontsize=SMALL, framealpha=0.9, edgecolor="#BBBBBB", loc="best")
    small_print(figure, title, note)
    return figure


def _log_ticks(axes: Axes) -> None:
    """A logarithmic scale with readable labels even over less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 50 * low else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_rule(axes: Axes, series: NormSeries, *, joined: bool) -> None:
    how = look(series.index + 1)
    line = how.line if joined else "none"
    style: dict[str, Any] = {"color": how.colour, "linestyle": line, "linewidth": 1.3, "marker": how.marker}
    axes.plot(series.norms, series.values, markersize=5, label=plain(series.rule), **style)
    bad = [(x, y) for x, y, crossed in zip(series.norms, series.values, series.crossed, strict=True) if crossed]
    axes.plot([x for x, _ in bad], [y for _, y in bad], color=BLACK, linestyle="none", marker="x", markersize=8)


def kendall(result: Result) -> Figure:
    """Kendall's tau-b between ICL's attention to the training tokens and fine-tuning's, by layer, with its controls."""
    found = kendall_layers(result)
    if not found or result.kendall is None:
        raise UserError("This result has no Kendall's tau by layer: run it with controls.")
    series = {KENDALL_FORMS[form]: Curve(list(range(len(row))), row) for form, row in found.items()}
    papers = published_values(result.task.name, "kendall.released.tau_token")
    means = f"Means over the first {result.kendall.queries} queries."
    note = f"{caption(result)} {means} The papers' values are of the released form."
    title = "Attention to training tokens, ICL against fine-tuning"
    return curves(series, title, "layer", "Kendall's tau-b", note, references=papers)


def run_figures(result: Result, records: Records | None = None) -> Mapping[str, Figure]:
    """Every figure this result has data for, by name."""
    found = {"accuracy": accuracy(result)}
    layered = profiles(result, records)
    for family, title in (("sim_aou", "SimAOU: attention's output"), ("sim_am", "SimAM: attention's logits")):
        if any(profile.metric.key.startswith(f"{family}.") for profile in layered):
            found[family] = _by_layer(result, layered, family, title)
    if result.demo_mass is not None:
        found["demo_mass"] = demo_mass(result)
    if norm_points(result):
        found["norm_curve"] = norm_curve(result)
    if kendall_layers(result):
        found["kendall"] = kendall(result)
    return found


def write_figures(result: Result, folder: Path, records: Records | None = None) -> list[Path]:
    """Write every figure of a run as PDF, SVG and PNG into a folder."""
    return [path for name, figure in run_figures(result, records).items() for path in save(figure, folder / name)]
