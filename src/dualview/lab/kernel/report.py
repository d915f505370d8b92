"""The kernel lab's tables, sentences and figures, made from its JSON alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dualview.lab.charts import lines
from dualview.lab.harness import LabResult, Table, between, counted, power
from dualview.lab.summaries import student_ci
from dualview.report.charts.spec import Axis, Chart
from dualview.report.figures.curves import Curve
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP = "largest weights"
NAMES = {"prompt": "as in the prompt", "shuffled": "shuffled", "attention": "by attention weight"}
LOW, MIDDLE, HIGH = 1, 2, 3
"""Places of the 10 %, 50 % and 90 % quantiles over heads."""


def tables(result: LabResult) -> list[Table]:
    return [_features_table(result), _training_table(result)]


def _ci(draws: Sequence[float], style: str) -> str:
    """Student's interval over draws; errors, shares and numbers of features are not below 0."""
    return between(student_ci(draws, (0.0, float("inf"))), style)


def _where(result: LabResult) -> str:
    r = result.results
    tokens = sorted({*r["tokens"]})
    shown = str(tokens[0]) if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]}"
    prompts, shots = counted(len(result.seeds), "prompt"), counted(result.settings["shots"], "demonstration")
    return (
        f"{result.provenance['model']}, {r['model']['heads']} heads at the last token of {prompts} "
        f"({result.settings['task']}, {shots}, {shown} tokens)"
    )


# ----------------------------------------------------------------------------------------------------------- features


def _features_table(result: LabResult) -> Table:
    r, most, target = result.results, result.results["sizes"][-1], result.settings["target"]
    rows: list[list[str]] = []
    for where, label in (("model", ""), ("random", "random layer: ")):
        found = r[where]
        n = "tokens + 1" if where == "model" else "17"
        gram = found["gram"]["largest"]
        beyond = found["gram"]["beyond_float64"]
        shown = "" if gram is None else f"{gram:.0e}"
        rows.append([f"{label}Gram (exact)", shown, "", "", "", "all" if not beyond else f"all but {beyond}", n, ""])
        rows += [
            _feature_row(found, name, label, None if name != TOP else _below(r))
            for name in found["errors"]
            if where == "model" or (name != TOP and "," not in name)
        ]
        uniform = found["uniform"]["heads"]
        spread = f"{uniform[LOW]:.2g} to {uniform[HIGH]:.2g}"
        cells = [f"{uniform[MIDDLE]:.3g}", spread, f"{uniform[0]:.2g}", _ci(found["uniform"]["draws"], ".3g")]
        rows.append([f"{label}equal weights, no features", *cells, "", "", ""])
    columns = ["features", f"error at m = {most}", "10–90 % of heads", "best head", "95 % interval"]
    columns += [f"heads within {target:.0%}", f"m for {target:.0%}", "predicted m"]
    kind = "in orthogonal blocks" if result.settings["directions"] == "orthogonal" else "independent"
    note = (
        f"{features_sentence(result)}\n{_where(result)}; random layers: 10 inputs, 15 demonstrations, "
        f"{result.settings['layers']} for each prompt. Error: ‖ŷ − h'‖/‖h'‖, median head (each head's median over "
        "prompts; Gram: the largest of all heads and prompts). 95 % intervals: Student over prompts, each with "
        f"directions of its own. Directions are {kind}; a trigonometric direction is two features. Heads "
        f"within {target:.0%}: heads whose error stays below from some m on; m for {target:.0%}: of the median head. "
        "Predicted: to first order, independent directions, median head and 10–90 % of heads. Largest weights: "
        "attention over the m tokens of largest weight alone, which must know the weights."
    )
    return Table("kernel: random features on real heads", columns, rows, note)


def _below(results: dict[str, Any]) -> int:
    """The largest number that is below that of the tokens: all of them give the output itself."""
    return max((m for m in results["sizes"] if m < min(results["tokens"])), default=results["sizes"][0])


