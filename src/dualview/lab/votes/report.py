"""The votes lab's summary, tables and figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualview.lab.formatting import between, number
from dualview.lab.harness import LabResult, Table
from dualview.lab.summaries import mean
from dualview.lab.votes import classifier, on_model
from dualview.metrics.statistics import draw_interval, query_interval
from dualview.report.charts.spec import Chart, Series
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = Mapping[str, Any]
MEASURES = ("output", "right", "wrong, target", "wrong, output")


def summarise(classifiers: Mapping[str, Sequence[Found]], tasks: Mapping[str, Sequence[Found]]) -> dict[str, Any]:
    """Means with intervals over seeds (and queries), and what they say."""
    votes = {name: _of_classifier(runs) for name, runs in classifiers.items()}
    model = {name: {rule: _of_model(draws, rule) for rule in on_model.RULES} for name, draws in tasks.items()}
    said = [_classifier_sentence(name, runs, votes[name]) for name, runs in classifiers.items()]
    return {"votes": votes, "model_votes": model, "sentences": [*said, *([_model_sentence(model)] if model else [])]}


def _over(values: Sequence[float | None]) -> dict[str, Any]:
    found = draw_interval(values, (0.0, 1.0))
    return {"mean": mean(values), "ci": None if found is None else found.to_json()}


def _of_classifier(runs: Sequence[Found]) -> list[dict[str, Any]]:
    """By layer and rule: each agreement over seeds, and by how much the mass beats the untrained layer's."""

    def of(layer: int, rule: str, measure: str) -> list[float | None]:
        return [run["layers"][layer][rule][measure] for run in runs]

    return [
        {
            rule: {measure: _over(of(layer, rule, measure)) for measure in MEASURES}
            | {"over untrained": _difference(of(layer, rule, "output"), of(layer, classifier.RULES[2], "output"))}
            for rule in classifier.RULES
        }
        for layer in range(len(runs[0]["layers"]))
    ]


def _difference(after: Sequence[float | None], before: Sequence[float | None]) -> dict[str, Any]:
    gaps = [a - b for a, b in zip(after, before, strict=True) if a is not None and b is not None]
    found = draw_interval(gaps)
    return {"mean": mean(gaps), "ci": None if found is None else found.to_json()}


def _of_model(draws: Sequence[Found], rule: str) -> dict[str, Any]:
    """One vote's agreement with the answer that it is to predict, and its excess over what the margins give."""
    setting = on_model.RULES[rule]
    agree, excess, shuffled = [], [], []
    for each in draws:
        answers, vote = np.array(each["answers"][setting]), np.array(each["rules"][rule]["vote"])
        agree.append((vote == answers).astype(float))
        excess.append(agree[-1] - on_model.by_margins(vote, answers))
        shuffled.append(each["rules"][rule]["shuffled"])
    over_draws = draw_interval([float(row.mean()) for row in excess])
    over_queries = query_interval(np.mean(excess, axis=0), seed=0, name=f"votes/{rule}")
    layers = np.array([each["rules"][rule]["layers"] for each in draws])
    bounds = [draw_interval(column.tolist()) for column in layers.T]

    def same(kind: str, other: str) -> float:
        pairs = [(each["rules"][rule][kind], {**each["answers"], "gold": each["gold"]}[other]) for each in draws]
        return statistics.fmean(float(np.mean(np.array(a) == np.array(b))) for a, b in pairs)

    return {
        "agreement": float(np.mean(agree)),
        "raw": same("raw", setting),
        "majority": statistics.fmean(each["majority"][setting] for each in draws),
        "shuffled": float(np.mean(shuffled)),
        "gold": same("vote", "gold"),
        "answers right": statistics.fmean(
            float(np.mean(np.array(each["answers"][setting]) == np.array(each["gold"]))) for each in draws
        ),
        "excess": float(np.mean(excess)),
        "over draws": None if over_draws is None else over_draws.to_json(),
        "over queries": None if over_queries is None else over_queries.to_json(),
        "layers": layers.mean(0).tolist(),
        "layers_ci": [None if each is None else each.to_json() for each in bounds],
    }


