"""Choosing a learning rate: by accuracy on the selection rows, ties to the smaller, the fallen named."""

from __future__ import annotations

import numpy as np
import pytest

from dualview.learning.finetune import finetune
from dualview.learning.recipe import Status, TrainingRecipe, Tuned
from dualview.learning.selection import SelectionTrial, best, judge_rates, status_of
from dualview.models.scoring import PassPlan
from equivalence import cases, reference, training


def tuned(status: Status = "ok") -> Tuned:
    return Tuned(0.1, patch=None, losses=(1.0,), status=status)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("trials", "index"),
    [
        ([(0.1, 0.5), (0.01, 0.6), (0.001, 0.4)], 1),
        ([(0.1, 0.6), (0.01, 0.6), (0.001, 0.4)], 1),  # a tie goes to the smaller rate, wherever it stands
        ([(0.01, 0.6), (0.1, 0.6)], 0),
        ([(0.001, None), (0.1, 0.0)], 1),  # a diverged one is chosen only where there is no other
        ([(0.1, None), (0.001, None)], 1),
        ([(3.0, 0.2)], 0),
    ],
)
def test_the_best(trials: list[tuple[float, float | None]], index: int) -> None:
    assert best([SelectionTrial(value, accuracy, "ok") for value, accuracy in trials]) == index


@pytest.mark.parametrize(
    ("scores", "state", "status"),
    [
        ([[0.0, -1.0], [-1.0, 0.0]], "ok", "ok"),
        ([[0.0, -1.0], [0.0, -1.0]], "ok", "collapsed"),
        ([[0.0, -1.0], [0.0, -1.0]], "diverged", "diverged"),
        ([[0.0, -1.0], [np.nan, np.nan]], "ok", "diverged"),
        ([[0.0, -1.0]], "ok", "ok"),  # one query alone cannot show a collapse
        ([[0.0, -1.0, -np.inf], [-1.0, -2.0, 0.0]], "ok", "ok"),  # a candidate some queries do not have
    ],
)
def test_statuses(scores: list[list[float]], state: Status, status: Status) -> None:
    assert status_of(tuned(state), np.array(scores)) == status


@pytest.mark.parametrize("params", ["kv", "all"])
def test_rates_are_judged_as_whole_models(params) -> None:
    lm, rates = cases.lm("llama"), (0.003, 1.0, 1e300)
    found = finetune(lm, cases.SEQUENCES, rates, TrainingRecipe(params))
    trials = judge_rates(lm, found, cases.QUERIES, PassPlan((cases.BOS,), 1))
    assert [trial.value for trial in trials] == list(rates)
    for rate, trial in zip(rates[:2], trials, strict=False):
        twin = training.train(cases.model("llama"), "llama", cases.SEQUENCES, rate, params=params).model
        right = []
        for query in cases.QUERIES:
            scores = reference.answer(twin, (cases.BOS,), 1, query.ids, query.candidates)["prompt"].log_probs
            right.append(scores.index(max(scores)) == query.gold)
        assert trial.accuracy == np.mean(right)
    assert (trials[2].accuracy, trials[2].status) == (None, "diverged")
