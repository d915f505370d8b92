"""The retrofit lab's summary, tables and figure: each arm less the control, pair by pair."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from dualview.lab.harness import LabResult, Table
from dualview.lab.language.report import bracketed, change, percent, spread
from dualview.lab.retrofit.arms import title_of
from dualview.lab.summaries import mean, over_seeds, over_trainings_or_rows
from dualview.metrics.statistics import query_interval
from dualview.report.figures.style import dress, look, new_figure, small_print

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Training = Mapping[str, Any]

USABLE = 10.0
"""Signed values count as usable where the intervals of their change in perplexity end below this many per cent."""
LIMITS = (
    "Differences are paired: same seed, same blocks of text, same queries. 95 % intervals: Student over seeds, which "
    "differ in the order of the text, and bootstrap over blocks of text or queries of the mean over seeds, where 'and' "
    "stands between them; better or worse only where both exclude 0. With one seed the bootstrap alone, which does not "
    "cover another seed."
)


# ------------------------------------------------------------------------------------------------------------ summary


def summarise(trainings: Sequence[Training], starts: Mapping[str, Any], lengths: Sequence[int]) -> dict[str, Any]:
    """Each arm over its seeds, its differences from the control, and a sentence for each."""
    names = list(dict.fromkeys(training["arm"] for training in trainings))
    of = {name: [t for t in trainings if t["arm"] == name] for name in names}
    arms = {name: _arm(of[name], starts.get(name, starts["plain"]), lengths) for name in names}
    works = _works(starts["plain"])
    differences = [_difference(name, of[name], of["plain"], lengths, works) for name in names if name != "plain"]
    return {
        "arms": arms,
        "works": works,
        "differences": differences,
        "sentences": [_sentence(each, lengths[-1], works) for each in differences],
    }


def _arm(trainings: Sequence[Training], start: Training, lengths: Sequence[int]) -> dict[str, Any]:
    measured = [t["held_out"] for t in trainings if t["held_out"] is not None]
    learnt = [each for t in trainings if t["learnt"] for layer in t["learnt"] for each in layer]
    before = start["held_out"]
    return {
        "seeds": [t["seed"] for t in trainings],
        "status": sorted({t["status"] for t in trainings}),
        "start_perplexity": None if before is None else before[str(lengths[-1])]["perplexity"],
        "perplexity": {n: over_seeds([each[n]["perplexity"] for each in measured]) for n in map(str, lengths)},
        "accuracy": over_trainings_or_rows([_right(t) for t in trainings if t["few_shot"]], "accuracy"),
        "by_labels": {
            labels: mean([float(_right(t, labels=labels).mean()) for t in trainings if t["few_shot"]])
            for labels in _labels(next((t for t in trainings if t["few_shot"]), start))
        },
        "learnt": [min(learnt), statistics.median(learnt), max(learnt)] if learnt else None,
    }


def _works(start: Training) -> list[str]:
    """The tasks on which demonstrations help the pretrained model, by the interval over queries."""
    found: list[str] = []
    for task in start["few_shot"]:
        gap = _shares(task["right"]) - _shares([task["right_without"]])
        interval = query_interval(gap, seed=0, name=f"{name_of(task)}/works")
        if interval is not None and interval.low > 0:
            found.append(name_of(task))
    return found


def name_of(task: Mapping[str, Any]) -> str:
    """How tables name a task: with its label words, where these are not its own."""
    return task["task"] if _words(task) == "natural" else f"{task['task']}, {_words(task)} labels"


def _words(task: Mapping[str, Any]) -> str:
    return task.get("labels", "natural")


def _labels(asked: Training) -> list[str]:
    """The kinds of label words, where there are several."""
    kinds = list(dict.fromkeys(map(_words, asked["few_shot"])))
    return kinds if len(kinds) > 1 else []


def _shares(right: Sequence[str]) -> Float[np.ndarray, " query"]:
    """For every query the share of draws in which it is right."""
    return np.array([[int(x) for x in draw] for draw in right], dtype=float).mean(0)


def _right(
    training: Training, only: Sequence[str] | None = None, labels: str | None = None
) -> Float[np.ndarray, " query"]:
    """For every query of every task the share of draws in which it is right, weighted so that tasks count equally."""
    tasks = [
        _shares(task["right"])
        for task in training["few_shot"]
        if (only is None or name_of(task) in only) and (labels is None or _words(task) == labels)
    ]
    total = sum(map(len, tasks))
    return np.concatenate([task * total / (len(tasks) * len(task)) for task in tasks])


def _difference(
    name: str, mine: Sequence[Training], control: Sequence[Training], lengths: Sequence[int], works: Sequence[str]
) -> dict[str, Any]:
    """An arm less the control, seed by seed: held-out loss at each length, and in-context accuracy."""
    by_seed = {t["seed"]: t for t in control}
    pairs = [(t, by_seed[t["seed"]]) for t in mine if t["seed"] in by_seed]
    usable = [(a, b) for a, b in pairs if a["held_out"] is not None and b["held_out"] is not None]

    def blocks(training: Training, length: str) -> np.ndarray:
        return np.array(training["held_out"][length]["blocks"])

    loss = {n: _over_both([blocks(a, n) - blocks(b, n) for a, b in usable], f"{name}/{n}") for n in map(str, lengths)}
    asked = [(a, b) for a, b in usable if a["few_shot"]]
    accuracy = _over_both([_right(a) - _right(b) for a, b in asked], f"{name}/accuracy")
    where = [_right(a, works) - _right(b, works) for a, b in asked if works]
    by_labels = {
        kind: _over_both([_right(a, labels=kind) - _right(b, labels=kind) for a, b in asked], f"{name}/{kind}")
        for kind in (_labels(asked[0][0]) if asked else ())
    }
    return {
        "arm": name,
        "seeds": [a["seed"] for a, _ in usable],
        "loss": loss,
        "accuracy": accuracy,
        "accuracy_by_labels": by_labels,
        "accuracy_where_it_works": _over_both(where, f"{name}/works"),
    }


def _over_both(runs: Sequence[Float[np.ndarray, " row"]], name: str) -> dict[str, Any] | None:
    """The interval over seeds and, as `rows_ci`, that over blocks or queries: seeds all read the same ones."""
    found = over_trainings_or_rows(runs, name)
    if found is None:
        return None
    rows = query_interval(np.mean(runs, axis=0), seed=0, name=f"{name}/rows") if len(runs) > 1 else None
    return {**found, "rows_ci": None if rows is None else rows.to_json()}


def _sentence(difference: Mapping[str, Any], length: int, works: Sequence[str]) -> str:
    """The conclusion about one arm: perplexity at the longest length, accuracy and, for signed values, use."""
    title, loss = title_of(difference["arm"]), difference["loss"][str(length)]
    if loss is None:
        return f"{title}: cannot be compared, a training diverged."
    parts = [f"perplexity at {length} tokens {_change(loss)} %, {_verdict(loss, 'worse', 'better')}"]
    kinds = difference.get("accuracy_by_labels", {})
    if difference["accuracy"] is not None and not kinds:
        parts.append(f"in-context accuracy {_accuracy(difference['accuracy'])}, {_verdict(difference['accuracy'])}")
    parts += [
        f"in-context accuracy with {kind} labels {_accuracy(found)}, {_verdict(found)}" for kind, found in kinds.items()
    ]
    if (where := difference["accuracy_where_it_works"]) is not None:
        place = f"the {len(works)} prompts where demonstrations help" if kinds else ", ".join(works)
        parts.append(f"on {place} {_accuracy(where)}, {_verdict(where)}")
    if difference["arm"].startswith("sign"):
        fine = loss["ci"] is not None and percent(max(ci[1] for ci in (loss["ci"], loss["rows_ci"]) if ci)) < USABLE
        parts.append(f"usable: below +{USABLE:g} %" if fine else f"not shown usable: not below +{USABLE:g} %")
    limit = "over seeds" if loss["over"] == "seeds" else "one seed, so no more than a hint"
    return f"{title}: {'; '.join(parts)}; {limit}."


def _verdict(found: Mapping[str, Any], above: str = "better", below: str = "worse") -> str:
    if found["ci"] is None:
        return "without an interval"
    if found["ci"][0] == found["ci"][1] == 0:
        return "the same in every pair"
    lows, highs = zip(found["ci"], *([found["rows_ci"]] if found["rows_ci"] else []), strict=True)
    return above if min(lows) > 0 else below if max(highs) < 0 else "not distinguishable from the control"


# ------------------------------------------------------------------------------------------------------------- tables


def tables(result: LabResult) -> list[Table]:
    """The arms with their differences from the control, accuracy by task, and the speed of the training."""
    asked = any(t["few_shot"] for t in result.results["trainings"])
    return [_arms_table(result), *([_tasks_table(result)] if asked else []), _speed_table(result)]


def _arms_table(result: LabResult) -> Table:
    found, lengths = result.results, result.results["lengths"]
    differences = {each["arm"]: each for each in found["differences"]}
    rows: list[list[str]] = []
    for name, each in found["arms"].items():
        own = differences.get(name)
        odd = [status for status in each["status"] if status != "ok"]
        rows.append(
            [
                title_of(name) + (f" ({', '.join(odd)})" if odd else ""),
                _number(each["start_perplexity"], ".2f"),
                *(spread(each["perplexity"].get(str(n)), 2) for n in lengths),
                "" if own is None else _change(own["loss"][str(lengths[-1])]),
                *_accuracies(each, own),
                "" if each["learnt"] is None else " / ".join(f"{x:.3f}" for x in each["learnt"]),
            ]
        )
    text, settings = found["text"], result.settings
    training = found["trainings"][0]
    about = (
        f"{result.provenance['model']}, {training['tokens']:,} tokens each ({training['steps']} steps of "
        f"{settings['batch']} × {settings['context']}) of {', '.join(text['source'])}; perplexity on "
        f"{found['held_out_tokens']:,} held-out tokens. Seeds: {', '.join(map(str, result.seeds))}. ± is the standard "
        f"deviation over seeds. Learnt: lowest / median / highest coefficient over heads. {LIMITS}"
    )
    if (works := found.get("works")) is not None and found["starts"]["plain"]["few_shot"]:
        named = ", ".join(works) or "none"
        about += f" Tasks on which demonstrations help the pretrained model, by the interval over queries: {named}."
    if left_out := found.get("left_out"):
        about += f" Not trained, for want of time: {', '.join(left_out)}."
    kinds = [f"accuracy, {kind} labels" for kind in _labels(found["starts"]["plain"])] or ["accuracy"]
    columns = ["added to the attention", "ppl before", *(f"ppl at {n}" for n in lengths), "change, %"]
    columns += [column for kind in kinds for column in (kind, "difference")]
    note = "\n".join([*found["sentences"], about])
    return Table("retrofit: arms and control", [*columns, "learnt"], rows, note)


def _accuracies(arm: Mapping[str, Any], difference: Mapping[str, Any] | None) -> list[str]:
    """An arm's accuracy and its difference from the control, for each kind of label words."""
    kinds = arm.get("by_labels") or {"": None if arm["accuracy"] is None else arm["accuracy"]["mean"]}
    gaps = {} if difference is None else difference.get("accuracy_by_labels") or {"": difference["accuracy"]}
    return [
        cell
        for kind, value in kinds.items()
        for cell in (_number(value, ".3f"), "" if difference is None else _accuracy(gaps.get(kind)))
    ]


