"""The classifier lab's table, sentence and figure, made from its JSON alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dualview.lab.charts import bars
from dualview.lab.harness import LabResult, Table, between, number
from dualview.lab.summaries import is_positive, mean, student, student_ci
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = Sequence[Mapping[str, Any]]
RULES = ("one step", "balanced step", "class means", "ridge")
COMPARED = ("sim_aou", "agreement", "label contrast")


def over(runs: Runs, of: Callable[[Mapping[str, Any]], float | None]) -> dict[str, Any]:
    """The mean over trainings and Student's 95 % interval."""
    return student([of(run) for run in runs], (-1.0, 1.0))


def _cell(runs: Runs, of: Callable[[Mapping[str, Any]], float | None], style: str = "+.2f") -> str:
    found = over(runs, of)
    return number(found["mean"], style, "–") + ("" if found["ci"] is None else f" ({between(found['ci'], style)})")


def tables(result: LabResult) -> list[Table]:
    arms: Mapping[str, Runs] = result.results["arms"]
    answers: list[list[str]] = []
    learning: list[list[str]] = []
    for arm, runs in arms.items():
        right = number(mean([run["right"]["model"] for run in runs]), ".2f")
        answers.append(
            [arm, right, *(_cell(runs, lambda run, at=rule: run["closeness"][at], "+.3f") for rule in RULES)]
        )
        accuracy = " / ".join(
            number(mean([run["accuracy"][name] for run in runs]), ".2f") for name in ("zsl", "icl", "ft")
        )
        numbers = [_cell(runs, lambda run, at=name: run[at]) for name in COMPARED]
        floor = number(mean([run["sim_aou floor"] for run in runs]), "+.2f", "–")
        verdicts = Counter(run["verdict"] for run in runs).most_common()
        said = ", ".join(f"{count} {name}" for name, count in verdicts)
        learning.append([arm, accuracy, numbers[0], floor, *numbers[1:], said])
    s, some = result.settings, arms.get("linear") or next(iter(arms.values()))
    of_rules = ", ".join(f"{rule} {number(mean([run['right'][rule] for run in some]), '.2f')}" for rule in RULES)
    rules_note = (
        f"{_sentence_answers(arms)} Accuracy on fresh problems, after {s['shots']} demonstrations; of the rules: "
        f"{of_rules}, with b and λ of the trained linear model. Cosines of the labels' logits with each rule's, over "
        "all problems and labels."
    )
    note = (
        f"{_sentence_learning(arms)} Each of {len(result.seeds)} trainings ({s['train_steps']} steps of "
        f"{s['train_batch']} problems) has its own task: {s['classes']} classes, {s['features']} features, "
        f"{s['shots']} demonstrations, {s['n_queries']} queries; the rate is chosen on held-out rows (exact: its own). "
        "95 % intervals: Student over trainings."
    )
    return [
        Table("classifier: which rule do its answers follow?", ["model", "accuracy", *RULES], answers, rules_note),
        Table(
            "classifier: is its in-context learning its fine-tuning?",
            ["model", "zero-shot / in-context / fine-tuned", "SimAOU", "highest floor", *COMPARED[1:], "verdict"],
            learning,
            note,
        ),
    ]


def closest(runs: Runs) -> tuple[str, str, list[float] | None]:
    """The rule with the highest mean closeness, the next one, and the interval of their paired difference."""
    means = {rule: mean([run["closeness"][rule] for run in runs]) or 0.0 for rule in RULES}
    first, second = sorted(RULES, key=lambda rule: -means[rule])[:2]
    gaps = [run["closeness"][first] - run["closeness"][second] for run in runs if run["closeness"][first] is not None]
    return first, second, student_ci(gaps)


def _sentence_answers(arms: Mapping[str, Runs]) -> str:
    said: list[str] = []
    for arm, runs in arms.items():
        if arm not in ("linear", "softmax"):
            continue
        first, second, ci = closest(runs)
        step = mean([run["closeness"]["one step"] for run in runs])
        clear = "closest to" if is_positive(ci) else "not clearly closest to"
        gap = "" if ci is None else f" (ahead of {second} by {between(ci, '+.3f')})"
        shifts = sorted({run["parameter"]["balanced step"] for run in runs})
        said.append(
            f"Trained {arm} attention is {clear} {first}{gap}; its cosine with one step is {number(step, '.3f')}, and "
            f"b of the closest balanced step {' to '.join(f'{at:g}' for at in dict.fromkeys((shifts[0], shifts[-1])))}."
        )
    return " ".join(said)


def _sentence_learning(arms: Mapping[str, Runs]) -> str:
    said: list[str] = []
    for arm, runs in arms.items():
        levels = [run["levels"] for run in runs]
        parts = [
            f"{name} {sum(each[name] == 'supported' for each in levels)}"
            for name in ("learning", "predictions", "representations", "labels")
        ]
        said.append(f"{arm}: {', '.join(parts)}")
    return f"Levels of the verdict supported, of {len(next(iter(arms.values())))} trainings: {'; '.join(said)}."


def figures(result: LabResult) -> dict[str, Figure]:
    """How close each model is to one step, and its in-context learning to its fine-tuning."""
    arms: Mapping[str, Runs] = result.results["arms"]
    shown: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
        "answers and one step": lambda run: run["closeness"]["one step"],
        "answers and balanced step": lambda run: run["closeness"]["balanced step"],
        "SimAOU, ICL and FT": lambda run: run["sim_aou"],
        "agreement": lambda run: run["agreement"],
        "label contrast": lambda run: run["label contrast"],
    }
    series = {name: [over(runs, of) for runs in arms.values()] for name, of in shown.items()}
    chart = bars(series, list(arms), {"label": "similarity", "zero": True})
    note = f"Means over {len(result.seeds)} trainings, each with its own task; bars: 95 % over trainings."
    return {"classifier": draw([chart], "Is what training finds one gradient step?", note, (8.6, 3.8))}
