"""The figures of docs/findings.md: the claims as a forest plot, what is learnt, similarity by depth and by size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from aggregate import RULES, TASKS, over
from front import CLAIMS, LEAST, SIZES, draws, models, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def forest() -> Figure:
    """Each claim and size: the number that decides it, with its interval over draws."""
    from dualview.report.figures.style import BLACK, GREY, dress, legend, look, new_figure, small_print

    made = new_figure(7.2, 5.2)
    axes = made.subplots()
    run = models()
    for model in run:  # the legend has the sizes in their order
        how = look(list(SIZES).index(model))
        axes.plot([], [], how.marker, color=how.colour, markersize=5, label=SIZES[model])
    edge = _edge(run[-1])
    for row, claim in enumerate(CLAIMS):
        for number, model in enumerate(run):
            size, how, found = SIZES[model], look(list(SIZES).index(model)), claim.mean(model)
            at = row + 0.22 * (number - (len(run) - 1) / 2)
            if found.n < LEAST or found.half is None:
                said = f"{size}: {claim.answer(model)}"
                clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # of the grid's line
                axes.text(0.008, at, said, va="center", fontsize=6, color=GREY, bbox=clear)
                continue
            cells = claim.cells(model)
            axes.errorbar(found.value, at, xerr=found.half, fmt=how.marker, color=how.colour, markersize=5, capsize=2)
            for side, marker in ((-1, "<"), (1, ">")):
                if side * found.value + found.half > edge:  # the interval goes on beyond the axis
                    axes.plot(side * edge, at, marker, color=how.colour, markersize=4, clip_on=False)
            against = claim.against_every_control(model)
            if against.n >= LEAST and against.half is not None:
                line = axes.errorbar(against.value, at, xerr=against.half, fmt=how.marker, color=how.colour, capsize=2)
                line.lines[0].set(markersize=5, markerfacecolor="white")
            if claim.value is not None:
                axes.plot(over(cells[claim.value]).value, at, "|", color=how.colour, markersize=9, alpha=0.6)
    axes.axvline(0, color=BLACK, linewidth=0.7)
    axes.set_yticks(range(len(CLAIMS)), [f"{claim.text}\n{claim.measured}" for claim in CLAIMS], fontsize=6.5)
    axes.set_ylim(len(CLAIMS) - 0.4, -0.6)
    axes.set_xlim(-edge, edge)
    dress(axes, xlabel="value less its floor (0: no more than the control)")
    legend(axes, columns=3)
    small_print(
        made,
        "The claims, with what is left of each once its floors are taken away",
        "Mean over draws in which ICL and FT both learn, natural label words; bars: 95 % interval over draws. "
        "A tick marks the value itself, before its floor is taken away; an arrow, an interval that goes on. "
        "Filled: the floors that every draw has; hollow: every control, where enough draws have them all.",
    )
    return made


def _edge(model: str) -> float:
    """How far the axis reaches on either side: what this model needs. A wider interval of few draws is cut."""
    found = [mean for claim in CLAIMS for mean in (claim.mean(model), claim.against_every_control(model))]
    means = [mean for mean in found if mean.n >= LEAST]
    return 1.05 * max((abs(mean.value) + (mean.half or 0) for mean in means), default=1.0)


def by_size() -> Figure:
    """Accuracy by setting, and both similarities by depth."""
    from dualview.report.figures.style import SETTINGS, dress, legend, new_figure, small_print

    made = new_figure(7.2, 6.0)
    upper, lower = made.subfigures(2, 1, height_ratios=(1, 1.1))
    cells, run = draws(), models()
    counts = [cells.loc[cells["model"] == model, "task"].nunique() for model in run]
    panels: Sequence[Axes] = np.atleast_1d(upper.subplots(1, len(run), sharey=True, width_ratios=counts))
    for axes, model in zip(panels, run, strict=True):
        own = cells[cells["model"] == model]
        tasks = [task for task in TASKS if (own["task"] == task).any()]
        for name, how in SETTINGS.items():
            at = own["task"].map(tasks.index)
            title = {"zsl": "zero-shot"}.get(name, name.upper())
            axes.plot(at, own[f"accuracy_{name}"], how.marker, color=how.colour, markersize=4, alpha=0.7, label=title)
        axes.set_xticks(range(len(tasks)), [TASKS[task] for task in tasks], rotation=45, ha="right")
        dress(axes, ylabel="accuracy" if axes is panels[0] else "", xlabel=SIZES[model])
    legend(panels[-1], columns=3)
    depth: Sequence[Axes] = list(lower.subplots(1, 2))
    rows = table("layers")
    place = (rows["layer"] / rows.groupby("key")["layer"].transform("max") * 9).round() / 9
    for axes, column, title in zip(
        depth, ("sim_aou_raw", "label_contrast"), ("raw SimAOU", "label contrast"), strict=True
    ):
        _by_depth(axes, rows.assign(place=place), column)
        dress(axes, ylabel=f"{title} (cosine)", xlabel="depth (0: first layer, 1: last)")
    legend(depth[0], columns=2)
    small_print(
        made,
        "What is learnt, and how similar the updates are, by size of model",
        "Above: every draw, natural label words. Below: means over the draws in which ICL and FT both learn, with the "
        "95 % interval over draws; dotted: another query's update (SimAOU).",
    )
    return made


def _by_depth(axes: Axes, rows: pd.DataFrame, column: str) -> None:
    from dualview.report.figures.style import BLACK, look

    for number, (model, size) in enumerate(SIZES.items()):
        cells, how = CLAIMS[0].cells(model), look(number)
        if not len(cells):
            continue
        own = rows[rows["key"].isin(cells["key"])].groupby(["place", "key"])[column].mean().unstack("key")
        means = [over(values) for values in own.to_numpy()]
        value, half = (np.array([getattr(mean, name) or np.nan for mean in means]) for name in ("value", "half"))
        axes.plot(own.index, value, how.marker, ls="-", color=how.colour, markersize=3, label=size)
        axes.fill_between(own.index, value - half, value + half, color=how.colour, alpha=0.15, linewidth=0)
        if column == "sim_aou_raw":
            floors = table("profiles").query("metric == 'sim_aou' and name == 'shuffled_query'")
            floors = floors[floors["key"].isin(cells["key"])]
            at = (floors["layer"] / floors["layer"].max() * 9).round() / 9
            line = floors.assign(place=at).groupby("place")["value"].mean()
            axes.plot(line.index, line, ":", color=how.colour, linewidth=1, label="another query")
    axes.axhline(0, color=BLACK, linewidth=0.7)


def by_update_size() -> Figure:
    """Raw SimAOU against the size of fine-tuning's update, of both rules, with the floors that were made as large."""
    from dualview.report.figures.style import BLACK, GREY, dress, look, new_figure, small_print

    curves, floors = table("curves"), table("controls").query("metric == 'sim_aou'")
    cells = draws(full=True)
    run = [model for model in models() if cells[cells["model"] == model]["key"].isin(curves["key"]).any()]
    made = new_figure(7.2, 3.0)
    panels: Sequence[Axes] = np.atleast_1d(made.subplots(1, max(1, len(run)), sharey=True))
    for axes, model in zip(panels, run, strict=False):
        own = cells[cells["model"] == model]
        for number, (rule, title) in enumerate(RULES.items()):
            how = look(number)
            for _, curve in curves[curves["key"].isin(own["key"]) & (curves["rule"] == rule)].groupby("key"):
                curve = curve[curve["status"] != "diverged"].sort_values("update_norm")
                axes.plot(curve["update_norm"], curve["sim_aou_raw"], color=how.colour, ls=how.line, alpha=0.6, lw=1)
            axes.plot([], [], color=how.colour, ls=how.line, label=title)
        for marker, (name, title) in zip("xs^", SIZED_FLOORS.items(), strict=True):
            rows = own.merge(floors[floors["name"] == name][["key", "value"]], on="key")
            axes.plot(rows["update_norm_ft"], rows["value"], marker, color=GREY, markersize=4, ls="", label=title)
        axes.axhline(0, color=BLACK, linewidth=0.7)
        axes.set_xscale("log")
        axes.set_title(SIZES[model], fontsize=8)
        dress(
            axes,
            xlabel="‖Δh‖ / ‖h‖",
            ylabel="raw SimAOU" if axes is panels[0] else "",
        )
    handles, labels = panels[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside right center", fontsize=6.5, frameon=False)
    small_print(
        made,
        "Similarity against the size of fine-tuning's update",
        "A line for each draw with full controls, natural label words: every rate of the grid, on 64 queries. Grey: "
        "controls trained to the size of the chosen rate's update.",
    )
    return made


SIZED_FLOORS = {
    "untrained": "untrained weights",
    "ft_other_task": "FT on another task",
    "ft_random_labels": "FT on random labels",
}
FIGURES = {
    IMAGES / "findings-claims.png": forest,
    IMAGES / "findings-sizes.png": by_size,
    IMAGES / "findings-update-size.png": by_update_size,
}
"""What draws each file."""
