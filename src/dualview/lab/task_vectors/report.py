"""The task-vectors lab's summary, tables and figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualview.lab.charts import lines
from dualview.lab.harness import LabResult, Table, between, number
from dualview.lab.summaries import bootstrap_ci, interval_curve, is_positive, mean, student_ci
from dualview.lab.task_vectors.subspaces import KINDS, ZERO_SHOT
from dualview.metrics.cosine import defined_mean
from dualview.report.figures.curves import Curve
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draws = Sequence[Mapping[str, Any]]
BANDS = ("first third", "middle third", "last third")
FLOORS = ("another task's", ZERO_SHOT, "random")
ALL = slice(None)


def summarise(tasks: Mapping[str, Draws]) -> dict[str, Any]:
    """What was found, a sentence for each task."""
    return {"sentences": [_sentence(task, draws) for task, draws in tasks.items()]}


def over(draws: Draws, subspace: str, key: str, bands: slice | int = ALL) -> dict[str, Any]:
    """A number over draws and queries, in a third of the layers or in all: mean and both intervals."""
    taken = [np.array(draw["split"][subspace][key]["queries"], dtype=float)[bands] for draw in draws]
    table = np.stack([each if each.ndim == 1 else defined_mean(each, 0) for each in taken])  # [draw, query]
    by_draw, by_query = defined_mean(table, 1), defined_mean(table, 0)
    return {
        "mean": mean([None if np.isnan(x) else float(x) for x in by_draw]),
        "draws": student_ci(by_draw.tolist(), (0.0, 1.0) if key in ("icl", "ft") else (-1.0, 1.0)),
        "queries": bootstrap_ci(by_query, f"{subspace}/{key}"),
    }


def _sentence(task: str, draws: Draws) -> str:
    def value(subspace: str, key: str) -> float:
        return over(draws, subspace, key)["mean"] or 0.0

    parts: list[str] = []
    for kind in KINDS:
        floors = {name: value(f"{kind}/{name}", "icl") for name in FLOORS}
        highest = max(floors, key=lambda name: floors[name])
        above = "above" if is_positive(_gap(draws, kind, highest)) else "not above"
        parts.append(
            f"the subspace of {kind} holds {value(f'{kind}/own', 'icl'):.0%} of in-context learning's update, {above} "
            f"its highest floor ({highest}: {floors[highest]:.0%}), and {value(f'{kind}/own', 'ft'):.0%} of "
            f"fine-tuning's; the updates' cosine is {value(f'{kind}/own', 'inside'):+.2f} inside and "
            f"{value(f'{kind}/own', 'outside'):+.2f} outside"
        )
    return f"{task}: {'; '.join(parts)}; over the whole space it is {value('whole', 'whole'):+.2f}."


def _gap(draws: Draws, kind: str, floor: str) -> list[float] | None:
    """The interval over draws of how much more of in-context learning's update the subspace holds than a floor."""
    sides = [[over([draw], f"{kind}/{name}", "icl")["mean"] for draw in draws] for name in ("own", floor)]
    return student_ci([own - other for own, other in zip(*sides, strict=True)])


# -------------------------------------------------------------------------------------------------------------- tables


def tables(result: LabResult) -> list[Table]:
    """The shares of both updates with their floors, and the similarity inside and outside."""
    tasks: Mapping[str, Draws] = result.results["tasks"]
    settings = result.settings
    shares: list[list[str]] = []
    similar: list[list[str]] = []
    for task, draws in tasks.items():
        for kind in KINDS:
            for band, title in enumerate(BANDS):
                shares.append([task, kind, title, *_shares(draws, kind, band)])
                similar.append([task, kind, title, *_similarity(draws, kind, band)])
    right = "; ".join(f"{task} {_accuracies(draws)}" for task, draws in tasks.items())
    note = (
        f"{result.provenance['model']}, {settings['shots']} demonstrations, {settings['n_queries']} queries, "
        f"{settings['draws']} draws; subspaces of dimension {settings['rank']}, estimated on {settings['rows']} "
        f"selection rows behind {settings['rank']} other draws. A share is ‖PΔh‖²/‖Δh‖². Intervals, 95 %: Student over "
        f"draws | bootstrap over queries (averaged over draws). Floors: ICL / FT. Accuracy (zsl, icl, ft): {right}.\n"
        + "\n".join(summarise(tasks)["sentences"])
    )
    columns = ["task", "subspace of", "layers", "of ICL's update", "intervals", "of FT's update", "intervals"]
    columns += ["in another task's", "in that of zero-shot outputs", "in a random one"]
    other = ["task", "subspace of", "layers", "SimAOU raw", "intervals", "inside", "intervals", "outside", "intervals"]
    other += ["inside another task's", "outside it"]
    return [
        Table("task-vectors: how much of each update lies in the subspace", columns, shares, note),
        Table("task-vectors: the updates' similarity inside and outside the subspace", other, similar),
    ]


