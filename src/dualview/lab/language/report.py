"""The language lab's summary, tables and figures: means over seeds and paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualview.lab.charts import lines
from dualview.lab.gpt.model import NAMES
from dualview.lab.harness import LabResult, Table, between, number
from dualview.lab.summaries import interval_curve, mean, over_seeds, over_trainings_or_rows, range_curve
from dualview.report.charts.spec import Axis
from dualview.report.figures.curves import Curve
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Training = dict[str, Any]

CONTROLS = ("token_shift", "alibi")
TITLES = {name: name.replace("_", " ") for name in NAMES} | {"plain": "plain softmax", "alibi": "ALiBi"}
LIMITS = (
    "Differences are paired: same seed, same blocks of text. 95 % intervals: with several seeds Student over "
    "seeds; with one seed bootstrap over blocks, which does not cover another seed."
)


# ------------------------------------------------------------------------------------------------------------ summary


def summarise(trainings: Sequence[Training], lengths: Sequence[int]) -> dict[str, Any]:
    """Each variant over its seeds, each pair's differences, and a sentence for each variant."""
    names = list(dict.fromkeys(training["variant"] for training in trainings))
    variants = {name: _variant([t for t in trainings if t["variant"] == name], lengths) for name in names}
    pairs = [(name, "plain") for name in names if name != "plain" and "plain" in names]
    pairs += [("momentum", control) for control in CONTROLS if {"momentum", control} <= set(names)]
    differences = [_difference(trainings, a, b, lengths) for a, b in pairs]
    sentences = [sentence for each in differences if (sentence := _sentence(each, lengths[-1]))]
    return {"variants": variants, "differences": differences, "sentences": sentences}


def _variant(trainings: Sequence[Training], lengths: Sequence[int]) -> dict[str, Any]:
    measured = [t["held_out"] for t in trainings if t["held_out"] is not None]
    perplexity = {n: over_seeds([each[n]["perplexity"] for each in measured]) for n in map(str, lengths) if measured}
    return {
        "seeds": [t["seed"] for t in trainings],
        "parameters": trainings[0]["parameters"],
        "perplexity": perplexity,
        "few_shot": over_seeds([float(_accuracies(t).mean()) for t in trainings if t["few_shot"]]),
        "chance": mean([task["chance"] for task in trainings[0]["few_shot"]]),
        "saved_bytes": trainings[0]["saved_bytes"],
        "train_loss": over_seeds([stretch(t, 0.8, 1.0) for t in trainings]),
        "train_loss_before": over_seeds([stretch(t, 0.6, 0.8) for t in trainings]),
        "status": sorted({t["status"] for t in trainings}),
    }


def stretch(training: Training, begin: float, end: float) -> float | None:
    """The mean training loss over a part of the training, from one fraction of its steps to another."""
    curve = training["curve"]
    inside = [
        loss
        for step, loss in zip(curve["step"], curve["loss"], strict=True)
        if begin * training["steps"] < step <= end * training["steps"]
    ]
    return mean(inside)


def _difference(trainings: Sequence[Training], name: str, other: str, lengths: Sequence[int]) -> dict[str, Any]:
    """`name` less `other`, seed by seed: in held-out loss at each length, and in few-shot accuracy."""
    mine, theirs = ({t["seed"]: t for t in trainings if t["variant"] == each} for each in (name, other))
    both = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
    usable = [(a, b) for a, b in both if a["held_out"] is not None and b["held_out"] is not None]
    loss = {
        n: over_trainings_or_rows([_blocks(a, n) - _blocks(b, n) for a, b in usable], f"{name}/{other}/{n}")
        for n in map(str, lengths)
    }
    asked = [(a, b) for a, b in usable if a["few_shot"]]
    accuracy = over_trainings_or_rows([_accuracies(a) - _accuracies(b) for a, b in asked], f"{name}/{other}/few-shot")
    seeds = [a["seed"] for a, _ in usable]
    return {"variant": name, "against": other, "seeds": seeds, "loss": loss, "few_shot": accuracy}


def _blocks(training: Training, length: str) -> np.ndarray:
    return np.array(training["held_out"][length]["blocks"])


def _accuracies(training: Training) -> np.ndarray:
    return np.array([statistics.fmean(task["icl"]) for task in training["few_shot"]])


