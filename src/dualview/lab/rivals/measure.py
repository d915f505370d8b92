"""How far a trained model is from each rule, and which rule is closest by interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.lab.rivals.models import Models
from dualview.lab.rivals.problems import Moments, Problems
from dualview.lab.rivals.rules import Rule
from dualview.lab.summaries import is_positive, student_ci

MEASURES = ("prediction", "slope", "cosine")
LEFT_OUT = 0.001
"""The share of problems, those with the largest differences, that a mean distance leaves out.

GD++ with several steps is a polynomial of high degree, however it is tuned: on one context in ten thousands it
explodes, and that one would decide a mean of squares.
"""


@dataclass(frozen=True)
class Answers:
    """What one model says about its problems, in float64."""

    problems: Moments
    predicted: Float[Tensor, " task"]
    slope: Float[Tensor, "n_x task"]

    @property
    def loss(self) -> float:
        """½ mean (ŷ − y)²."""
        return float((self.predicted - self.problems.y_query).square().mean() / 2)


def answers(models: Models, problems: Problems) -> list[Answers]:
    """Every model's."""
    with torch.no_grad():
        predicted, slope = models.answer(problems)
    moments = problems.moments()
    return [
        Answers(moments.of_model(at), predicted[at].double(), slope[:, at].double()) for at in range(len(predicted))
    ]


def distance(found: Answers, rule: Rule) -> dict[str, float]:
    """From one model to one rule, over the same problems.

    prediction    mean (ŷ − ŷ')² / mean y²; 0 is equality, 1 as far as predicting 0 is from the truth
    slope         mean ‖∂ŷ/∂x_q − ∂ŷ'/∂x_q‖² / mean ‖w‖²; the same in each direction of the inputs
    cosine        mean cos(∂ŷ/∂x_q, ∂ŷ'/∂x_q); 1 is the same direction; ignores scale
    loss          the rule's own, ½ mean (ŷ' − y)²

    The means of prediction and slope leave out the largest 0.1 %.
    """
    problems, slope = found.problems, rule(found.problems)
    predicted = problems.predicted(slope)
    return {
        "prediction": _typical((found.predicted - predicted).square()) / float(problems.y_query.square().mean()),
        "slope": _typical((found.slope - slope).square().sum(0)) / float(problems.truth.square().sum(0).mean()),
        "cosine": float(torch.cosine_similarity(found.slope, slope, dim=0).mean()),
        "loss": float((predicted - problems.y_query).square().mean() / 2),
    }


def _typical(values: Float[Tensor, " task"]) -> float:
    """The mean without the largest values."""
    kept = len(values) - int(LEFT_OUT * len(values))
    return float(values.sort().values[:kept].mean())


def distances(found: Sequence[Answers], rules: Mapping[str, Rule]) -> dict[str, dict[str, Any]]:
    """From every seed's model to each rule: a list over seeds for each measure."""
    rows = {name: [distance(each, rule) for each in found] for name, rule in rules.items()}
    return {
        name: {"steps": rules[name].steps, **{key: [one[key] for one in row] for key in row[0]}}
        for name, row in rows.items()
    }


def closest(by_rule: Mapping[str, Mapping[str, Any]], measure: str) -> dict[str, Any]:
    """The rule with the smallest mean distance over seeds, and those that the seeds cannot tell from it.

    Student's 95 % interval of the paired difference (another rule's distance minus this one's) over seeds: a rule is
    different if its interval lies above 0. The closest rule wins if every other rule is different.
    """
    sign = -1.0 if measure == "cosine" else 1.0
    values = {name: [sign * value for value in row[measure]] for name, row in by_rule.items()}
    order = sorted(values, key=lambda name: fmean(values[name]))
    first, second = order[0], order[1]
    gaps = {name: [b - a for a, b in zip(values[first], values[name], strict=True)] for name in order[1:]}
    intervals = {name: student_ci(gap) for name, gap in gaps.items()}
    ties = [name for name in order[1:] if not is_positive(intervals[name])]
    return {"rule": first, "ties": ties, "next": second, "gap": fmean(gaps[second]), "ci": intervals[second]}