def _classifier_sentence(name: str, runs: Sequence[Found], layers: Sequence[Found]) -> str:
    accuracy = statistics.fmean(run["accuracy"] for run in runs)
    last, wrong = layers[-1], [layer["mass"]["wrong, output"]["mean"] for layer in layers]
    gain = [layer["mass"]["over untrained"] for layer in layers[1:]]
    learnt = all(each["ci"] is not None and each["ci"][0] > 0 for each in gain)
    return (
        f"{name}: the attention mass predicts the classifier's output in "
        f"{_listed(layer['mass']['output']['mean'] for layer in layers)} of the test examples, layer by layer "
        f"(accuracy {accuracy:.2f}), with untrained weights in "
        f"{_listed(layer[classifier.RULES[2]]['output']['mean'] for layer in layers)}: above the first layer, "
        f"training {'adds' if learnt else 'does not clearly add'} to it. Where the classifier is wrong, the mass "
        f"agrees with its output in {_listed(wrong)}. Signed contributions of the last layer agree with the output in "
        f"{number(last['signed']['output']['mean'], '.2f')}, with shuffled classes in "
        f"{number(last['signed, shuffled classes']['output']['mean'], '.2f')}: part of what they say is in the error "
        "signals and needs no classes."
    )


def _listed(values: Any) -> str:
    parts = [number(value, ".2f") for value in values]
    return ", ".join(parts[:-1]) + f" and {parts[-1]}"


def _model_sentence(model: Mapping[str, Mapping[str, Found]]) -> str:
    """Which votes exceed the margins by both intervals."""

    def holds(found: Found) -> bool:
        return all(found[over] is not None and found[over][0] > 0 for over in ("over draws", "over queries"))

    every = [(task, rule, found) for task, rules in model.items() for rule, found in rules.items() if holds(found)]
    ft, icl = (
        ", ".join(
            f"{rule} on {task} (+{f['excess']:.2f})" for task, rule, f in every if on_model.RULES[rule] == setting
        )
        or "no vote"
        for setting in ("ft", "icl")
    )
    return (
        f"Language model: of the votes for fine-tuning's answer, {ft} exceeds what the margins give by both intervals; "
        f"of those for in-context learning's, {icl}."
    )


# -------------------------------------------------------------------------------------------------------------- tables


def tables(result: LabResult) -> list[Table]:
    """Agreement by layer, the same where the classifier is right and wrong, and the language model."""
    found = result.results
    said = summarise(found["classifiers"], found["tasks"])
    settings = result.settings
    rows, split = [], []
    for name, layers in said["votes"].items():
        for rule in classifier.RULES:
            own = [layer[rule] for layer in layers]
            shown = [(f"{number(o['output']['mean'])}", between(o["output"]["ci"], ".3f")) for o in own]
            rows.append([name, rule, *(cell for pair in shown for cell in pair)])
            split.append(
                [name, rule, *(" / ".join(number(o[m]["mean"], ".2f", "–") for m in MEASURES[1:]) for o in own)]
            )
    numbers = range(1, 1 + max((len(layers) for layers in said["votes"].values()), default=0))
    columns = ["examples", "vote", *(word for n in numbers for word in (f"layer {n}", "95 % interval"))]
    runs = [run for each in found["classifiers"].values() for run in each]
    residual = max((run["residual"] for run in runs), default=0.0)
    tested = ", ".join(
        f"{name} {statistics.fmean(r['wrong'] for r in each):.0f} of {each[0]['tested']}"
        for name, each in found["classifiers"].items()
    )
    note = (
        f"{settings['seeds']} seeds; Student's intervals over seeds. Each layer's update is the sum over its recorded "
        f"examples within {residual:.0e} of itself. The first layer reads the examples, whatever its weights.\n"
        + "\n".join(said["sentences"][: len(said["votes"])])
    )
    wrong = f"Wrong answers of the classifier, mean over seeds: {tested}."
    made = [
        Table("votes: how often the training examples' vote is the classifier's output", columns, rows, note),
        Table(
            "votes: where it is right, and where it is wrong (right / wrong: vote is the target / is the output)",
            ["examples", "vote", *(f"layer {n}" for n in numbers)],
            split,
            wrong,
        ),
    ]
    return [*(made if runs else []), *([_model_table(result, said)] if found["tasks"] else [])]