def percent(difference: float) -> float:
    """A difference of losses as a change of perplexity in per cent.

    >>> round(percent(0.01), 2)
    1.01
    """
    return 100 * math.expm1(difference)


def _sentence(difference: Mapping[str, Any], length: int) -> str | None:
    """The conclusion from the interval at the longest length."""
    found = difference["loss"][str(length)]
    title, other = TITLES[difference["variant"]], TITLES[difference["against"]]
    if found is None:
        return f"{title} cannot be compared with {other}: a training diverged."
    value = f"{percent(found['mean']):+.2f} %"
    if found["ci"] is None:
        return f"{title} against {other}: {value} in perplexity at {length} tokens, without an interval."
    low, high = found["ci"]
    between = f"{value} in perplexity at {length} tokens ({percent(low):+.2f} to {percent(high):+.2f})"
    verb = "is better than" if high < 0 else "is worse than" if low > 0 else "cannot be distinguished from"
    limit = f"over {len(difference['seeds'])} seeds" if found["over"] == "seeds" else "one seed, so no more than a hint"
    return f"{title} {verb} {other}: {between}; {limit}."


# ------------------------------------------------------------------------------------------------------------- tables


def tables(result: LabResult) -> list[Table]:
    """The trainings, their differences, few-shot accuracy by task, and what each attention costs."""
    differences = [_differences_table(result)] if result.results["differences"] else []
    asked = any(training["few_shot"] for training in result.results["trainings"])
    return [_models_table(result), *differences, *([_tasks_table(result)] if asked else []), _costs_table(result)]


def _models_table(result: LabResult) -> Table:
    found, lengths = result.results, result.results["lengths"]
    rows = [_model_row(name, each, lengths) for name, each in found["variants"].items()]
    text = found["text"]
    where = ", ".join(text["source"])
    note = (
        f"Text: {where}, {text['tokens']['train']:,} tokens to train on ({text['tokenizer']}, {text['vocab']:,} "
        f"tokens), perplexity on {found['held_out_tokens']:,} of {text['tokens']['held_out']:,} held out "
        f"({text['held_out']}). ± is the standard deviation over seeds. Perplexity is per token of this tokenizer. "
        f"Few-shot accuracy by chance: {number(mean([each['chance'] for each in found['variants'].values()]))}. "
        "Late gain: training loss in the fourth fifth of the steps less that in the last."
    )
    columns = ["attention", "parameters", "seeds", *(f"ppl at {length}" for length in lengths), "few-shot", "late gain"]
    return Table("language: small GPTs that differ in their attention", columns, rows, note)


def _model_row(name: str, each: Mapping[str, Any], lengths: Sequence[int]) -> list[str]:
    before, last = each["train_loss_before"]["mean"], each["train_loss"]["mean"]
    odd = [status for status in each["status"] if status != "ok"]
    return [
        TITLES[name] + (f" ({', '.join(odd)})" if odd else ""),
        f"{each['parameters']:,}",
        str(len(each["seeds"])),
        *(spread(each["perplexity"].get(str(length)), 2) for length in lengths),
        spread(each["few_shot"], 3),
        "" if before is None or last is None else f"{before - last:.3f}",
    ]


def _costs_table(result: LabResult) -> Table:
    costs = result.provenance["run"]["cost"]
    rows: list[list[str]] = []
    for name, each in result.results["variants"].items():
        own = [costs[f"{name}/{seed}"] for seed in each["seeds"]]
        paces = [mean([cost.get(key) for cost in own]) for key in ("seconds_per_step", "processor_seconds_per_step")]
        peak = max((cost["peak_bytes"] or 0 for cost in own), default=0)
        rows.append(
            [
                TITLES[name],
                *("" if pace is None else f"{1000 * pace:.1f}" for pace in paces),
                f"{each['saved_bytes'] / 1e6:.1f}",
                f"{peak / 1e6:.0f}" if peak else "",
            ]
        )
    note = (
        f"On {', '.join(sorted({cost['machine'] for cost in costs.values()}))}. Times are of this machine and of "
        "whatever else it was doing; processor time is this program's. Saved: memory kept for the backward pass."
    )
    columns = ["attention", "ms a step", "ms of processor", "saved MB", "peak GPU MB"]
    return Table("language: cost", columns, rows, note)


