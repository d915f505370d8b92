"""Agreement of the changes in label log-odds: its equation, its power and its blindness to what it should not see."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.metrics.agreement import agreement, centred_log_odds

RNG = np.random.default_rng


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def planted(n: int, k: int, seed: int, shared: float) -> tuple[np.ndarray, ...]:
    """Scores whose changes have the given correlation, on top of a shift by class and a shrinking of zero-shot."""
    rng = RNG(seed)
    gold = np.arange(n) % k
    zsl = rng.normal(size=(n, k))
    toward = np.eye(k)[gold]
    common, own = rng.normal(size=(n, k)), [rng.normal(size=(n, k)) for _ in range(2)]
    sides = [np.sqrt(shared) * common + np.sqrt(1 - shared) * each for each in own]
    icl, ft = (
        0.3 * zsl + size * toward + bias + side for side, size, bias in zip(sides, (3, 1), (0.5, -1), strict=True)
    )
    return gold, log_softmax(zsl), log_softmax(icl), log_softmax(ft)


def residuals(gold: np.ndarray, zsl: np.ndarray, side: np.ndarray, more: Sequence[np.ndarray] = ()) -> np.ndarray:
    """The equation with one regression for each candidate, by numpy's least squares."""
    base = zsl - zsl.mean(1, keepdims=True)
    design = np.column_stack([(gold == label).astype(float) for label in np.unique(gold)] + [base, *more])
    change = side - side.mean(1, keepdims=True) - base
    return np.stack([c - design @ np.linalg.lstsq(design, c, rcond=None)[0] for c in change.T], 1)


def slow(gold: np.ndarray, zsl: np.ndarray, icl: np.ndarray, ft: np.ndarray) -> float:
    rest = [residuals(gold, zsl, side) for side in (icl, ft)]
    return float((rest[0] * rest[1]).sum() / np.sqrt((rest[0] ** 2).sum() * (rest[1] ** 2).sum()))


@pytest.mark.parametrize(("n", "k"), [(40, 2), (61, 3), (90, 5)])
def test_against_a_slow_one(n: int, k: int) -> None:
    given = planted(n, k, 3, 0.4)
    assert agreement(*given).value == pytest.approx(slow(*given), abs=1e-10)


def test_it_finds_half_of_the_variance_and_names_what_it_could_have_found() -> None:
    found = agreement(*planted(120, 2, 1, 0.5))
    assert found.value is not None and found.p is not None and found.interval is not None
    assert found.p < 0.01 and found.interval.low < 0.5 < found.interval.high
    assert found.detectable is not None and 0.15 < found.detectable < 0.45


def test_unrelated_changes_pass_as_often_as_p_says() -> None:
    """Shared shift, class effect and shrinking of zero-shot: none of them is agreement."""
    ps = np.array([agreement(*planted(48, 2, 100 + seed, 0.0), draws=199).p for seed in range(200)])
    assert (ps < 0.05).mean() < 0.1 and 0.4 < ps.mean() < 0.6


def test_queries_that_move_far_in_both_settings_are_no_agreement() -> None:
    """Unequally far, so that permutations of the queries say yes too often; their signs do not."""
    by_test: dict[str, list[float]] = {"permuted": [], "signs": []}
    for seed in range(150):
        rng = RNG(seed)
        gold, zsl = np.arange(60) % 2, rng.normal(size=(60, 2))
        far = np.exp(rng.normal(size=(60, 1)))
        icl, ft = (zsl + far * rng.normal(size=(60, 2)) for _ in range(2))
        for test, p in agreement(gold, zsl, icl, ft, draws=199).tests.items():
            by_test[test].append(p)
    rates = {test: float(np.mean(np.array(ps) < 0.05)) for test, ps in by_test.items()}
    assert rates["signs"] < 0.1 and rates["permuted"] > 0.15


def test_signs_against_all_of_them() -> None:
    gold, zsl, icl, ft = planted(12, 2, 4, 0.3)
    found = agreement(gold, zsl, icl, ft, draws=4999)
    products = (residuals(gold, zsl, icl) * residuals(gold, zsl, ft)).sum(1)
    all_signs = np.array(np.meshgrid(*[[-1, 1]] * 12)).reshape(12, -1).T
    exact = (all_signs @ products >= products.sum() - 1e-12).mean()
    assert found.signs_p == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 4999) ** 0.5 + 1 / 5000)


