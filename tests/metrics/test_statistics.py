"""Intervals cover at their nominal rate; p-values are uniform under the null; corrections by their definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dualview.metrics._scipy import normal_cdf
from dualview.metrics.cosine import overall_mean
from dualview.metrics.statistics import (
    above_zero_p,
    another_draw_p,
    benjamini_hochberg,
    detectable_beyond,
    detectable_mean,
    draw_interval,
    generator,
    holm,
    paired_interval,
    query_interval,
    same_queries_p,
    sign_flip_p,
    wilson_interval,
)

RUNS = 400
# 400 runs of a 95 % interval: its share of covers is within .95 ± .033 in 99.7 % of test seeds.
NOMINAL = pytest.approx(0.95, abs=0.033)


def planted_cosines(rng: np.random.Generator, n: int, layers: int, cosine: float) -> np.ndarray:
    """Cosines of updates b = c·a + √(1−c²)·e with e orthogonal to a, and c varying about the planted one by query."""
    own = np.clip(cosine + 0.3 * rng.uniform(-1, 1, size=(n, 1)), -1, 1)
    a, e = rng.normal(size=(2, n, layers, 12))
    a /= np.linalg.norm(a, axis=-1, keepdims=True)
    e -= (e * a).sum(axis=-1, keepdims=True) * a
    e /= np.linalg.norm(e, axis=-1, keepdims=True)
    b = own[..., None] * a + np.sqrt(1 - own[..., None] ** 2) * e
    return (a * b).sum(axis=-1)


@pytest.mark.parametrize(("n", "cosine"), [(12, 0.2), (100, 0.6)])
def test_interval_covers_a_planted_cosine(n: int, cosine: float) -> None:
    covered = 0
    for run in range(RUNS):
        values = planted_cosines(np.random.default_rng(run), n, 3, cosine)
        interval = query_interval(values, seed=run, draws=499)
        covered += interval.low <= cosine <= interval.high
    assert covered / RUNS == NOMINAL


def test_interval_covers_an_accuracy_gain() -> None:
    rng, covered = np.random.default_rng(0), 0
    for run in range(RUNS):
        before = rng.random(150) < 0.6
        after = np.where(before, rng.random(150) < 0.9, rng.random(150) < 0.5)
        gain = 0.6 * 0.9 + 0.4 * 0.5 - 0.6
        interval = paired_interval(after.astype(float), before.astype(float), seed=run, draws=499)
        covered += interval.low <= gain <= interval.high
    assert covered / RUNS == NOMINAL


@pytest.mark.parametrize(("overlap", "n"), [(0.92, 49), (0.64, 11), (0.5, 200)])
def test_wilson_covers_a_planted_overlap(overlap: float, n: int) -> None:
    hits = np.random.default_rng(0).binomial(n, overlap, size=4000)
    bounds = {k: wilson_interval(int(k), n) for k in np.unique(hits)}
    assert np.mean([bounds[k].low <= overlap <= bounds[k].high for k in hits]) == pytest.approx(0.95, abs=0.03)
    assert wilson_interval(0, 0) is None
    assert wilson_interval(n, n).high == pytest.approx(1.0) and wilson_interval(n, n).low < 0.99


@pytest.mark.parametrize("draws", [2, 3, 5])
def test_draw_interval_covers_the_mean_over_draws(draws: int) -> None:
    rng, runs = np.random.default_rng(0), 2000
    found = [draw_interval((0.3 + 0.1 * rng.normal(size=draws)).tolist()) for _ in range(runs)]
    assert np.mean([each.low <= 0.3 <= each.high for each in found]) == pytest.approx(0.95, abs=0.02)


def test_draw_interval_is_students_and_leaves_out_what_is_undefined() -> None:
    interval = draw_interval([0.2, None, 0.4, 0.3, float("nan")])
    half = 4.302652729749464 * 0.1 / 3**0.5
    assert (interval.low, interval.high) == (pytest.approx(0.3 - half), pytest.approx(0.3 + half))
    assert draw_interval([0.2, None]) is None and draw_interval([]) is None
    assert draw_interval([0.0, 1.0], (0.0, 1.0)).to_json() == [0.0, 1.0]


def test_an_interval_names_its_method() -> None:
    values = np.random.default_rng(0).normal(size=30)
    found = [query_interval(values, seed=0), wilson_interval(3, 9), draw_interval([1.0, 2.0])]
    assert [each.kind for each in found] == ["bootstrap over queries", "Wilson", "Student over draws"]


def test_undefined_values_are_left_out() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, 3))
    holes = values.copy()
    holes[:, 1] = np.nan
    holes[5:9, 0] = np.nan
    interval = query_interval(holes, seed=1)
    assert interval.low < overall_mean(holes) < interval.high
    assert overall_mean(holes) == pytest.approx((np.delete(values[:, 0], range(5, 9)).mean() + values[:, 2].mean()) / 2)
    assert query_interval(np.full((5, 2), np.nan), seed=0) is None
    assert query_interval(np.ones((1, 2)), seed=0) is None
    assert sign_flip_p(np.full((5, 2), np.nan), seed=0) is None


def test_same_seed_same_numbers_and_names_are_apart() -> None:
    values = np.random.default_rng(0).normal(size=(30, 2))
    assert query_interval(values, seed=3) == query_interval(values, seed=3)
    assert query_interval(values, seed=3) != query_interval(values, seed=4)
    assert generator(0, "a").random() != generator(0, "b").random()


def test_chunks_do_not_change_the_shape_of_things(monkeypatch) -> None:
    values = np.random.default_rng(0).normal(size=(30, 2))
    whole = query_interval(values, seed=0, draws=301)
    monkeypatch.setattr("dualview.metrics.statistics._CHUNK", 30 * 7)
    pieces = query_interval(values, seed=0, draws=301)
    assert pieces.low == pytest.approx(whole.low, abs=1e-12) and pieces.high == pytest.approx(whole.high, abs=1e-12)


def test_sign_flips_equal_full_enumeration() -> None:
    values = np.array([0.9, 0.5, -0.2, 0.7, 0.1, 0.4, 0.3])
    total = values.sum()
    flips = [np.dot(signs, values) >= total - 1e-12 for signs in itertools.product([1, -1], repeat=7)]
    assert sign_flip_p(values, seed=0, draws=20000) == pytest.approx(np.mean(flips), abs=0.004)
    assert sign_flip_p(np.zeros(5), seed=0) == 1.0
    assert sign_flip_p(np.ones(30), seed=0, draws=999) == 1 / 1000


def test_sign_flips_are_uniform_under_the_null() -> None:
    rng = np.random.default_rng(0)
    p = np.array(
        [sign_flip_p(rng.normal(size=(20, 2)) + rng.normal(size=(20, 1)), seed=i, draws=199) for i in range(400)]
    )
    assert (p <= 0.05).mean() == pytest.approx(0.05, abs=0.033)
    assert (p <= 0.5).mean() == pytest.approx(0.5, abs=0.075)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_corrections_by_definition(values: list[float]) -> None:
    p, m = np.array(values), len(values)
    ranked = sorted(values)
    for index, own in enumerate(values):
        upto = [min(1.0, (m - k) * q) for k, q in enumerate(ranked) if q <= own]
        assert holm(p)[index] == pytest.approx(max(upto))
        above = [min(1.0, m / (k + 1) * q) for k, q in enumerate(ranked) if q >= own]
        assert benjamini_hochberg(p)[index] == pytest.approx(min(above))
    with_hole = np.append(p, np.nan)
    np.testing.assert_allclose(holm(with_hole)[:-1], holm(p))
    assert np.isnan(holm(with_hole)[-1]) and np.isnan(benjamini_hochberg(with_hole)[-1])


@pytest.mark.parametrize("n", [2, 4, 6])
def test_a_mean_above_zero_is_student_s(n: int) -> None:
    values = np.random.default_rng(n).normal(0.4, 1, n)
    assert above_zero_p(values) == pytest.approx(stats.ttest_1samp(values, 0, alternative="greater").pvalue)


@pytest.mark.parametrize("n", [7, 9])
def test_from_seven_draws_every_flip_is_tried(n: int) -> None:
    values = np.random.default_rng(n).normal(0.4, 1, n)
    flips = [sum(s * v for s, v in zip(signs, values, strict=True)) for signs in itertools.product((1, -1), repeat=n)]
    assert above_zero_p(values) == pytest.approx(np.mean(np.array(flips) >= values.sum() - 1e-12))


def test_equal_draws_have_the_smallest_p_there_is() -> None:
    assert above_zero_p(np.full(4, 0.3)) == 0.5**4 and above_zero_p(np.full(4, -0.3)) == 1.0
    assert above_zero_p(np.zeros(3)) == 0.5


def test_another_draw_reaches_a_value_as_often_as_p_says() -> None:
    rng, below = np.random.default_rng(0), 0
    for _ in range(2000):
        *draws, value = rng.normal(0.2, 0.1, 6)
        p = another_draw_p(value, draws)
        assert p is not None
        below += p < 0.05
    assert 0.035 < below / 2000 < 0.065
    assert another_draw_p(0.5, [0.1]) is None
    assert another_draw_p(0.5, [0.1, 0.1]) == 0 and another_draw_p(0.1, [0.1, 0.1]) == 1


def test_no_draw_reaches_a_similarity_of_one() -> None:
    """However widely few draws differ: on the scale of the cosine itself this p is .047."""
    for value in (0.99999, 1.0, 1.0 + 1e-15):
        p = another_draw_p(value, [0.112, 0.325, -0.199])
        assert p is not None and p < 0.01
    small = another_draw_p(0.03, [0.01, 0.0, -0.01])
    plain = 1 - stats.t.cdf(0.03 / (0.01 * (4 / 3) ** 0.5), 2)
    assert small == pytest.approx(plain, rel=1e-2), "near 0 the scales are one"
    assert another_draw_p(-1.0, [0.1, 0.2]) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_p_of_the_same_queries_holds_however_the_runs_depend(correlation: float) -> None:
    rng = np.random.default_rng(3)
    scores = correlation**0.5 * rng.normal(size=(4000, 1)) + (1 - correlation) ** 0.5 * rng.normal(size=(4000, 5))
    ps = [same_queries_p([normal_cdf(-score) for score in row]) for row in scores]
    rate = np.mean([p is not None and p < 0.05 for p in ps])
    assert rate < 0.06 and (correlation < 1 or rate > 0.04)


def test_p_of_the_same_queries_known_answers() -> None:
    assert same_queries_p([]) is None
    assert same_queries_p([0.03]) == pytest.approx(0.03) == same_queries_p([0.03] * 4)
    assert same_queries_p([0.2, 0.8]) == pytest.approx(0.5)
    for ends in ([0.0, 1.0], [0.0], [1.0]):
        found = same_queries_p(ends)
        assert found is not None and 0 <= found <= 1


def test_what_a_mean_over_draws_could_have_shown() -> None:
    """Draws whose standard deviation is 1: a mean of that size is found four times of five."""
    rng, found = np.random.default_rng(1), 0
    assert detectable_mean(np.array([1.0]), 0.05) is None
    reach = detectable_mean(np.array([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0]) * (5 / 6) ** 0.5, 0.05)
    assert reach is not None
    for _ in range(1000):
        found += above_zero_p(rng.normal(reach, 1.0, 6)) < 0.05
    assert 0.72 < found / 1000 < 0.9


def test_what_a_drawn_control_lets_be_found_is_found_that_often() -> None:
    rng, found = np.random.default_rng(0), []
    for _ in range(400):
        draws = rng.normal(0.05, 0.01, size=5)
        reach = detectable_beyond(draws, 0.01)
        assert reach is not None
        found.append((another_draw_p(draws.mean() + reach, draws) or 0) < 0.01)
    assert np.mean(found) > 0.8 and detectable_beyond([0.1], 0.01) is None
