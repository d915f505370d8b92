"""The rivals lab's table, sentence and figure, made from its JSON alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dualview.lab.charts import lines
from dualview.lab.harness import LabResult, Table, between, counted
from dualview.lab.summaries import interval_curve, student
from dualview.report.charts.spec import Chart
from dualview.report.figures.curves import Curve
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "gd": "GD",
    "gd_plus_plus": "GD++",
    "preconditioned": "preconditioned GD",
    "preconditioned_plus_plus": "preconditioned GD++",
    "newton": "Newton",
    "newton_any": "Newton with its best number of steps",
    "ridge": "ridge",
    "ols": "OLS",
}
"""Every rule; `newton_any` is Newton with the number of steps that fits a trained model best."""
KINDS = {"linear": "linear", "shared": "shared weights", "softmax": "softmax", "separate": "separate tokens"}
Row = Mapping[str, Any]


def tables(result: LabResult) -> list[Table]:
    s = result.settings
    columns = ["model", "κ", "layers", "loss", "lowest of a rule", "closest by ŷ", "distance", "next minus closest"]
    columns += ["its loss", "closest by ∂ŷ/∂x", "distance", "next minus closest", "cosine"]
    rows = [[_kind(result, row), f"{row['condition']:g}", str(row["depth"]), *_cells(row)] for row in _rows(result)]
    note = (
        f"{sentence(result)}\n{s['dims']} inputs x ~ N(0, Σ), κ Σ's condition number, tr Σ = {s['dims']}; {s['demos']} "
        f"demonstrations, label noise {s['noise']:g}; seeds {result.seeds[0]} to {result.seeds[-1]}, each with "
        f"{s['eval_tasks']:,} problems of its own. Loss ½(ŷ − y)², mean over seeds; lowest of a rule: among those with "
        "as many steps as layers. Distances: mean (ŷ − ŷ')² over mean y², and mean ‖∂ŷ/∂x − ∂ŷ'/∂x‖² over mean ‖w‖², "
        "without the largest 0.1 % of the differences; 0 is equality. Closest: the smallest mean over seeds, with the "
        "rules that cannot be told apart from it. Next minus closest: 95 % interval (Student over seeds, paired) of "
        "the next rule's distance minus the closest's. A rule differs if its own interval lies above 0: one that is "
        "farther away than the next, but varies more over seeds, may not. Cosine: of ∂ŷ/∂x with the closest rule's."
    )
    return [Table("rivals: which rule the trained model is closest to", columns, rows, note)]


def _rows(result: LabResult) -> list[Row]:
    """By kind in their order, then by condition number and depth."""
    kinds = list(KINDS)
    return sorted(result.results["trained"], key=lambda r: (kinds.index(r["kind"]), r["condition"], r["depth"]))


def _kind(result: LabResult, row: Row) -> str:
    heads = result.settings["heads"]
    return f"softmax, {heads} heads" if row["kind"] == "softmax" and heads > 1 else KINDS[row["kind"]]


def _cells(row: Row) -> list[str]:
    rules, (best, lowest) = row["rules"], _lowest(row)
    by_y, by_x = row["closest"]["prediction"], row["closest"]["slope"]
    return [
        f"{fmean(row['loss']):.4f}",
        f"{lowest:.4f} ({TITLES[best]})",
        _closest(row, by_y),
        f"{fmean(rules[by_y['rule']]['prediction']):.1e}",
        between(by_y["ci"], ".1e", "none"),
        f"{fmean(rules[by_y['rule']]['loss']):.4f}",
        _closest(row, by_x),
        f"{fmean(rules[by_x['rule']]['slope']):.1e}",
        between(by_x["ci"], ".1e", "none"),
        f"{fmean(rules[by_x['rule']]['cosine']):.4f}",
    ]


def _lowest(row: Row) -> tuple[str, float]:
    """The rule with as many steps as layers that has the lowest loss, and this loss."""
    known = {name: rule for name, rule in row["rules"].items() if rule["steps"] == row["depth"]}
    losses = {name: fmean(rule["loss"]) for name, rule in known.items()}
    best = min(losses, key=lambda name: losses[name])
    return best, losses[best]


def _title(row: Row, name: str) -> str:
    if name != "newton_any":
        return TITLES[name]
    steps = row["rules"][name]["steps"]
    return f"Newton ({counted(steps, 'step')})"


def _closest(row: Row, found: Mapping[str, Any]) -> str:
    name = _title(row, found["rule"])
    others = [_title(row, tie) for tie in found["ties"]]
    return f"cannot be told apart: {', '.join([name, *others])}" if others else name


# ---------------------------------------------------------------------------------------------------------- sentence


def sentence(result: LabResult) -> str:
    """What was found, in a few sentences."""
    rows = [row for row in _rows(result) if row["kind"] == "linear"]
    same = sum(row["closest"]["prediction"]["rule"] == row["closest"]["slope"]["rule"] for row in rows)
    plain = [row for row in rows if "gd" in _named(row, "prediction")]
    where = "; ".join(f"κ = {row['condition']:g}, {_layers(row)}" for row in plain)
    ratios = [fmean(row["loss"]) / fmean(row["rules"][_named(row, "prediction")[0]]["loss"]) for row in rows]
    lowest = [fmean(row["loss"]) / _lowest(row)[1] for row in rows]
    return (
        f"Of {len(rows)} pairs of depth and κ, {_won(rows, 'prediction')} by prediction; {_won(rows, 'slope')} by "
        f"∂ŷ/∂x. Both name the same rule in {same} of {len(rows)}. By prediction GD is the closest rule or cannot be "
        f"told apart from it {f'in {len(plain)} of them ({where})' if plain else 'in none'}. The trained loss is "
        f"{min(ratios):.2f} to {max(ratios):.2f} times the closest rule's, and {min(lowest):.2f} to {max(lowest):.2f} "
        f"times the lowest of a rule with as many steps.{_copied(result)}"
    )


def _copied(result: LabResult) -> str:
    """How far the copying layer was found."""
    rows = [row for row in _rows(result) if "copied" in row]
    if not rows:
        return ""
    parts: list[str] = []
    for row in rows:
        ways = [", ".join(f"{value:.2f}" for value in way) for way in row["copied"]]
        parts.append(f"{_layers(row)}: y_i for x_i {ways[0]}; x_i for y_i {ways[1]}")
    said = "Separate tokens, the weight in the first layer's attention by seed (1 is copying), with"
    return f" {said} {'. With '.join(parts)}."


def _layers(row: Row) -> str:
    return counted(row["depth"], "layer")


def _named(row: Row, measure: str) -> list[str]:
    found = row["closest"][measure]
    return [found["rule"], *found["ties"]]


def _won(rows: Sequence[Row], measure: str) -> str:
    """How often each rule wins."""
    counts = Counter(_named(row, measure)[0] for row in rows if not row["closest"][measure]["ties"])
    shown = [f"{TITLES[name]} wins {count}" for name, count in counts.most_common()]
    open_ = sum(bool(row["closest"][measure]["ties"]) for row in rows)
    return ", ".join([*shown, f"and in {open_} the closest cannot be told apart"])


# ------------------------------------------------------------------------------------------------------------ figure


def figures(result: LabResult) -> dict[str, Figure]:
    """The distance to every rule over depth, one panel for each condition number."""
    rows = [row for row in _rows(result) if row["kind"] == "linear"]
    conditions = sorted({row["condition"] for row in rows})
    charts = [_panel([row for row in rows if row["condition"] == one]) for one in conditions]
    title = "Which rule is a trained linear transformer closest to?"
    note = (
        "Mean squared difference of predictions over the mean square of the targets, to each rule with as many steps "
        f"as the model has layers, tuned on other problems. Mean over {len(result.seeds)} seeds; bands: 95 % "
        "(Student), cut off at a fifth of the mean."
    )
    return {"rivals": draw(charts, title, note, (9.0, 3.6), across=[f"κ = {one:g}" for one in conditions])}


def _panel(rows: Sequence[Row]) -> Chart:
    series: dict[str, Curve] = {}
    for name in (each for each in TITLES if each != "newton_any"):
        known = [row for row in rows if name in row["rules"]]
        found = [student(row["rules"][name]["prediction"]) for row in known]
        for each in found:
            if each["ci"] is not None:  # a log axis has no place for what reaches below 0
                each["ci"] = [max(each["ci"][0], 0.2 * each["mean"]), each["ci"][1]]
        series[TITLES[name]] = interval_curve([row["depth"] for row in known], found)
    return lines(series, {"label": "layers"}, {"label": "distance of predictions", "log": True})