def _needed(reached: Sequence[int | None]) -> str:
    """Of the median head."""
    inside, middle = sorted(m for m in reached if m is not None), (len(reached) - 1) // 2
    return f"{inside[middle]}" if len(inside) > middle else "not reached"


def _feature_row(found: dict[str, Any], name: str, label: str, at: int | None) -> list[str]:
    heads, draws, reached = found["errors"][name]["heads"], found["errors"][name]["draws"], found["reached"][name]
    place = -1 if at is None else at.bit_length() - 5  # sizes begin at 2⁴
    last = [quantile[place] for quantile in heads]
    predicted = ""
    if name in found["needed"]:
        q = found["needed"][name]["heads"]
        predicted = f"{power(q[MIDDLE])} ({power(q[LOW])} to {power(q[HIGH])})"
    return [
        f"{label}{name}{'' if at is None else f', m = {at}'}",
        f"{last[MIDDLE]:.3g}",
        f"{last[LOW]:.2g} to {last[HIGH]:.2g}",
        f"{last[0]:.2g}",
        _ci([draw[place] for draw in draws], ".3g"),
        f"{sum(m is not None for m in reached)} of {len(reached)}",
        _needed(reached),
        predicted,
    ]


def features_sentence(result: LabResult) -> str:
    """What was found about the number of features, in one sentence."""
    r, target = result.results, result.settings["target"]
    found, most = r["model"], r["sizes"][-1]
    random = [name for name in found["errors"] if name != TOP]
    best = min(random, key=lambda name: found["needed"][name]["heads"][MIDDLE])
    got = max(sum(m is not None for m in found["reached"][name]) for name in random)
    toy = min((name for name in random if "," not in name), key=lambda n: r["random"]["errors"][n]["heads"][MIDDLE][-1])
    error = min(found["errors"][name]["heads"][MIDDLE][-1] for name in random)
    even = found["uniform"]["heads"][MIDDLE]
    return (
        f"With {most} random features of the best kind, {got} of {found['heads']} heads are within {target:.0%} of "
        f"their output; the median head's error is {error:.2f}, where equal weights for all tokens give {even:.2f}, "
        f"and it would need about {power(found['needed'][best]['heads'][MIDDLE])} features ({best}). Exact features "
        f"need one more than there are tokens; of tokens of largest weight alone the median head needs "
        f"{_needed(found['reached'][TOP])}. On random layers {most} {toy} features leave an error of "
        f"{r['random']['errors'][toy]['heads'][MIDDLE][-1]:.2g}."
    )


# ----------------------------------------------------------------------------------------------------------- training


def _training_table(result: LabResult) -> Table:
    target = result.settings["target"]
    rows: list[list[str]] = []
    for where, order in (*(("model", order) for order in NAMES), ("random", "prompt")):
        found = result.results[where]["training"][order]
        curve = found["curve"]["heads"][MIDDLE]
        half = len(curve) // 2
        shown = [f"{curve[at]:.2f}" for at in (0, 1, half, len(curve) - 3)]
        interval = _ci([one[half] for one in found["curve"]["draws"]], ".2f")
        until, away = (found[key]["heads"] for key in ("until", "away"))
        spread = f"{until[LOW]:.0%} to {until[HIGH]:.0%}"
        name = NAMES[order] if where == "model" else "random layers, in order"
        rows.append([name, *shown[:3], interval, shown[3], f"{until[MIDDLE]:.0%}", spread, f"{away[MIDDLE]:.0%}"])
    columns = ["order of tokens", "at the start", "after 5 %", "after 50 %", "95 % interval", "after 90 %"]
    columns += [f"tokens until {target:.0%}", "10–90 % of heads", "steps away"]
    note = (
        f"{training_sentence(result)}\n{_where(result)}. ‖ŷ_t − h'‖/‖h'‖ after a share of the demonstrations' tokens, "
        "median head; W_0 holds the query's own tokens. 95 % intervals: Student over prompts. Tokens until "
        f"{target:.0%}: from there on the distance stays below. Steps away: steps that increase the distance. By "
        "attention weight is a control that knows the answer; shuffled is the null."
    )
    return Table("kernel: the dual model, token by token", columns, rows, note)