def _model_table(result: LabResult, said: Found) -> Table:
    columns = ["task", "vote", "for the answer of", "agrees", "above margins", "over draws", "over queries"]
    columns += ["shuffled classes", "raw vote", "majority class", "vote right", "answer right"]
    rows = [
        [
            task,
            rule,
            {"ft": "fine-tuning", "icl": "in-context"}[on_model.RULES[rule]],
            number(f["agreement"]),
            number(f["excess"], "+.3f"),
            between(f["over draws"], "+.3f"),
            between(f["over queries"], "+.3f"),
            *(number(f[key]) for key in ("shuffled", "raw", "majority", "gold", "answers right")),
        ]
        for task, rules in said["model_votes"].items()
        for rule, f in rules.items()
    ]
    settings = result.settings
    note = (
        f"{result.provenance['model']}, {settings['shots']} demonstrations, {settings['n_queries']} queries, "
        f"{settings['seeds']} draws; votes of the mean over layers, centred over queries. Above margins: agreement "
        "less what the vote of another query would give. Intervals: Student over draws, bootstrap over queries "
        f"(averaged over draws).\n{said['sentences'][-1]}"
    )
    return Table(
        "votes: do the demonstrations that a language model attends to predict its answer?", columns, rows, note
    )


# ------------------------------------------------------------------------------------------------------------- figures


def figures(result: LabResult) -> dict[str, Figure]:
    """Agreement by layer of the classifiers, and by layer of the language model."""
    found = result.results
    said = summarise(found["classifiers"], found["tasks"])
    drawn: dict[str, Figure] = {}
    if said["votes"]:
        charts = [_bars(layers) for layers in said["votes"].values()]
        note = f"Bars: mean over {result.settings['seeds']} seeds with Student's 95 % interval."
        title = "Does the class that a trained layer attends to predict the classifier's output?"
        drawn["votes-classifier"] = draw(charts, title, note, (8.6, 3.4), across=list(said["votes"]))
    if said["model_votes"]:
        charts = [_lines(rules) for rules in said["model_votes"].values()]
        settings = result.settings
        note = (
            f"{result.provenance['model']}, {settings['seeds']} draws of {settings['shots']} demonstrations, "
            f"{settings['n_queries']} queries. Bands: Student's 95 % interval over draws, of the two votes by mass."
        )
        title = "Language model: does the vote of each layer predict the answer?"
        drawn["votes-model"] = draw(charts, title, note, (8.6, 3.6), across=list(said["model_votes"]))
    return drawn


def _bars(layers: Sequence[Found]) -> Chart:
    def ends(rule: str, end: int) -> list[float | None]:
        return [None if layer[rule]["output"]["ci"] is None else layer[rule]["output"]["ci"][end] for layer in layers]

    series: list[Series] = [
        {
            "name": rule,
            "values": [layer[rule]["output"]["mean"] for layer in layers],
            "lo": ends(rule, 0),
            "hi": ends(rule, 1),
        }
        for rule in classifier.RULES
    ]
    groups = [f"layer {number + 1}" for number in range(len(layers))]
    y = {"label": "vote is the output", "min": 0.0, "max": 1.0}
    return Chart("bars", {"title": "", "series": series, "groups": groups, "y": y})  # pyright: ignore


def _lines(rules: Mapping[str, Found]) -> Chart:
    series: list[Series] = []
    for rule in ("mass", "share of V", "softmax mass", "softmax mass, labels"):
        found = rules[rule]
        known = rule in ("mass", "softmax mass") and all(ci is not None for ci in found["layers_ci"])
        one: Series = {"name": f"{rule} ({on_model.RULES[rule]})", "values": found["layers"]}
        one["x"] = list(range(len(found["layers"])))
        if known:
            one["lo"], one["hi"] = ([ci[end] for ci in found["layers_ci"]] for end in (0, 1))
        series.append(one)
    y = {"label": "agreement above margins", "zero": True}
    return Chart("lines", {"title": "", "series": series, "x": {"label": "layer"}, "y": y})  # pyright: ignore
