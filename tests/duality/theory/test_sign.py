import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.duality.theory.sign import (
    batch_sign,
    consistent_scale,
    l1_loss,
    risk_table,
    sign_risks,
    sign_sign,
    signed_values,
)
from dualview.io.errors import UserError

PROPERTY = settings(max_examples=25, deadline=None)

sizes = st.integers(1, 7)
seeds = st.integers(0, 10_000)
dtypes = st.sampled_from([torch.float64, torch.float32])


def normals(seed, dtype, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@PROPERTY
@given(sizes, sizes, sizes, dtypes, st.sampled_from([1e-3, 1.0, 1e3]), seeds)
def test_signed_values_are_a_step_on_the_l1_loss(d_k, d_v, n, dtype, scale, seed):
    keys, targets, weight, q = normals(seed, dtype, (d_k, n), (d_v, n), (d_v, d_k), (d_k,))
    keys, targets = scale * keys, scale * targets
    leaf = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(l1_loss(leaf, keys, targets), leaf)
    found = signed_values(keys, targets - weight @ keys, q, 0.1)
    torch.testing.assert_close(found, -0.1 * gradient @ q, rtol=1e-3, atol=1e-4 * scale)
    # the scale of the values is lost
    torch.testing.assert_close(signed_values(keys, 7 * (targets - weight @ keys), q, 0.1), found)


@PROPERTY
@given(sizes, sizes, sizes, seeds)
def test_the_two_sign_descents(d_k, d_v, n, seed):
    keys, values, q = normals(seed, torch.float64, (d_k, n), (d_v, n), (d_k,))
    outer = [np.outer(values[:, t].numpy(), keys[:, t].numpy()) for t in range(n)]
    np.testing.assert_allclose(
        sign_sign(keys, values, q, 0.3).numpy(), 0.3 * sum(np.sign(o) for o in outer) @ q.numpy(), atol=1e-12
    )
    np.testing.assert_allclose(
        batch_sign(keys, values, q, 0.3).numpy(), 0.3 * np.sign(sum(outer)) @ q.numpy(), atol=1e-12
    )


def test_the_three_are_different_things():
    keys, values, q = normals(0, torch.float64, (4, 6), (3, 6), (4,))
    found = [f(keys, values, q, 1.0) for f in (signed_values, sign_sign, batch_sign)]
    for i in range(3):
        assert float((found[i] - found[i - 1]).norm()) > 0.1


@pytest.mark.parametrize("kind", ["mean", "median"])
@pytest.mark.parametrize("size", [0.1, 1.0, 20.0])
def test_consistent_scale_recovers_the_weight_at_every_size(kind, size):
    weight, keys = normals(0, torch.float64, (2, 5), (5, 200_000))
    weight = size * weight
    values = weight @ keys
    estimate = consistent_scale(values, kind)[:, None] * (torch.sign(values) @ keys.T)
    torch.testing.assert_close(estimate, weight, rtol=0.05, atol=0.02 * size)


def test_constant_alpha_cannot():
    weight, keys = normals(0, torch.float64, (1, 5), (5, 1000))
    small, large = (torch.sign(s * weight @ keys) @ keys.T for s in (0.1, 10.0))
    torch.testing.assert_close(small, large)


def risks(n, noise="none", draws=20_000, seed=0, **options):
    return {r.estimator: r.risk for r in sign_risks(n, noise, draws=draws, seed=seed, **options)}


def test_risk_table_known_answers():
    ten, fifty = risks(10), risks(50)
    known_ten = {
        "gd": 0.524,
        "signed values": 0.615,
        "signed values, mean": 0.609,
        "sign-sign": 0.70,
        "batch sign": 0.67,
    }
    known_fifty = {
        "gd": 0.181,
        "signed values": 0.266,
        "signed values, mean": 0.247,
        "sign-sign": 0.33,
        "batch sign": 0.46,
    }
    for found, known in ((ten, known_ten), (fifty, known_fifty)):
        for name, value in known.items():
            assert found[name] == pytest.approx(value, abs=0.02), name
    cauchy = risks(50, "cauchy")
    assert cauchy["gd"] == pytest.approx(1.0, abs=0.02)
    assert cauchy["signed values"] == pytest.approx(0.35, abs=0.02)
    assert cauchy["signed values, median"] == pytest.approx(0.35, abs=0.02)
    assert cauchy["signed values, mean"] > 0.9


@pytest.mark.parametrize(("n", "dim", "noise"), [(5, 3, 0.5), (20, 8, 1.0), (12, 6, 2.0)])
def test_gradient_descents_risk_under_gaussian_noise(n, dim, noise):
    found = risks(n, "gaussian", dim=dim, scale=noise)["gd"]
    assert found == pytest.approx((dim + 1 + noise**2) / (n + dim + 1 + noise**2), abs=0.02)


def test_batch_sign_has_a_floor():
    assert risks(800, draws=2000)["batch sign"] == pytest.approx(1 - 2 / math.pi, abs=0.03)


def test_the_same_seed_gives_the_same_table():
    first, second = (risk_table((4,), ("none", "cauchy"), draws=100, seed=3) for _ in range(2))
    assert first == second and len(first) == 12
    assert risk_table((4,), ("none",), draws=100, seed=4) != first[:6]


def test_bad_sizes():
    with pytest.raises(UserError, match="at least 1"):
        sign_risks(0)