def training_sentence(result: LabResult) -> str:
    """What was found about the dual model's training, in one sentence."""
    found = result.results["model"]["training"]
    untils = {order: found[order]["until"]["heads"][MIDDLE] for order in NAMES}
    loss, centred = (
        {key: found[name][key]["heads"][MIDDLE] for key in ("largest", "its_attention")}
        for name in ("loss", "loss, centred keys")
    )
    return (
        f"In the prompt's order the median head comes within {result.settings['target']:.0%} of h' only after "
        f"{untils['prompt']:.0%} of the tokens (shuffled {untils['shuffled']:.0%}, by attention weight "
        f"{untils['attention']:.0%}). The representation loss follows another path: one token makes "
        f"{loss['largest']:.0%} of its decrease (median head; {centred['largest']:.0%} with centred keys, which give "
        f"the same attention) and gets {loss['its_attention']:.2g} ({centred['its_attention']:.2g}) of the attention."
    )


# ------------------------------------------------------------------------------------------------------------ figures


def _curve(x: Sequence[float], heads: Sequence[Sequence[float]], band: bool = True) -> Curve:
    return Curve(x, heads[MIDDLE], *((heads[LOW], heads[HIGH]) if band else ()))


def figures(result: LabResult) -> dict[str, Figure]:
    """Error against the number of features, and the dual model's distance and loss against the tokens it has seen."""
    note = (
        f"{_where(result)}; random layers: random weights on regression tokens. Top: error against the number "
        "of features. Middle: the dual model's distance to the head's output, token by token. Bottom: decrease of its "
        "representation loss, in the prompt's order. Lines: median head; bands: 10 to 90 % of heads."
    )
    panels = [_features_panel(result), *_training_panels(result)]
    return {"kernel": draw(panels, "How many features does a head need, and how is it approached?", note, (6.4, 8.6))}


def _features_panel(result: LabResult) -> Chart:
    r = result.results
    found, x = r["model"]["errors"], r["sizes"]
    best = {
        kind: min((n for n in found if n.startswith(kind)), key=lambda n: r["model"]["needed"][n]["heads"][MIDDLE])
        for kind in ("positive", "trigonometric")
    }
    fewer = [m for m in x if m <= _below(r)]
    series = {f"real: {name}": _curve(x, found[name]["heads"]) for name in best.values()}
    series["real: m largest weights"] = _curve(fewer, [q[: len(fewer)] for q in found[TOP]["heads"]])
    series |= {f"random layers: {kind}": _curve(x, r["random"]["errors"][kind]["heads"]) for kind in best}
    target = result.settings["target"]
    y: Axis = {"label": "relative error of the head's output", "log": True, "min": 1e-3, "max": 30.0}
    return lines(series, {"label": "number of features m (or of tokens)", "log": True}, y, {f"{target:.0%}": target})


def _training_panels(result: LabResult) -> list[Chart]:
    found = result.results["model"]["training"]
    curves = {f"real heads, {name}": found[order]["curve"]["heads"] for order, name in NAMES.items()}
    steps = len(next(iter(curves.values()))[MIDDLE]) - 1
    x = [number / steps for number in range(steps + 1)]
    distance = {name: _curve(x, heads, name.endswith("prompt")) for name, heads in curves.items()}
    distance["random layers"] = _curve(x, result.results["random"]["training"]["prompt"]["curve"]["heads"], False)
    loss = {
        "real heads, keys as they are": _curve(x, found["loss"]["curve"]["heads"]),
        "real heads, centred keys": _curve(x, found["loss, centred keys"]["curve"]["heads"]),
    }
    seen: Axis = {"label": "share of the demonstrations' tokens seen"}
    return [
        lines(distance, seen, {"label": "‖ŷ_t − h'‖ / ‖h'‖"}),
        lines(loss, seen, {"label": "share of the loss's decrease"}),
    ]
