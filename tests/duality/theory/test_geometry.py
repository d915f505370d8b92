import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.duality.on_model.meta_gradients import TokenVectors, compare_meta_gradients
from dualview.duality.theory.geometry import (
    column_cosines,
    compare_weights,
    cosine,
    linear_cka,
    orthonormal_basis,
    overlap,
    stable_rank,
)
from dualview.io.errors import UserError

PROPERTY = settings(max_examples=25, deadline=None)

seeds = st.integers(0, 10_000)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@PROPERTY
@given(st.integers(2, 10), st.integers(1, 6), st.integers(1, 6), seeds)
def test_overlap_is_the_mean_squared_cosine_of_scipys_angles(m, p, q, seed):
    p, q = min(p, m), min(q, m)
    a, b = normal(seed, m, p), normal(seed + 1, m, q)
    angles = scipy.linalg.subspace_angles(a.numpy(), b.numpy())
    found = overlap(orthonormal_basis(a), orthonormal_basis(b))
    assert found == pytest.approx(float((np.cos(angles) ** 2).mean()), abs=1e-9)


def leading(a, b, rank):
    return overlap(orthonormal_basis(a, rank), orthonormal_basis(b, rank))


def test_leading_subspaces_and_rank_deficiency():
    shared = normal(0, 6, 1)
    a = 10 * shared @ normal(1, 1, 6) + 0.01 * normal(2, 6, 6)
    b = 10 * shared @ normal(3, 1, 6) + 0.01 * normal(4, 6, 6)
    assert leading(a, b, 1) > 0.999 > leading(a, b, 3)
    assert orthonormal_basis(shared @ normal(1, 1, 6), 4).shape == (6, 1)
    with pytest.raises(UserError, match="zero matrix"):
        orthonormal_basis(torch.zeros(3, 3))


@PROPERTY
@given(st.integers(1, 7), st.integers(1, 7), st.sampled_from([1e-8, 1.0, 1e8]), seeds)
def test_stable_rank(m, n, scale, seed):
    a = scale * normal(seed, m, n)
    values = np.linalg.svd(a.numpy(), compute_uv=False)
    assert stable_rank(a) == pytest.approx(float((values**2).sum() / values[0] ** 2))
    assert 1 - 1e-9 <= stable_rank(a) <= min(m, n) + 1e-9


def test_stable_rank_known():
    assert stable_rank(torch.eye(5)) == pytest.approx(5)
    assert stable_rank(torch.ones(3, 4)) == pytest.approx(1)
    assert stable_rank(torch.zeros(3, 4)) == 0


def hsic_cka(a, b):
    """CKA by centred Gram matrices, Kornblith's eq. 2: another formula for the same number."""
    n = a.shape[1]
    centre = np.eye(n) - 1 / n
    of_a, of_b = a.T @ a, b.T @ b
    hsic = lambda x, y: np.trace(x @ centre @ y @ centre)  # noqa: E731
    return hsic(of_a, of_b) / math.sqrt(hsic(of_a, of_a) * hsic(of_b, of_b))


@PROPERTY
@given(st.integers(1, 8), st.integers(1, 8), st.integers(2, 12), st.sampled_from([1e-3, 1.0, 1e3]), seeds)
def test_linear_cka(d_a, d_b, n, scale, seed):
    a, b = scale * normal(seed, d_a, n), normal(seed + 1, d_b, n) + 5
    assert linear_cka(a, b) == pytest.approx(hsic_cka(a.numpy(), b.numpy()), rel=1e-7, abs=1e-9)
    rotation = torch.linalg.qr(normal(seed + 2, d_a, d_a)).Q
    assert linear_cka(a, 3 * rotation @ a + 1) == pytest.approx(1)


def test_undefined_cosines_are_nan_and_left_out():
    zero = torch.zeros(3, 2)
    assert math.isnan(cosine(zero, torch.ones(3, 2))) and math.isnan(linear_cka(zero, torch.ones(3, 2)))
    a = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    found = column_cosines(a, -a)
    assert found[0] == pytest.approx(-1) and math.isnan(found[1])
    assert cosine(a, a) == pytest.approx(1) and cosine(a, -2 * a) == pytest.approx(-1)


def test_token_comparison_stands_above_its_floor_only_for_the_same_tokens():
    a = normal(0, 16, 300)
    like, unlike = (
        compare_meta_gradients([TokenVectors(a, b)]) for b in (a + 0.5 * normal(1, 16, 300), normal(2, 16, 300))
    )
    assert like.cosine[0] > 0.8 and abs(like.cosine_floor[0]) < 0.1 and like.cka[0] > 5 * like.cka_floor[0]
    assert abs(unlike.cosine[0] - unlike.cosine_floor[0]) < 0.1
    assert unlike.cka[0] == pytest.approx(unlike.cka_floor[0], abs=0.05)


def test_weight_comparison():
    a = normal(0, 20, 30)
    same = compare_weights(a, 2 * a, rank=4)
    assert (
        same.cosine == pytest.approx(1)
        and same.left_overlap == pytest.approx(1)
        and same.norm_ratio == pytest.approx(0.5)
    )
    other = compare_weights(a, normal(1, 20, 30), rank=4)
    assert abs(other.cosine) < 0.2 and other.left_overlap < 0.6 and other.stable_rank_icl == same.stable_rank_icl
