"""The profile over layers: a table of groups of layers, and a figure with the floors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from aggregate import RULES, Mean, comparison, over_tasks, table
from layout import COMPARISON, OVER_TASKS, grid, source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE = Path(__file__).parents[1] / "docs" / "images" / "findings-layers.png"
FLOORS = {
    "shuffled_query": "GD: another query's fine-tuning",
    "icl_random_labels": "GD: random labels in the prompt",
    "untrained": "GD: the untrained model",
}
PANELS = {"sim_aou": ("sim_aou_raw", "raw SimAOU"), "sim_am": ("sim_am_delta", "SimAM of the changes")}


def _own(found: pd.DataFrame, column: str, rule: str = "sgd") -> Mean:
    """The mean of some layers' rows, over the tasks of one rule's cells."""
    cells = comparison(rule)
    return over_tasks(cells, cells["key"].map(found.groupby("key")[column].mean()))


def layers() -> str:
    rows = []
    found = table("layers")
    last = int(found["layer"].max())
    for start in range(0, last + 1, 5):
        inside = found[found["layer"].between(start, start + 4)]
        columns = ("sim_aou_raw", "sim_am_delta", "update_norm_ft")
        values = [_own(inside, column, rule) for rule in RULES for column in columns]
        values += [_own(inside, column) for column in ("update_norm_icl", "demo_mass")]
        rows.append([f"{start} to {min(start + 4, last)}", *(value.show() for value in values)])
    names = [f"{what}, {rule}" for rule in ("GD", "LCGD") for what in ("raw SimAOU", "SimAM of changes", "‖Δh‖")]
    shown = grid(["layers", *names, "‖Δh‖ of ICL", "attention on demonstrations"], rows)
    note = (
        f"{OVER_TASKS} ‖Δh‖ is relative to zero-shot's ‖h‖. In layer 0 the "
        "demonstrations change no logit between the query's own tokens, so SimAM of the changes has no value there."
    )
    image = f"![Similarity by layer, of both rules, with floors](images/{FIGURE.name})"
    return f"{image}\n\n{shown}\n\n{note}\n\n{source('layers.parquet profiles.parquet', *COMPARISON)}"


def curves(metric: str) -> Mapping[str, list[Mean]]:
    """One panel's lines, each a mean for every layer: both rules, then the floors of plain descent."""
    rows, floors = table("layers"), table("profiles").query("metric == @metric")
    numbers = sorted(rows["layer"].unique())
    column, _ = PANELS[metric]
    drawn = {
        title: [_own(rows[rows["layer"] == layer], column, rule) for layer in numbers] for rule, title in RULES.items()
    }
    for name, title in FLOORS.items():
        own = floors[floors["name"] == name]
        drawn[title] = [_own(own[own["layer"] == layer], "value") for layer in numbers]
    return drawn


def figure() -> Figure:
    """Both similarities by layer: mean over tasks, with the 95 % interval over tasks for the two rules."""
    from dualview.report.figures.style import dress, legend, new_figure, small_print

    made = new_figure(7.2, 5.8)
    panels = made.subplots(len(PANELS), 1, sharex=True)
    for axes, (metric, (_, title)) in zip(panels, PANELS.items(), strict=True):
        _draw(axes, curves(metric))
        dress(axes, ylabel=f"{title} (cosine)")
    legend(panels[0], columns=3)
    panels[-1].set_xlabel("layer")
    cells, ceilings = comparison(), table("profiles").query("name == 'icl_reordered'")
    lowest = ceilings[ceilings["key"].isin(cells["key"])].groupby(["metric", "layer"])["value"].mean().min()
    small_print(
        made,
        "Similarity of in-context learning and fine-tuning, by layer",
        f"Embedded model, {cells['task'].nunique()} tasks, {len(cells)} cells of gradient descent and "
        f"{len(comparison('layer-causal'))} of layer-causal descent. Means over tasks of means over seeds; bands: 95 % "
        "interval over tasks. In-context learning in another order (the ceiling) is above "
        f"{int(lowest * 100) / 100:.2f} in every layer of both.",
    )
    return made


def _draw(axes: Axes, drawn: Mapping[str, list[Mean]]) -> None:
    from dualview.report.figures.style import BLACK, look

    for number, (title, means) in enumerate(drawn.items()):
        how, at = look(number), range(len(means))
        values = np.array([mean.value for mean in means])
        rule = title in RULES.values()
        width = 1.5 if rule else 1.0
        axes.plot(at, values, how.marker, color=how.colour, ls=how.line, markersize=3, lw=width, label=title)
        if rule:
            half = np.array([float("nan") if mean.half is None else mean.half for mean in means])
            axes.fill_between(at, values - half, values + half, color=how.colour, alpha=0.15, linewidth=0)
    axes.set_xlim(-0.5, len(next(iter(drawn.values()))) - 0.5)
    axes.axhline(0, color=BLACK, linewidth=0.7)
