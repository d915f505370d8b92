"""What queries have in common by a number that both settings know, against dense least squares."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dualview.metrics.floors.covariates import covariates, known_numbers
from dualview.models.head_span import off_span_and_shared
from metrics.direct_nulls import beyond_known, known_basis

RNG = np.random.default_rng(0)
UPDATES, LENGTH = RNG.normal(size=(24, 10)) + RNG.normal(size=10), RNG.integers(5, 40, 24).astype(np.float64)


def projection(rows: np.ndarray) -> np.ndarray:
    return rows.T @ rows


def of(updates: np.ndarray, *known: np.ndarray) -> np.ndarray:
    return covariates(updates, np.isfinite(updates).all(-1), np.stack(known) if known else None)


def test_they_span_one_strength_and_length() -> None:
    rows = of(UPDATES, LENGTH)
    np.testing.assert_allclose(rows @ rows.T, np.eye(3), atol=1e-12)
    for number in (np.ones(24), UPDATES @ UPDATES.mean(0), LENGTH):
        np.testing.assert_allclose(projection(rows) @ number, number, rtol=1e-10)
    wanted = known_basis(list(UPDATES), [True] * 24, LENGTH[None])
    np.testing.assert_allclose(projection(rows), wanted @ wanted.T, atol=1e-12)


def test_batches_and_tensors_give_the_same() -> None:
    stacked = np.stack([UPDATES, UPDATES[::-1] ** 2])
    both = covariates(stacked, np.ones((2, 24), dtype=bool), LENGTH[None])
    for one, rows in zip(stacked, both, strict=True):
        np.testing.assert_allclose(rows, of(one, LENGTH), atol=1e-12)
    tensors = [torch.from_numpy(side) for side in (stacked, np.ones((2, 24), dtype=bool), LENGTH[None])]
    np.testing.assert_allclose(covariates(*tensors).numpy(), both, atol=1e-12)  # pyright: ignore[reportArgumentType]


def test_what_tells_nothing_new_and_queries_that_are_not_there_are_zeros() -> None:
    assert not of(UPDATES, np.full(24, 30.0))[2].any(), "a common length"
    assert not of(UPDATES, UPDATES @ UPDATES.mean(0))[2].any(), "the strength again"
    missing = UPDATES.copy()
    missing[3], missing[7, 2] = np.nan, np.inf
    rows, there = of(missing, LENGTH), np.isfinite(missing).all(-1)
    assert not rows[:, ~there].any()
    np.testing.assert_allclose(projection(rows[:, there]), projection(of(UPDATES[there], LENGTH[there])), atol=1e-12)


def test_what_is_known_are_length_and_zero_shot_log_odds_of_the_label() -> None:
    scores, gold = np.log([[0.2, 0.4, 0.1], [0.3, 0.3, 0.3]]), np.array([1, 2])
    rows = known_numbers(scores, gold, np.array([7, 9]))
    np.testing.assert_allclose(rows, [[7, 9], [np.log(0.4) - np.log(0.008) / 3, 0]], atol=1e-12)
    assert known_numbers(scores, gold).shape == (1, 2)
    scores[0, 0] = np.nan
    assert not known_numbers(scores, gold).any(), "scores that are not numbers tell nothing"


@pytest.mark.parametrize(("queries", "numbers"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (24, 3)])
def test_no_more_of_them_than_there_are_queries_for(queries: int, numbers: int) -> None:
    assert of(UPDATES[:queries], LENGTH[:queries]).shape == (numbers, queries)


def test_the_fit_outside_the_spans_is_the_dense_one() -> None:
    span, sides = RNG.normal(size=(24, 3, 10)), np.stack([UPDATES, RNG.normal(size=(24, 10))])
    found = off_span_and_shared(torch.from_numpy(sides), torch.from_numpy(span), torch.from_numpy(LENGTH[None]))
    outside = [np.eye(10) - np.linalg.pinv(vectors) @ vectors for vectors in span]
    for one, got in zip(sides, found.numpy(), strict=True):
        known = known_basis(list(one), [True] * 24, LENGTH[None])
        np.testing.assert_allclose(got, beyond_known(list(one), outside, known), atol=1e-6)


def test_a_direction_that_is_stronger_in_some_queries_leaves_nothing() -> None:
    """Though it is not the mean's own direction, and the spans differ from query to query."""
    strength, of_all, grows = 1 + 0.5 * RNG.normal(size=24), RNG.normal(size=40), RNG.normal(size=40)
    update = torch.from_numpy(of_all + np.multiply.outer(strength, grows))[None]
    span = torch.from_numpy(RNG.normal(size=(24, 3, 40)))
    assert off_span_and_shared(update, span).norm() < 0.02 * update.norm()
