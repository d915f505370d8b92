"""Predictions, Rec2FTP (with the papers' own counts), warnings, overlaps."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.io.errors import UserError
from dualview.metrics.overlap import TopK, overlap_cosine, token_overlap, top_k
from dualview.metrics.predictions import accuracy, order_sensitivity, prediction_warnings, predictions, rec2ftp
from dualview.metrics.statistics import hypergeometric_p


def test_predictions_break_ties_downwards_and_survive_nan() -> None:
    scores = np.array([[-1.0, -1.0, -2.0], [-3.0, -2.0, -2.0], [np.nan, -2.0, -1.0], [np.nan] * 3, [-np.inf] * 3])
    assert predictions(scores).tolist() == [0, 1, 2, -1, 0]
    assert accuracy(scores, np.array([0, 2, 2, 0, 0])) == 3 / 5


@pytest.mark.parametrize(
    ("both", "ft", "icl", "wrong", "p"),
    [(45, 49, 227, 257, 0.28), (7, 11, 181, 668, 0.011), (137, 141, 318, 364, 1e-6), (271, 318, 435, 548, 6e-5)],
    ids=["sst2", "sst5", "mr", "subj"],
)
def test_published_counts(both: int, ft: int, icl: int, wrong: int, p: float) -> None:
    """Deutch et al.'s counts for the 1.3B model: the p-values of comparison.md, section 4.1, to their digits."""
    found = hypergeometric_p(both, ft, icl, wrong)
    digits = 2 if p > 0.001 else 1
    assert float(f"{found:.{digits - 1}e}") == pytest.approx(p)


def slow_tail(both: int, ft: int, icl: int, wrong: int) -> float:
    ways = [
        math.comb(icl, k) * math.comb(wrong - icl, ft - k)
        for k in range(both, min(ft, icl) + 1)
        if ft - k <= wrong - icl
    ]
    return float(Fraction(sum(ways), math.comb(wrong, ft)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 4))
def test_rec2ftp_equals_counting_by_hand(seed: int, n: int, candidates: int) -> None:
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, candidates, n)
    zsl, icl, ft = rng.normal(size=(3, n, candidates))
    found = rec2ftp(gold, zsl, icl, ft)
    right = [
        [max(range(candidates), key=lambda j: (row[j], -j)) == g for row, g in zip(s, gold, strict=True)]
        for s in (zsl, icl, ft)
    ]
    wrong = [q for q in range(n) if not right[0][q]]
    mended = [q for q in wrong if right[2][q]]
    both = [q for q in mended if right[1][q]]
    by_icl = [q for q in wrong if right[1][q]]
    assert (found.n_ft, found.n_both, found.n_icl, found.n_wrong) == (len(mended), len(both), len(by_icl), len(wrong))
    assert found.value == (len(both) / len(mended) if mended else None)
    assert found.chance == (len(by_icl) / len(wrong) if wrong else None)
    assert found.reverse == (len(both) / len(by_icl) if by_icl else None)
    assert (found.reason is None) == bool(mended)
    if mended:
        assert found.p == pytest.approx(slow_tail(len(both), len(mended), len(by_icl), len(wrong)), rel=1e-9)
    else:
        assert found.p is None


def test_nothing_mended_has_its_reason() -> None:
    wrong, right = np.array([[0.0, -1.0]] * 3), np.array([[-1.0, 0.0]] * 3)
    gold = np.array([1, 1, 1])
    assert rec2ftp(gold, wrong, right, wrong).reason == "FT fixes none of ZSL's errors"
    assert rec2ftp(gold, right, right, right).reason == "ZSL is right on every query"


def test_constant_predictions_are_warned_about() -> None:
    constant, varied = np.array([[0.0, -1.0]] * 3), np.array([[0.0, -1.0], [-1.0, 0.0], [0.0, -1.0]])
    assert prediction_warnings({"zsl": varied, "ft": constant}) == ["ft predicts label 0 for all 3 queries."]
    assert prediction_warnings({"zsl": varied[:1]}) == []


def test_order_sensitivity() -> None:
    fixed = np.log(np.array([[0.2, 0.8], [0.5, 0.5]]))
    assert order_sensitivity(np.stack([fixed] * 4)) == pytest.approx([0.0, 0.0])
    swung = np.stack([np.log([[0.9, 0.1]]), np.log([[0.1, 0.9]])])
    assert order_sensitivity(swung) == pytest.approx([0.4])
    assert order_sensitivity(swung + 3.0) == pytest.approx([0.4])  # scores need not be normalised
    missing = np.concatenate([swung, np.full((2, 1, 1), -np.inf)], axis=2)
    assert order_sensitivity(missing) == pytest.approx([0.4])
    with pytest.raises(UserError, match="two permutations"):
        order_sensitivity(swung[:1])


def test_token_overlap_and_cosine() -> None:
    a = TopK(np.array([[1, 2, 3, 4]]), np.array([[0.4, 0.3, 0.2, 0.1]]))
    b = TopK(np.array([[3, 9, 1, 7]]), np.array([[0.5, 0.2, 0.1, 0.1]]))
    assert token_overlap(a, b) == pytest.approx([0.5])
    shared = 0.4 * 0.1 + 0.2 * 0.5
    wanted = shared / math.sqrt((0.4**2 + 0.2**2) * (0.1**2 + 0.5**2) * (4 - 2))
    assert overlap_cosine(a, b) == pytest.approx([wanted])
    assert np.isnan(overlap_cosine(a, a)).all() and token_overlap(a, a).tolist() == [1.0]
    none = TopK(np.array([[10, 11, 12, 13]]), b.probs)
    assert overlap_cosine(a, none).tolist() == [0.0] and token_overlap(a, none).tolist() == [0.0]


def test_top_k_picks_the_likeliest() -> None:
    found = top_k(np.array([[0.1, 0.4, 0.4, 0.1]]), k=3)
    assert found.ids.tolist() == [[1, 2, 0]] and found.probs.tolist() == [[0.4, 0.4, 0.1]]
    with pytest.raises(UserError, match="k is 9"):
        top_k(np.ones((1, 4)), k=9)
