"""The public metric functions against slow loops over plain numbers, and intervals against scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

import dualview
from dualview.metrics.statistics import DRAWS, draw_interval, draw_p, query_interval, ratio_interval, wilson_interval

RNG = np.random.default_rng(16)
QUERIES, LAYERS, HEADS, KEYS, WIDTH = 5, 3, 2, 4, 6


def slow_cosine(a: np.ndarray, b: np.ndarray) -> float:
    products = sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    return products / math.sqrt(sum(float(x) ** 2 for x in a) * sum(float(y) ** 2 for y in b))


def test_sim_aou() -> None:
    zsl, icl, ft = RNG.normal(size=(3, QUERIES, LAYERS, WIDTH))
    raw, normalised = dualview.metrics.sim_aou(zsl, icl, ft), dualview.metrics.sim_aou_normalised(zsl, icl, ft)
    for q, layer in itertools.product(range(QUERIES), range(LAYERS)):
        z, i, f = (side[q, layer] for side in (zsl, icl, ft))
        assert raw[q, layer] == pytest.approx(slow_cosine(i - z, f - z))
        z, i, f = (side / math.sqrt(sum(x * x for x in side)) for side in (z, i, f))
        assert normalised[q, layer] == pytest.approx(slow_cosine(i - z, f - z))


def test_sim_am_reads_only_the_columns_of_a_query() -> None:
    zsl, icl, ft = RNG.normal(size=(3, QUERIES, LAYERS, HEADS, KEYS))
    columns = np.array([2, 3, 4, 4, 2])
    found = dualview.metrics.sim_am(zsl, icl, ft, columns)
    for q, layer, head in itertools.product(range(QUERIES), range(LAYERS), range(HEADS)):
        z, i, f = (side[q, layer, head, : columns[q]] for side in (zsl, icl, ft))
        assert found.before[q, layer, head] == pytest.approx(slow_cosine(i, z))
        assert found.after[q, layer, head] == pytest.approx(slow_cosine(i, f))
        assert found.delta[q, layer, head] == pytest.approx(slow_cosine(i - z, f - z))


def test_accuracy_and_rec2ftp() -> None:
    gold = RNG.integers(0, 3, size=40)
    scores = RNG.normal(size=(3, 40, 3))
    right = [[int(np.argmax(row)) == int(g) for row, g in zip(side, gold, strict=True)] for side in scores]
    assert dualview.metrics.accuracy(scores[0], gold) == pytest.approx(sum(right[0]) / 40)
    fixed = [i for z, i, f in zip(*right, strict=True) if not z and f]
    found = dualview.metrics.rec2ftp(gold, *scores)
    assert found.value == pytest.approx(sum(fixed) / len(fixed)) and found.n_ft == len(fixed)


def test_kendall() -> None:
    x, y = RNG.integers(0, 6, size=(2, QUERIES, LAYERS, 9)).astype(float)  # with ties
    found = dualview.metrics.kendall(x, y)
    for q, layer in itertools.product(range(QUERIES), range(LAYERS)):
        balance = ties_x = ties_y = pairs = 0
        for i, j in itertools.combinations(range(9), 2):
            a, b = np.sign(x[q, layer, i] - x[q, layer, j]), np.sign(y[q, layer, i] - y[q, layer, j])
            balance, pairs = balance + a * b, pairs + 1
            ties_x, ties_y = ties_x + (a == 0), ties_y + (b == 0)
        assert found[q, layer] == pytest.approx(balance / math.sqrt((pairs - ties_x) * (pairs - ties_y)))


def test_token_overlap() -> None:
    a, b = (dualview.metrics.top_k(RNG.dirichlet(np.ones(20), size=QUERIES), 6) for _ in range(2))
    overlap, cosines = dualview.metrics.token_overlap(a, b), dualview.metrics.overlap_cosine(a, b)
    for q in range(QUERIES):
        p = [dict(zip(side.ids[q].tolist(), side.probs[q].tolist(), strict=True)) for side in (a, b)]
        shared = set(p[0]) & set(p[1])
        assert overlap[q] == len(shared) / 6
        squares = [sum(side[t] ** 2 for t in shared) for side in p]
        if 0 < len(shared) < 6:
            wanted = sum(p[0][t] * p[1][t] for t in shared) / math.sqrt(squares[0] * squares[1] * (6 - len(shared)))
            assert cosines[q] == pytest.approx(wanted)


@pytest.mark.parametrize(("successes", "n"), [(0, 7), (3, 9), (40, 41), (5, 5)])
def test_wilson_is_scipys(successes: int, n: int) -> None:
    wanted = stats.binomtest(successes, n).proportion_ci(method="wilson")
    found = wilson_interval(successes, n)
    assert found is not None and found.to_json() == pytest.approx([wanted.low, wanted.high])


def test_student_over_draws_is_scipys() -> None:
    values = RNG.normal(0.2, 1, size=7)
    wanted = stats.ttest_1samp(values, 0.0)
    found = draw_interval(values.tolist())
    assert found is not None and found.to_json() == pytest.approx(list(wanted.confidence_interval()))
    assert draw_p(values) == pytest.approx(wanted.pvalue)
    assert draw_p(np.ones(4)) is None and draw_p(np.ones(1)) is None


def test_the_interval_of_a_ratio_is_the_bootstrap_over_queries() -> None:
    part, whole = RNG.normal(1, 0.3, size=12), RNG.normal(2, 0.3, size=12)
    found, constant = ratio_interval(part, whole, name="a"), ratio_interval(part, np.full(12, 2.0), name="a")
    assert found is not None and found.low < part.mean() / whole.mean() < found.high and DRAWS == 1999
    mean = query_interval(part, seed=0, name="a")  # the same resamples
    assert mean is not None and constant is not None
    assert constant.to_json() == pytest.approx([mean.low / 2, mean.high / 2])
    assert ratio_interval(part, part - part.mean() + 0.01, name="a") is None
