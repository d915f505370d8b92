"""The regression lab's tables and figures, made from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dualview.lab.charts import lines
from dualview.lab.harness import LabResult, Table, between
from dualview.lab.summaries import range_curve
from dualview.report.charts.spec import Chart
from dualview.report.figures.curves import Curve
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"gd": "gradient descent", "gd_plus_plus": "GD++", "trained": "trained", "meta": "meta-learner"}


def tables(result: LabResult) -> list[Table]:
    if result.settings["task"] == "sine":
        return [_sine_table(result)]
    return [_losses_table(result), *([_shifts_table(result)] if "shifts" in result.results else [])]


def figures(result: LabResult) -> dict[str, Figure]:
    """Loss in training, similarity to gradient descent (or GD++) in training, and loss at other input scales."""
    panels = [_training_panel(result)]
    if result.settings["task"] == "linear":
        panels.append(_similarity_panel(result))
    if "input_scale" in result.results.get("shifts", {}):
        panels.append(_shift_panel(result, "input_scale"))
    note = f"{_note(result)} In training: on the first {result.results['curve_tasks']:,} of the problems in the table."
    return {"regression": draw(panels, "Does training find gradient descent?", note, (6.4, 0.8 + 2.4 * len(panels)))}


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
    similar = {NAMES[key]: _similarity(rows, key) for key in ("gd", "gd_plus_plus") if key in rows[0]}
    cells = [
        [
            name,
            _over(losses),
            "1" if name == "gradient descent" else _over([v / gd["loss"] for v in losses]),
            *similar.get(name, [""] * 4),
            how,
        ]
        for name, losses, how in shown
    ]
    several = " (the union over seeds)" if len(rows) > 1 else ""
    note = (
        f"{_what(result)}. Loss ½(ŷ − y)² on {result.results['eval_tasks']:,} problems{_seeds(result)}. Differences, "
        "cosine: of the trained model and this one. Model: ∂ŷ/∂x_q, the linear model found in each context; cosine 1 "
        f"and differences 0 are equality. The 95 % interval is normal, over problems that both sides share{several}."
    )
    columns = ["", "loss", "over gradient descent's", "trained less it, 95 %"]
    columns += ["prediction difference", "model cosine", "model difference", "how"]
    return Table("Regression in context: loss", columns, cells, note)


def _similarity(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """How far the trained models are from a rule: loss, predictions, and the linear models they have found."""
    keys = {"prediction_difference": ".4f", "model_cosine": ".5f", "model_difference": ".4f"}
    intervals = [r[name]["difference_ci"] for r in rows]
    interval = between([min(i[0] for i in intervals), max(i[1] for i in intervals)], "+.5f")
    return [interval, *(_over([r[name][k] for r in rows], how) for k, how in keys.items())]


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


def _training_panel(result: LabResult) -> Chart:
    against = result.results["references"]
    series = {"trained": _curve(result, "loss")}
    rules: dict[str, float] = {}
    if result.settings["task"] == "sine":
        series["meta-learner"] = _curve(result, "meta_loss")
    else:
        rules = {"gradient descent": against["gd"]["curve_loss"]}
        if against["gd_plus_plus"] is not None:
            rules["GD++"] = against["gd_plus_plus"]["curve_loss"]
    return lines(series, {"label": "training step"}, {"label": "loss ½(ŷ − y)²"}, rules)


def _similarity_panel(result: LabResult) -> Chart:
    better = result.results["references"]["gd_plus_plus"] is not None
    names = ("model cosine", "model difference", "prediction difference")
    series = {name: _curve(result, name.replace(" ", "_")) for name in names}
    return lines(series, {"label": "training step"}, {"label": f"against {'GD++' if better else 'gradient descent'}"})


def _shift_panel(result: LabResult, name: str) -> Chart:
    shift: Mapping[str, Any] = result.results["shifts"][name]
    series = {"trained": range_curve(shift["at"], [r["shifts"][name] for r in _rows(result)])}
    series |= {NAMES[key]: Curve(shift["at"], values) for key, values in shift["losses"].items()}
    return lines(series, {"label": shift["title"]}, {"label": "loss ½(ŷ − y)²", "log": True})