def _change(found: Mapping[str, Any] | None) -> str:
    """A change of perplexity in per cent, with its intervals."""
    if found is None:
        return "none"
    rows = found["rows_ci"] and [percent(edge) for edge in found["rows_ci"]]
    return change(found) + _and(rows, "+.2f")


def _accuracy(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none"
    return f"{found['mean']:+.3f}{bracketed(found['ci'], '+.3f')}{_and(found['rows_ci'], '+.3f')}"


def _and(ci: Sequence[float] | None, style: str) -> str:
    return "" if ci is None else f" and{bracketed(ci, style)}"


def _tasks_table(result: LabResult) -> Table:
    found = result.results
    before = found["starts"]["plain"]["few_shot"]
    by_arm = {
        name: [task for training in found["trainings"] if training["arm"] == name for task in training["few_shot"]]
        for name in found["arms"]
    }
    rows = [
        [
            name_of(task),
            f"{task['chance']:.3f}",
            str(task["n_queries"]),
            _with_and_without([task]),
            *(_with_and_without([row for row in asked if name_of(row) == name_of(task)]) for asked in by_arm.values()),
        ]
        for task in before
    ]
    columns = ["task", "chance", "queries", "pretrained", *(title_of(name) for name in by_arm)]
    asked = [task for tasks in by_arm.values() for task in tasks]
    constant, draws = sum(task["constant_draws"] for task in asked), sum(len(task["icl"]) for task in asked)
    note = (
        f"In-context accuracy with up to {result.settings['shots']} demonstrations, mean over seeds and "
        f"{result.settings['draws']} draws of them; without demonstrations in brackets. In {constant} of {draws} draws "
        "one label was predicted for every query."
    )
    return Table("retrofit: in-context accuracy by task", columns, rows, note)


def _with_and_without(asked: Sequence[Mapping[str, Any]]) -> str:
    """The mean accuracy with demonstrations and, in brackets, without."""
    accuracy, bare = mean([mean(task["icl"]) for task in asked]), mean([task["zsl"] for task in asked])
    return "none" if accuracy is None else f"{accuracy:.3f} ({bare:.3f})"


def _speed_table(result: LabResult) -> Table:
    costs: Mapping[str, Any] = result.provenance["run"]["cost"]
    rows: list[list[str]] = []
    for name, each in result.results["arms"].items():
        own = [costs[f"{name}/{seed}"] for seed in each["seeds"]]

        def over(key: str, own: Sequence[Mapping[str, Any]] = own) -> float | None:
            return mean([cost[key] for cost in own])

        tokens, flops, share = over("tokens_per_second"), over("flops_per_second"), over("matrix_share")
        peak = over("peak_bytes")
        rows.append(
            [
                title_of(name),
                _number(tokens, ",.0f"),
                "none" if flops is None else f"{flops / 1e12:,.3f}",
                "none" if share is None else f"{100 * share:.0f} %",
                "" if peak is None else f"{peak / 1e9:.1f}",
                "yes" if all(cost["compiled"] for cost in own) else "no",
            ]
        )
    rates = sorted({cost["matrix_rate"] for cost in costs.values()})
    note = (
        f"On {', '.join(sorted({cost['machine'] for cost in costs.values()}))}, {result.settings['precision']}. Model "
        f"operations: 6 for each parameter and token, and causal attention. Matrix rate, measured in each process: "
        f"{', '.join(f'{rate / 1e12:,.2f}' for rate in rates)} TFLOP/s."
    )
    columns = ["added to the attention", "tokens/s", "model TFLOP/s", "of the matrix rate", "peak GPU GB", "compiled"]
    return Table("retrofit: speed of the training", columns, rows, note)


def _number(value: float | None, style: str) -> str:
    return "none" if value is None else format(value, style)


# -------------------------------------------------------------------------------------------------------------- figure


def figures(result: LabResult) -> dict[str, Figure]:
    """Every arm less the control: change of perplexity and of in-context accuracy, each with its interval."""
    found, length = result.results, result.results["lengths"][-1]
    differences = found["differences"]
    if not differences:  # the control alone, where the time ended early
        return {}
    figure = new_figure(4.2 + 2.2 * len(differences[0].get("accuracy_by_labels") or [""]), 1.7 + 0.3 * len(differences))
    kinds = list(differences[0].get("accuracy_by_labels") or [""])
    left, *others = figure.subplots(1, 1 + len(kinds), sharey=True)
    titles = ["in-context accuracy, difference" + (f"\n{kind} label words" if kind else "") for kind in kinds]
    for axes, label in zip((left, *others), (f"perplexity at {length}, change in %", *titles), strict=True):
        dress(axes, xlabel=label)
        axes.axvline(0, color="#333333", linewidth=0.8)
    losses = [_in_percent(each["loss"][str(length)]) for each in differences if each["loss"][str(length)]]
    wide = any(abs(each["mean"]) > 1 for each in losses)
    if wide:
        left.set_xscale("symlog", linthresh=1.0)
    left.xaxis.set_major_formatter(_signed)
    for at, each in enumerate(differences):
        loss = each["loss"][str(length)]
        _interval(left, at, None if loss is None else _in_percent(loss))
        for axes, kind in zip(others, kinds, strict=True):
            _interval(axes, at, each["accuracy_by_labels"].get(kind) if kind else each["accuracy"])
    left.set_yticks(range(len(differences)), [title_of(each["arm"]) for each in differences], fontsize=7.5)
    left.set_ylim(len(differences) - 0.5, -0.5)
    note = (
        f"{result.provenance['model']}, {found['trainings'][0]['tokens']:,} tokens for each arm and seed. "
        f"Left: below 0 is better{', linear within ±1 %' if wide else ''}; right: above 0 is better. "
        "95 % intervals of paired differences: "
        "thick over seeds (with one seed over blocks or queries), thin over blocks or queries of the mean over seeds."
    )
    small_print(figure, "A pretrained model trained further: each change less the control", note)
    return {"retrofit": figure}


def _signed(value: float, _place: int) -> str:
    return f"{value:+g}" if value else "0"


def _in_percent(loss: Mapping[str, Any]) -> dict[str, Any]:
    edges = {key: loss[key] and [percent(edge) for edge in loss[key]] for key in ("ci", "rows_ci")}
    return {"mean": percent(loss["mean"]), **edges}


def _interval(axes: Any, at: int, found: Mapping[str, Any] | None) -> None:
    if found is None:
        return
    how = look(at)
    if found["ci"] is not None:
        axes.plot(found["ci"], [at, at], color=how.colour, linewidth=2.4)
    if found["rows_ci"] is not None:
        axes.plot(found["rows_ci"], [at, at], color=how.colour, linewidth=0.9, marker="|", markersize=6)
    axes.plot([found["mean"]], [at], marker=how.marker, color=how.colour, markersize=5, linestyle="none")
