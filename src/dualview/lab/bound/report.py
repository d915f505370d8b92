"""The bound lab's table, sentence and figure, made from its JSON alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dualview.lab.charts import lines
from dualview.lab.harness import LabResult, Table, between, number, power
from dualview.lab.summaries import interval_curve, student
from dualview.report.charts.spec import Axis
from dualview.report.figures.curves import Curve
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draws = Sequence[Sequence[float | None]]
"""One row for each draw, over N; None where float64 cannot hold it."""


def _over(draws: Draws, at: int) -> dict[str, Any]:
    return student([row[at] for row in draws])


def slope(x: Sequence[int], values: Sequence[float | None]) -> float | None:
    """The slope of log value over log N by least squares; None unless all values are above 0."""
    logs = [math.log(value) for value in values if value is not None and value > 0]
    return statistics.linear_regression([math.log(n) for n in x], logs).slope if len(logs) == len(x) else None


def slopes(result: LabResult, where: str, name: str) -> str:
    """The mean over draws and its interval."""
    found = [slope(result.results["sizes"], row) for row in result.results[where][name]]
    if None in found:
        return "nothing (a gap is not above 0)"
    over = student(found)
    return f"{over['mean']:.2f} ({between(over['ci'], '.2f')})"


def _mean(draws: Draws, at: int, style: str) -> str:
    return number(_over(draws, at)["mean"], style, "nan")


def tables(result: LabResult) -> list[Table]:
    r, s = result.results, result.settings
    rows: list[list[str]] = []
    plain, control, real = (r[where] for where in ("random", "random, shuffled", "model"))
    for at, n in enumerate(r["sizes"]):
        row = [str(n), _mean(plain["gap"], at, ".3f"), between(_over(plain["gap"], at)["ci"], ".3f")]
        row += [_mean(plain["high"], at, ".2f"), _mean(plain["slack"], at, ".1f"), _mean(control["gap"], at, ".3f")]
        row += [_mean(each["share"], at, ".2f") for each in (plain, control)]
        row += [_mean(real["share"], at, ".1e"), between(_over(real["share"], at)["ci"], ".1e")]
        rows.append([*row, _mean(r["model, shuffled"]["share"], at, ".1e")])
    columns = ["N", "L − L̂", "95 % interval", "95 % of layers below", "bound", "L − L̂, shuffled"]
    columns += ["L/L̂", "L/L̂, shuffled", "L/L̂, real heads", "95 % interval", "L/L̂, real, shuffled"]
    note = (
        f"{sentence(result)}\nRandom layers: {s['layers']} for each of {s['draws']} draws, with {s['population']} "
        f"regression tokens each; real heads: {result.provenance['model']}, {r['kv_heads']} key-value heads on "
        f"{s['draws']} prompts ({s['task']}, {s['shots']} demonstrations, {min(r['tokens'])} to {max(r['tokens'])} "
        "tokens). L̂ is the dual model's loss on the N tokens it was trained on, L on tokens of the same task or prompt "
        "that no sample has. Medians over layers or heads; 95 % intervals: Student over draws. Bound: what theorem 3.2 "
        f"adds to L̂ at δ = {s['delta']:g}; the paper gives its order only, the constants are those of the Rademacher "
        "argument. L/L̂: the part of the training loss that holds on fresh tokens. Shuffled: each token has another "
        "token's value."
    )
    return [Table("bound: generalisation error against theorem 3.2", columns, rows, note)]


def sentence(result: LabResult) -> str:
    """What was found, in one sentence."""
    r = result.results
    last = len(r["sizes"]) - 1
    worst = max(max(row) for where in ("random", "random, shuffled") for row in r[where]["violations"])
    held = (
        "never exceeds the bound" if worst == 0 else f"exceeds the bound in up to {worst:.0%} of the layers of a draw"
    )
    loose = 10 ** _over(r["random"]["looseness"], last)["mean"]
    known = all(row[last] is not None for row in r["model"]["looseness"])
    real = f"{power(_over(r['model']['looseness'], last)['mean'])} times" if known else "beyond float64"
    shares = {where: _mean(r[where]["share"], last, ".2g") for where in r if where.startswith(("random", "model"))}
    return (
        f"On random layers the median gap falls as N to the power {slopes(result, 'random', 'gap')}, the gap that 95 % "
        f"of the layers stay below as {slopes(result, 'random', 'high')}, the bound's complexity term as "
        f"{slopes(result, 'random', 'complexity')} and the whole bound as {slopes(result, 'random', 'slack')}. The gap "
        f"{held}, and at N = {r['sizes'][-1]} the bound is {loose:.0f} times the median gap ({real} on real heads). "
        "With shuffled values, where there is nothing to learn, the gap falls as "
        f"{slopes(result, 'random, shuffled', 'gap')}: neither gap nor bound tells learning from its absence. L/L̂ "
        f"does: {shares['random']} against {shares['random, shuffled']} shuffled; on real heads it is "
        f"{shares['model']} against {shares['model, shuffled']}."
    )


def figures(result: LabResult) -> dict[str, Figure]:
    """The gap and the bound over N, and what holds for the population."""
    r, x = result.results, result.results["sizes"]

    def curve(where: str, name: str) -> Curve:
        return interval_curve(x, [_over(r[where][name], at) for at in range(len(x))])

    axis: Axis = {"label": "N, tokens the dual model has seen", "log": True}
    gaps = {
        "bound": curve("random", "slack"),
        "its complexity term": curve("random", "complexity"),
        "95 % of layers below": curve("random", "high"),
        "median gap": curve("random", "gap"),
        "median gap, shuffled values": curve("random, shuffled", "gap"),
    }
    panels = [lines(gaps, axis, {"label": "L − L̂ of random layers", "log": True})]
    for where, label in (("random", "random layers"), ("model", "real heads")):  # of other sizes: an axis for each
        shares = {label: curve(where, "share"), f"{label}, shuffled values": curve(f"{where}, shuffled", "share")}
        panels.append(lines(shares, axis, {"label": f"L / L̂ of {label}"}))
    title = "Does the bound say how the dual model generalises?"
    note = (
        "Top: the gap and what theorem 3.2 allows it. Middle and bottom: the part of the training loss that holds on "
        f"fresh tokens, median over layers or heads; real heads: {result.provenance['model']}, "
        f"{result.settings['task']}. Bands: 95 % over {result.settings['draws']} draws."
    )
    return {"bound": draw(panels, title, note, (6.4, 8.6))}