def spread(over: Mapping[str, Any] | None, digits: int) -> str:
    if over is None or over["mean"] is None:
        return "none"
    return f"{over['mean']:.{digits}f}" + ("" if over["sd"] is None else f" ± {over['sd']:.{digits}f}")


def _differences_table(result: LabResult) -> Table:
    lengths = result.results["lengths"]
    rows: list[list[str]] = []
    for each in result.results["differences"]:
        row = [f"{TITLES[each['variant']]} − {TITLES[each['against']]}", str(len(each["seeds"]))]
        row += [change(each["loss"][str(length)]) for length in lengths]
        few = each["few_shot"]
        row.append("none" if few is None else f"{few['mean']:+.3f}{bracketed(few['ci'], '+.3f')}")
        rows.append(row)
    columns = ["difference", "seeds", *(f"ppl at {length}, %" for length in lengths), "few-shot accuracy"]
    limits = f"{LIMITS} For few-shot accuracy the units are tasks instead of blocks."
    note = "\n".join([*result.results["sentences"], limits])
    return Table("language: differences, with 95 % intervals", columns, rows, note)


def change(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none"
    ci = None if found["ci"] is None else [percent(edge) for edge in found["ci"]]
    return f"{percent(found['mean']):+.2f}{bracketed(ci, '+.2f')}"


def bracketed(ci: Sequence[float] | None, style: str) -> str:
    return "" if ci is None else f" ({between(ci, style)})"


def _tasks_table(result: LabResult) -> Table:
    trainings = [training for training in result.results["trainings"] if training["few_shot"]]
    names = list(dict.fromkeys(training["variant"] for training in trainings))
    tasks = [task["task"] for task in trainings[0]["few_shot"]]
    rows: list[list[str]] = []
    for index, task in enumerate(tasks):
        first = trainings[0]["few_shot"][index]
        shots = sorted({n for t in trainings for n in t["few_shot"][index]["shots_used"]})
        row = [task, f"{first['chance']:.3f}", str(first["n_queries"]), f"{shots[0]}–{shots[-1]}"]
        for name in names:
            own = [t["few_shot"][index] for t in trainings if t["variant"] == name]
            icl, zsl = mean([mean(each["icl"]) for each in own]), mean([each["zsl"] for each in own])
            row.append(f"{icl:.3f} ({zsl:.3f})")
        rows.append(row)
    constant = sum(task["constant_draws"] for t in trainings for task in t["few_shot"])
    asked = sum(len(task["icl"]) for t in trainings for task in t["few_shot"])
    note = (
        "Mean over seeds and draws of demonstrations; without demonstrations in brackets. "
        f"In {constant} of {asked} draws one label was predicted for every query."
    )
    columns = ["task", "chance", "queries", "shots", *(TITLES[name] for name in names)]
    return Table("language: few-shot accuracy by task", columns, rows, note)


# ------------------------------------------------------------------------------------------------------------ figures


def figures(result: LabResult) -> dict[str, Figure]:
    """The training curves, and each variant's perplexity against the plain model's."""
    found, settings = result.results, result.settings
    note = (
        f"{settings['layers']} layers of {settings['d_model']}, {found['text']['tokens']['train']:,} tokens of "
        f"{', '.join(found['text']['source'])}; {settings['steps']} steps of {settings['batch']} × "
        f"{settings['context']} tokens. Seeds: {', '.join(map(str, result.seeds))}."
    )
    loss: dict[str, Curve] = {}
    for name in found["variants"]:
        own = [t["curve"] for t in found["trainings"] if t["variant"] == name]
        loss[TITLES[name]] = range_curve(max((c["step"] for c in own), key=len), [c["loss"] for c in own])
    panels = [lines(loss, {"label": "step", "log": True}, {"label": "training loss, nats per token"})]
    against = {
        TITLES[each["variant"]]: interval_curve(found["lengths"], list(each["loss"].values()), percent)
        for each in found["differences"]
        if each["against"] == "plain" and all(each["loss"].values())
    }
    note += " Training loss: bands are the range over seeds."
    if against:
        x: Axis = {"label": "tokens read at a time"}
        panels.append(lines(against, x, {"label": "perplexity against plain, %"}, {"plain softmax": 0.0}, [*loss]))
        note += f" Perplexity: below 0 is better than plain; bands are 95 % intervals. {LIMITS}"
    return {"language": draw(panels, "Small GPTs that differ in their attention", note, (6.4, 3.2 * len(panels)))}
