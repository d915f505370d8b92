"""Contextual calibration against its equation, written with plain probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dualview.learning.calibration import calibrated, log_prior


def plain_prior(scores: list[list[float]]) -> list[float]:
    """The mean over fillers of the probabilities normalised over the candidates."""
    tables = []
    for row in scores:
        weights = [math.exp(score) for score in row]
        tables.append([weight / sum(weights) for weight in weights])
    return [sum(table[j] for table in tables) / len(tables) for j in range(len(scores[0]))]


def test_the_prior_is_a_mean_of_probabilities() -> None:
    scores = [[-1.0, -3.0, -2.0], [-0.5, -0.7, -4.0], [-2.0, -2.0, -2.0]]
    found = log_prior(np.array([scores]))
    assert np.exp(found[0]) == pytest.approx(plain_prior(scores), abs=1e-12)
    assert float(np.exp(found).sum()) == pytest.approx(1.0)


def test_candidates_that_are_not_there_stay_out() -> None:
    missing = np.array([[[-1.0, -3.0, -np.inf]] * 3, [[-1.0, -3.0, -2.0]] * 3])
    prior = log_prior(missing)
    assert prior[0, 2] == -np.inf
    assert np.exp(prior[0, :2]).sum() == pytest.approx(1.0)
    scores = calibrated(np.array([[-1.0, -3.0, -np.inf], [-1.0, -3.0, -2.0]]), prior)
    assert scores[0, 2] == -np.inf
    assert np.isfinite(scores[1]).all()


def test_calibration_undoes_a_constant_preference() -> None:
    """A model that adds the same favour to candidate 0 whatever the query is set right."""
    draw = np.random.default_rng(0)
    fair = np.log(draw.dirichlet(np.ones(3), size=40))
    favour = np.array([2.0, 0.0, -1.0])
    prior = log_prior(np.tile(np.log(np.full(3, 1 / 3)) + favour, (1, 3, 1)))
    found = calibrated(fair + favour, np.repeat(prior, 40, 0))
    assert (np.argmax(fair + favour, 1) != np.argmax(fair, 1)).any()
    assert np.array_equal(np.argmax(found, 1), np.argmax(fair, 1))
