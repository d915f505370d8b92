"""The votes lab's summary, tables and figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualview.lab.charts import bars, lines
from dualview.lab.harness import LabResult, Table, between, number
from dualview.lab.summaries import bootstrap_ci, interval_curve, is_positive, student, student_ci
from dualview.lab.votes import classifier, on_model
from dualview.report.charts.spec import Chart
from dualview.report.figures.curves import Curve
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


def _of_classifier(runs: Sequence[Found]) -> list[dict[str, Any]]:
    """By layer and rule: each agreement over seeds, and by how much the mass beats the untrained layer's."""

    def of(layer: int, rule: str, measure: str) -> list[float | None]:
        return [run["layers"][layer][rule][measure] for run in runs]

    def gaps(layer: int, rule: str) -> list[float]:
        pairs = zip(of(layer, rule, "output"), of(layer, classifier.RULES[2], "output"), strict=True)
        return [own - untrained for own, untrained in pairs if own is not None and untrained is not None]

    return [
        {
            rule: {measure: student(of(layer, rule, measure), (0.0, 1.0)) for measure in MEASURES}
            | {"over untrained": student(gaps(layer, rule))}
            for rule in classifier.RULES
        }
        for layer in range(len(runs[0]["layers"]))
    ]


def _of_model(draws: Sequence[Found], rule: str) -> dict[str, Any]:
    """One vote's agreement with the answer that it is to predict, and its excess over what the margins give."""
    setting = on_model.RULES[rule]
    agree, excess, shuffled = [], [], []
    for each in draws:
        answers, vote = np.array(each["answers"][setting]), np.array(each["rules"][rule]["vote"])
        agree.append((vote == answers).astype(float))
        excess.append(agree[-1] - on_model.by_margins(vote, answers))
        shuffled.append(each["rules"][rule]["shuffled"])
    layers = np.array([each["rules"][rule]["layers"] for each in draws])

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
        "over draws": student_ci([float(row.mean()) for row in excess]),
        "over queries": bootstrap_ci(np.mean(excess, axis=0), f"votes/{rule}"),
        "layers": layers.mean(0).tolist(),
        "layers_ci": [student_ci(column.tolist()) for column in layers.T],
    }


def _classifier_sentence(name: str, runs: Sequence[Found], layers: Sequence[Found]) -> str:
    accuracy = statistics.fmean(run["accuracy"] for run in runs)
    last, wrong = layers[-1], [layer["mass"]["wrong, output"]["mean"] for layer in layers]
    learnt = all(is_positive(layer["mass"]["over untrained"]["ci"]) for layer in layers[1:])
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

    every = [
        (task, rule, found)
        for task, rules in model.items()
        for rule, found in rules.items()
        if is_positive(found["over draws"]) and is_positive(found["over queries"])
    ]
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
    settings, by_layer, on_tasks = result.settings, said["votes"], said["model_votes"]
    charts = [*map(_bars, by_layer.values()), *map(_lines, on_tasks.values())]
    if not charts:
        return {}
    titles = [*(f"classifier: {name}" for name in by_layer), *(f"language model: {name}" for name in on_tasks)]
    note = (
        f"Bars: mean over {settings['seeds']} seeds with Student's 95 % interval. Lines: {result.provenance['model']}, "
        f"{settings['seeds']} draws of {settings['shots']} demonstrations, {settings['n_queries']} queries; bands: "
        "Student's 95 % interval over draws, of the two votes by mass."
    )
    columns = len(by_layer) if len(by_layer) == len(on_tasks) else 0
    rows = 1 if not columns else len(charts) // columns
    title = "Does the class that a trained layer attends to predict the answer?"
    return {"votes": draw(charts, title, note, (8.6, 3.2 * rows), across=titles, columns=columns)}


def _bars(layers: Sequence[Found]) -> Chart:
    series = {rule: [layer[rule]["output"] for layer in layers] for rule in classifier.RULES}
    groups = [f"layer {number + 1}" for number in range(len(layers))]
    return bars(series, groups, {"label": "vote is the output", "min": 0.0, "max": 1.0})


def _lines(rules: Mapping[str, Found]) -> Chart:
    series: dict[str, Curve] = {}
    for rule in ("mass", "share of V", "softmax mass", "softmax mass, labels"):
        found, banded = rules[rule], rule in ("mass", "softmax mass")
        pairs = zip(found["layers"], found["layers_ci"], strict=True)
        rows = [{"mean": mean, "ci": ci if banded else None} for mean, ci in pairs]
        series[f"{rule} ({on_model.RULES[rule]})"] = interval_curve(range(len(rows)), rows)
    return lines(series, {"label": "layer"}, {"label": "agreement above margins", "zero": True})
