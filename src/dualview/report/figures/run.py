"""Figures of one run: one function each, from a result to a matplotlib figure.

`save(figure, path)` writes PDF, SVG and PNG. Every figure has a caption that says what was run, and draws the papers'
values for the task, which are of other models, where they exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualview.comparison.result import Result
from dualview.io.errors import UserError
from dualview.records import Records
from dualview.report.catalogue import SIMILARITIES, caption
from dualview.report.charts.profiles import Profile, profiles
from dualview.report.charts.run import (
    NORM_KEYS,
    accuracy_chart,
    demo_mass_chart,
    kendall_chart,
    norm_points,
    profile_chart,
    run_norm_charts,
)
from dualview.report.charts.spec import Chart
from dualview.report.figures.draw import draw
from dualview.report.figures.style import SETTINGS, SMALL, dress, finite, new_figure, save, small_print

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NORM_SIZE = (9.4, 3.3)
NORM_TITLES = [SIMILARITIES[key] for key in NORM_KEYS]


def _note(result: Result, chart: Chart) -> str:
    return f"{caption(result)} {chart.note}"


def accuracy(result: Result) -> Figure:
    """Accuracy of the settings with 95 % intervals (Wilson over queries), and the papers' on the same task."""
    chart = accuracy_chart(result)
    return draw([chart], "Accuracy of the settings", _note(result, chart), (5.6, 3.6))


def sim_aou(result: Result, records: Records | None = None) -> Figure:
    """SimAOU by layer, raw and normalised, as box plots over queries (figure 2 of Dai et al.) with floors and ceiling.

    Without records: the layers' means, and one floor and ceiling for all layers.
    """
    return _by_layer(result, profiles(result, records), "sim_aou")


def sim_am(result: Result, records: Records | None = None) -> Figure:
    """SimAM by layer, of the changes and of the whole maps (figure 3 of Dai et al.), with floors and ceiling."""
    return _by_layer(result, profiles(result, records), "sim_am")


_FAMILIES = {"sim_aou": "SimAOU: attention's output, by layer", "sim_am": "SimAM: attention's logits, by layer"}


def _by_layer(result: Result, found: Sequence[Profile], family: str) -> Figure:
    charts = [profile_chart(profile) for profile in found if profile.metric.key.startswith(f"{family}.")]
    if not charts:
        raise UserError(f"This result has no {family} by layer: the run did not record it.")
    return draw(charts, _FAMILIES[family], _note(result, charts[0]), (7.2, 2.75 * len(charts) + 0.6))


def demo_mass(result: Result) -> Figure:
    """λ, the softmax mass on the demonstrations, of every layer and head: 0 none of it, 1 all of it."""
    mass, chart = result.demo_mass, demo_mass_chart(result)
    if mass is None or chart is None:
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
    small_print(figure, "λ: attention to the demonstrations, by layer and head", _note(result, chart))
    return figure


def norm_curve(result: Result) -> Figure:
    """Each similarity against the size of fine-tuning's update, over the learning rates, for every rule.

    Rules can only be compared at equal size. The grey curve with normalised SimAOU is what two independent random
    updates of these sizes would give (`metrics.sim_aou.noise_floor`).
    """
    if not norm_points(result):
        raise UserError("This result has no similarity by update norm: run it with --controls full.")
    charts = run_norm_charts(result)
    title = "Similarity against the size of the update"
    return draw(charts, title, _note(result, charts[0]), NORM_SIZE, across=NORM_TITLES)


def kendall(result: Result) -> Figure:
    """Kendall's tau-b between ICL's attention to the training tokens and fine-tuning's, by layer, with its controls."""
    chart = kendall_chart(result)
    if chart is None:
        raise UserError("This result has no Kendall's tau by layer: run it with controls.")
    return draw([chart], chart.spec["title"], _note(result, chart), (6.4, 3.9))


def run_figures(result: Result, records: Records | None = None) -> Mapping[str, Figure]:
    """Every figure this result has data for, by name."""
    found = {"accuracy": accuracy(result)}
    layered = profiles(result, records)
    for family in _FAMILIES:
        if any(profile.metric.key.startswith(f"{family}.") for profile in layered):
            found[family] = _by_layer(result, layered, family)
    if result.demo_mass is not None:
        found["demo_mass"] = demo_mass(result)
    if norm_points(result):
        found["norm_curve"] = norm_curve(result)
    if kendall_chart(result) is not None:
        found["kendall"] = kendall(result)
    return found


def write_figures(result: Result, folder: Path, records: Records | None = None) -> list[Path]:
    """Write every figure of a run as PDF, SVG and PNG into a folder."""
    return [path for name, figure in run_figures(result, records).items() for path in save(figure, folder / name)]