def _both(found: Mapping[str, Any], style: str) -> list[str]:
    return [number(found["mean"], style), f"{between(found['draws'], style)} | {between(found['queries'], style)}"]


def _shares(draws: Draws, kind: str, band: int) -> list[str]:
    own = [cell for key in ("icl", "ft") for cell in _both(over(draws, f"{kind}/own", key, band), ".3f")]
    floors = [[over(draws, f"{kind}/{name}", key, band)["mean"] for key in ("icl", "ft")] for name in FLOORS]
    return [*own, *(" / ".join(map(number, both)) for both in floors)]


def _similarity(draws: Draws, kind: str, band: int) -> list[str]:
    every = [("whole", "whole"), (f"{kind}/own", "inside"), (f"{kind}/own", "outside")]
    shown = [cell for subspace, key in every for cell in _both(over(draws, subspace, key, band), "+.3f")]
    other = [number(over(draws, f"{kind}/{FLOORS[0]}", key, band)["mean"], "+.3f") for key in ("inside", "outside")]
    return [*shown, *other]


def _accuracies(draws: Draws) -> str:
    names = ("zsl", "icl", "ft")
    return ", ".join(f"{statistics.fmean(np.mean(draw['right'][name]) for draw in draws):.2f}" for name in names)


# ------------------------------------------------------------------------------------------------------------- figures


def figures(result: LabResult) -> dict[str, Figure]:
    """The shares by layer."""
    tasks: Mapping[str, Draws] = result.results["tasks"]
    shown = (
        ("ICL, task vectors", "task vectors/own", "icl"),
        ("FT, task vectors", "task vectors/own", "ft"),
        ("ICL, another task's", "task vectors/another task's", "icl"),
        ("ICL, function vectors", "function vectors/own", "icl"),
        (f"ICL, {ZERO_SHOT}", f"task vectors/{ZERO_SHOT}", "icl"),
        ("ICL, random", "task vectors/random", "icl"),
    )
    charts = [
        lines(
            {name: _curve(draws, subspace, key) for name, subspace, key in shown},
            {"label": "layer"},
            {"label": "share of the update", "min": 0.0, "max": 1.0},
        )
        for draws in tasks.values()
    ]
    settings = result.settings
    note = (
        f"{result.provenance['model']}, {settings['shots']} demonstrations, {settings['n_queries']} queries; mean and "
        f"Student's 95 % interval over {settings['draws']} draws (bands of the first two). Dimension "
        f"{settings['rank']}."
    )
    title = "How much of the attention output's update lies in the subspace, layer by layer?"
    return {"task-vectors": draw(charts, title, note, (8.6, 3.6), across=list(tasks))}


def _curve(draws: Draws, subspace: str, key: str) -> Curve:
    layers = np.array([draw["split"][subspace][key]["layers"] for draw in draws], dtype=float)
    means = [None if np.isnan(x) else float(x) for x in defined_mean(layers, 0)]
    banded = subspace == "task vectors/own"
    rows = [
        {"mean": mean, "ci": student_ci(column.tolist()) if banded else None}
        for mean, column in zip(means, layers.T, strict=True)
    ]
    return interval_curve(range(len(rows)), rows)