def test_beyond_the_lengths_against_a_slow_one() -> None:
    given, rng = planted(70, 3, 2, 0.4), RNG(0)
    length = rng.integers(5, 40, size=70)
    slopes = [(given[0] == label) * length for label in range(3)]
    sides = [residuals(*given[:2], side, slopes) for side in given[2:]]
    slow_one = (sides[0] * sides[1]).sum() / np.sqrt((sides[0] ** 2).sum() * (sides[1] ** 2).sum())
    assert agreement(*given, length=length).value == pytest.approx(slow_one, abs=1e-9)
    assert agreement(*given, length=np.full(70, 9)).value == pytest.approx(agreement(*given).value)
    assert agreement(*planted(8, 3, 2, 0.4), length=np.arange(8)).value is None, "more slopes than queries"


def test_identical_changes_agree_at_any_accuracy() -> None:
    gold, zsl, icl, _ = planted(30, 2, 5, 0.5)
    icl = log_softmax(icl + 40 * np.eye(2)[gold])
    assert (icl.argmax(1) == gold).all(), "right on every query: Rec2FTP has no power here"
    found = agreement(gold, zsl, icl, icl)
    assert found.value == pytest.approx(1) and found.p is not None and found.p < 0.01


def test_opposite_changes_are_below_chance() -> None:
    gold, zsl, icl, _ = planted(60, 3, 5, 0.5)
    opposite = zsl - (icl - zsl)
    found = agreement(gold, zsl, icl, opposite)
    assert found.value == pytest.approx(-1) and found.below_p is not None and found.below_p < 0.01


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda zsl, gold: zsl + np.eye(2)[gold], "alike"),
        (lambda zsl, gold: zsl + np.array([1.0, -1.0]), "alike"),
        (lambda zsl, gold: 0.5 * zsl, "alike"),
        (lambda zsl, gold: np.where(np.arange(len(zsl))[:, None] == 0, np.nan, zsl), "not finite"),
    ],
)
def test_what_says_nothing_about_a_query_is_no_agreement(change, reason: str) -> None:
    gold, zsl, icl, _ = planted(30, 2, 5, 0.5)
    found = agreement(gold, zsl, icl, change(zsl, gold))
    assert found.value is None and found.p is None and reason in (found.reason or "")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_few_queries_are_not_tested(n: int) -> None:
    gold, *scores = planted(n, 2, 0, 0.5)
    found = agreement(gold, *scores)
    assert found.value is None and "few" in (found.reason or "")


def test_missing_labels_and_missing_candidates_are_taken_as_they_are() -> None:
    gold, zsl, icl, ft = planted(60, 3, 7, 0.6)
    one = agreement(np.zeros(60, dtype=int), zsl, icl, ft)
    assert one.value is not None, "one class only"
    fewer = [side.copy() for side in (zsl, icl, ft)]
    for side in fewer:
        side[::2, 2] = -np.inf
    assert agreement(np.minimum(gold, 1), *fewer).value is not None
    assert centred_log_odds(fewer[0])[0, 2] == 0


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 10), k=st.integers(2, 4))
def test_it_ignores_scale_shift_and_the_names_of_queries(seed: int, scale: float, k: int) -> None:
    gold, zsl, icl, ft = planted(40, k, seed, 0.3)
    found = agreement(gold, zsl, icl, ft, draws=99).value
    order = RNG(seed).permutation(40)
    mixed = agreement(gold[order], zsl[order], icl[order], ft[order], draws=99).value
    larger = agreement(gold, zsl, icl, zsl + scale * (ft - zsl) + 1.5, draws=99).value
    swapped = agreement(gold, zsl, ft, icl, draws=99).value
    assert found is not None and found == pytest.approx(mixed, abs=1e-9)
    assert found == pytest.approx(larger, abs=1e-9) and found == pytest.approx(swapped, abs=1e-9)
