"""Kendall's tau and top-k recall against their definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.io.errors import UserError
from dualview.metrics.kendall import demo_mass_of, kendall, rank_agreement, top_k_recall


def slow_tau_b(x: list[float], y: list[float]) -> float:
    """(C − D) / √((C + D + ties in x only) (C + D + ties in y only)), pair by pair."""
    concordant = discordant = only_x = only_y = 0
    for (a, b), (c, d) in itertools.combinations(list(zip(x, y, strict=True)), 2):
        if a == c and b == d:
            continue
        if a == c:
            only_x += 1
        elif b == d:
            only_y += 1
        elif (a - c) * (b - d) > 0:
            concordant += 1
        else:
            discordant += 1
    pairs = concordant + discordant
    scale = ((pairs + only_x) * (pairs + only_y)) ** 0.5
    return (concordant - discordant) / scale if scale else float("nan")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 15), st.sampled_from([3, 1000]))
def test_tau_b_equals_counting_pairs(seed: int, n: int, levels: int) -> None:
    x, y = np.random.default_rng(seed).integers(0, levels, size=(2, 3, 2, n)).astype(np.float64)
    found = kendall(x, y)
    for index in np.ndindex(3, 2):
        assert found[index] == pytest.approx(slow_tau_b(x[index].tolist(), y[index].tolist()), abs=1e-12, nan_ok=True)


def test_tau_of_same_reversed_and_undefined() -> None:
    x = np.array([[[1.0, 3.0, 2.0, 9.0]]])
    assert kendall(x, np.exp(x))[0, 0] == pytest.approx(1)
    assert kendall(x, -x)[0, 0] == pytest.approx(-1)
    assert np.isnan(kendall(x, np.ones_like(x))[0, 0])
    assert np.isnan(kendall(x, np.full_like(x, np.nan))[0, 0])


def test_demo_mass_is_softmax_summed() -> None:
    scores = np.random.default_rng(0).normal(size=(2, 3, 5)) * 50
    demo = np.array([0, 0, 2, 2, 2])
    found = demo_mass_of(scores, demo, n_demos=4)
    np.testing.assert_allclose(found.sum(axis=-1), 1.0)
    np.testing.assert_allclose(found[..., [1, 3]], 0.0)
    weights = [np.exp(v - max(scores[1, 2])) for v in scores[1, 2]]
    assert found[1, 2, 0] == pytest.approx(sum(weights[:2]) / sum(weights))


def test_top_k_recall_by_hand_and_by_chance() -> None:
    x = np.array([[[5.0, 4.0, 3.0, 2.0, 1.0]]])
    y = np.array([[[5.0, 1.0, 4.0, 4.0, 4.0]]])
    assert top_k_recall(x, y, 2)[0, 0] == 0.5
    assert top_k_recall(x, y, 3)[0, 0] == pytest.approx(2 / 3)  # ties to the lowest index: 0, 2, 3
    assert top_k_recall(x, x, 4)[0, 0] == 1.0
    a, b = np.random.default_rng(0).normal(size=(2, 100, 3, 40))
    found = rank_agreement(a, b, np.repeat(np.arange(8), 5), top_tokens=10, top_demos=3)
    assert (
        found.recall_token.mean() == pytest.approx(found.recall_token_chance, abs=0.03) == pytest.approx(0.25, abs=0.03)
    )
    assert found.recall_demo.mean() == pytest.approx(found.recall_demo_chance, abs=0.06)
    assert found.to_json()["tau_token"] == pytest.approx(0, abs=0.03)
    with pytest.raises(UserError, match="k is 50"):
        top_k_recall(a, b, 50)


def test_agreement_with_itself_is_total_and_k_is_at_most_half() -> None:
    a = np.random.default_rng(1).normal(size=(2, 2, 12))
    found = rank_agreement(a, a, np.repeat(np.arange(4), 3))
    told = found.to_json()
    assert told.pop("tau_token_per_layer") == [1.0, 1.0]
    assert told == pytest.approx(
        {
            "tau_token": 1,
            "tau_demo": 1,
            "recall_token": 1,
            "recall_demo": 1,
            "recall_token_chance": 0.5,
            "recall_demo_chance": 0.5,
        }
    )


@pytest.mark.parametrize(("n", "levels"), [(64, 9), (65, 10**6), (128, 40), (200, 10**6), (330, 150)])
def test_tau_b_of_long_rows_equals_counting_pairs(n: int, levels: int) -> None:
    x, y = np.random.default_rng(n).integers(0, levels, size=(2, 1, 2, n)).astype(np.float64)
    for index, tau in np.ndenumerate(kendall(x, y)):
        assert tau == pytest.approx(slow_tau_b(x[index].tolist(), y[index].tolist()), abs=1e-12)
