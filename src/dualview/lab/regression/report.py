"""The regression lab's tables and figures, made from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dualview.lab.harness import LabResult, Table, between
from dualview.lab.summaries import range_curve
from dualview.report.figures.curves import Curve, curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"gd": "gradient descent", "gd_plus_plus": "GD++", "trained": "trained", "meta": "meta-learner"}


def tables(result: LabResult) -> list[Table]:
    if result.settings["task"] == "sine":
        return [_sine_table(result)]
    found = [_losses_table(result), _similarity_table(result)]
    return found + ([_shifts_table(result)] if "shifts" in result.results else [])


def figures(result: LabResult) -> dict[str, Figure]:
    found = {"regression_training": _training_figure(result)}
    if result.settings["task"] == "linear":
        found["regression_similarity"] = _similarity_figure(result)
    for name, shift in result.results.get("shifts", {}).items():
        found[f"regression_{name}"] = _shift_figure(result, name, shift)
    return found


# ------------------------------------------------------------------------------------------------------------ tables


def _rows(result: LabResult) -> list[Mapping[str, Any]]:
    return [result.results["by_seed"][str(seed)] for seed in result.seeds]


def _over(values: Sequence[float], style: str = ".4f") -> str:
    """The mean; with several seeds, their range in brackets."""
    middle = format(fmean(values), style)
    return middle if len(values) == 1 else f"{middle} ({format(min(values), style)} to {format(max(values), style)})"


def _what(result: LabResult) -> str:
    """A description of what was trained."""
    s = result.settings
    kind = "softmax" if s["softmax"] else "linear"
    heads = "" if s["heads"] == 1 else f", {s['heads']} heads"
    layers = (
        "1 layer" if s["layers"] == 1 else f"{s['layers']} layers ({'shared' if s['recurrent'] else 'own'} weights)"
    )
    if s["task"] == "sine":
        return f"{kind} self-attention behind an MLP, {layers}{heads}; sine waves, {s['demos']} demonstrations"
    half, noise = s["input_range"] / 2, f", label noise {s['noise']:g}" if s["noise"] else ""
    data = f"{s['dims']} inputs uniform in ±{half:g}, {s['demos']} demonstrations{noise}"
    return f"{kind} self-attention, {layers}{heads}; {data}"


def _losses_table(result: LabResult) -> Table:
    against, rows = result.results["references"], _rows(result)
    gd, better, closed, hand = (against[k] for k in ("gd", "gd_plus_plus", "closed_form", "constructed"))
    shown: list[tuple[str, Sequence[float], str]] = [("trained", [r["loss"] for r in rows], "")]
    if rows[0]["interpolated"] is not None:
        other = NAMES[rows[0]["interpolated"]["between"]]
        shown.append(("interpolated", [r["interpolated"]["loss"] for r in rows], f"half way to {other}"))
    steps = "1 step" if gd["steps"] == 1 else f"{gd['steps']} steps"
    shown.append(("gradient descent", [gd["loss"]], f"{steps} at rate {gd['rate']:.3f}, best on these"))
    if better is not None:
        each = list(zip(better["rates"], better["gammas"], strict=True))
        distinct = each[:1] if len(set(each)) == 1 else each  # one pair where all steps share it
        pairs = ", ".join(f"({r:.2f}, {g:.3f})" for r, g in distinct)
        shown.append(("GD++", [better["loss"]], f"(rate, γ) {pairs}"))
    apart = f"differs from gradient descent by {hand['largest_difference_from_gd']:.0e} at most"
    shown.append(("constructed weights", [hand["loss"]], apart))
    if closed is not None:
        shown.append(("closed form", [closed["loss"]], f"rate {closed['rate']:.3f}, over all problems"))
    shown.append(("predicting 0", [against["zero"]], ""))
    cells = [
        [name, _over(losses), "1" if name == "gradient descent" else _over([v / gd["loss"] for v in losses]), how]
        for name, losses, how in shown
    ]
    note = f"{_what(result)}. Loss ½(ŷ − y)² on {result.results['eval_tasks']:,} problems{_seeds(result)}."
    return Table("Regression in context: loss", ["", "loss", "over gradient descent's", "how"], cells, note)


def _similarity_table(result: LabResult) -> Table:
    rows, shown = _rows(result), list[list[str]]()
    for name in ("gd", "gd_plus_plus"):
        if name in rows[0]:
            keys = {"prediction_difference": ".4f", "model_cosine": ".5f", "model_difference": ".4f"}
            intervals = [r[name]["difference_ci"] for r in rows]
            interval = between([min(i[0] for i in intervals), max(i[1] for i in intervals)], "+.5f")
            shown.append([NAMES[name], *(_over([r[name][k] for r in rows], how) for k, how in keys.items()), interval])
    several = " (the union over seeds)" if len(rows) > 1 else ""
    note = (
        "Model: ∂ŷ/∂x_q, the linear model found in each context; cosine 1 and differences 0 are equality. "
        f"The 95 % interval is normal, over problems that both sides share{several}."
    )
    columns = ["trained against", "prediction difference", "model cosine", "model difference", "loss difference"]
    return Table("How similar they are", columns, shown, note)


def _shifts_table(result: LabResult) -> Table:
    shown: list[list[str]] = []
    for name, shift in result.results["shifts"].items():
        at = shift["at"]
        picked = sorted({0, len(at) // 3, 2 * len(at) // 3, len(at) - 1, *(i for i, v in enumerate(at) if v == 1.0)})
        for i in picked:
            trained = [r["shifts"][name][i] for r in _rows(result)]
            others = (shift["losses"].get(k) for k in ("gd", "gd_plus_plus"))
            cells = ["" if o is None else f"{o[i]:.4f}" for o in others]
            shown.append([f"{shift['title']}: {at[i]:g}", _over(trained), *cells])
    columns = ["away from training", "trained", "gradient descent", "GD++"]
    if all(not row[3] for row in shown):
        columns, shown = columns[:3], [row[:3] for row in shown]
    note = "Losses on 2,000 problems each; step sizes are those of the training's problems. The JSON has all values."
    return Table("Away from the training's problems", columns, shown, note)


def _sine_table(result: LabResult) -> Table:
    rows = _rows(result)
    shown = [
        ["transformer", _over([r["loss"] for r in rows], ".5f"), ""],
        [
            "meta-learner, one step",
            _over([r["meta"]["reference_loss"] for r in rows], ".5f"),
            f"learnt rate {_over([r['meta']['rate'] for r in rows], '.3f')}",
        ],
        ["predicting 0", f"{result.results['references']['zero']:.5f}", ""],
        ["prediction difference", _over([r["meta"]["prediction_difference"] for r in rows]), "on a grid of inputs"],
        ["cosine of functions", _over([r["meta"]["function_cosine"] for r in rows]), "on a grid of inputs"],
    ]
    note = f"{_what(result)}. Loss ½(ŷ − y)² on {result.results['eval_tasks']:,} problems{_seeds(result)}."
    return Table("Sine waves in context", ["", "value", "how"], shown, note)


def _seeds(result: LabResult) -> str:
    if len(result.seeds) == 1:
        return f"; seed {result.seeds[0]}"
    return f"; seeds {result.seeds[0]} to {result.seeds[-1]}, mean (lowest to highest)"


# ----------------------------------------------------------------------------------------------------------- figures


def _curve(result: LabResult, key: str) -> Curve:
    """One curve of the training over seeds."""
    return range_curve(_rows(result)[0]["curve"]["step"], [r["curve"][key] for r in _rows(result)])


def _note(result: LabResult) -> str:
    band = "" if len(result.seeds) == 1 else "; band: lowest to highest seed"
    return f"{_what(result)}{_seeds(result)}{band}."


def _curve_note(result: LabResult) -> str:
    return f"{_note(result)} On the first {result.results['curve_tasks']:,} of the problems in the table."


def _training_figure(result: LabResult) -> Figure:
    against = result.results["references"]
    series = {"trained": _curve(result, "loss")}
    lines: dict[str, float] = {}
    if result.settings["task"] == "sine":
        series["meta-learner"] = _curve(result, "meta_loss")
    else:
        lines = {"gradient descent": against["gd"]["curve_loss"]}
        if against["gd_plus_plus"] is not None:
            lines["GD++"] = against["gd_plus_plus"]["curve_loss"]
    title = "Regression in context: loss in training"
    return curves(series, title, "training step", "loss ½(ŷ − y)²", _curve_note(result), references=lines)


def _similarity_figure(result: LabResult) -> Figure:
    better = result.results["references"]["gd_plus_plus"] is not None
    title = f"How similar the trained model and {'GD++' if better else 'gradient descent'} are"
    names = ("model cosine", "model difference", "prediction difference")
    series = {name: _curve(result, name.replace(" ", "_")) for name in names}
    return curves(series, title, "training step", "value", _curve_note(result))


def _shift_figure(result: LabResult, name: str, shift: Mapping[str, Any]) -> Figure:
    series = {"trained": range_curve(shift["at"], [r["shifts"][name] for r in _rows(result)])}
    series |= {NAMES[key]: Curve(shift["at"], values) for key, values in shift["losses"].items()}
    title = f"Loss away from the training's problems: {shift['title']}"
    return curves(series, title, shift["title"], "loss ½(ŷ − y)²", _note(result), log_y=True)
