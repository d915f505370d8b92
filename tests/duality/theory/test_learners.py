import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.duality.theory.learners import (
    delta_rule,
    exponential_kernel,
    functional_descent,
    gaussian_kernel,
    kernel_attention,
    linear_kernel,
    mesa,
    mesa_recursion,
)
from dualview.duality.theory.toy_attention import relative_error
from dualview.io.errors import UserError

PROPERTY = settings(max_examples=25, deadline=None)

sizes = st.integers(1, 7)
seeds = st.integers(0, 10_000)
dtypes = st.sampled_from([torch.float64, torch.float32])


def normals(seed, dtype, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def tight(dtype):
    return 1e-10 if dtype == torch.float64 else 2e-3


@PROPERTY
@given(sizes, sizes, sizes, dtypes, st.booleans(), seeds)
def test_delta_rule_is_sequential_sgd(d_k, d_v, n, dtype, gated, seed):
    keys, values, start = normals(seed, dtype, (d_k, n), (d_v, n), (d_v, d_k))
    keys = keys / keys.norm(dim=0)
    rates = torch.linspace(0.1, 0.9, n, dtype=dtype)
    decays = torch.linspace(0.5, 1.0, n, dtype=dtype) if gated else None
    state = start.double().numpy()
    for t in range(n):
        k, v = keys[:, t].double().numpy(), values[:, t].double().numpy()
        state = state * (float(decays[t]) if gated else 1.0)
        state = state - float(rates[t]) * np.outer(state @ k - v, k)
    found = delta_rule(keys, values, rates, decays, start)
    assert relative_error(found, torch.from_numpy(state)) < tight(dtype)


def test_unit_rate_and_orthonormal_keys_store_the_values_exactly():
    values = torch.randn(3, 4, dtype=torch.float64)
    stored = delta_rule(torch.eye(4, dtype=torch.float64), values, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(stored, values)


@PROPERTY
@given(sizes, sizes, sizes, st.floats(0.01, 50), seeds)
def test_mesa_is_ridge_and_its_recursion_agrees(d_k, d_v, n, strength, seed):
    keys, values = normals(seed, torch.float64, (d_k, n), (d_v, n))
    found = mesa(keys, values, strength)
    # ridge as least squares on augmented data: another solver altogether
    padded = np.concatenate([keys.T.numpy(), np.eye(d_k) / np.sqrt(strength)])
    targets = np.concatenate([values.T.numpy(), np.zeros((d_k, d_v))])
    expected = np.linalg.lstsq(padded, targets, rcond=None)[0].T
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(mesa_recursion(keys, values, strength), found, rtol=1e-6, atol=1e-8)


def test_mesa_strength_must_be_positive():
    for function in (mesa, mesa_recursion):
        with pytest.raises(UserError, match="positive"):
            function(torch.eye(2), torch.eye(2), 0.0)


def test_kernels_on_points():
    a, b = normals(0, torch.float64, (3, 4), (3, 5))
    for i in range(4):
        for j in range(5):
            x, y = a[:, i].numpy(), b[:, j].numpy()
            assert float(linear_kernel(a, b)[i, j]) == pytest.approx(x @ y)
            assert float(exponential_kernel(a, b)[i, j]) == pytest.approx(np.exp(x @ y))
            assert float(gaussian_kernel(a, b)[i, j]) == pytest.approx(np.exp(-((x - y) ** 2).sum() / 2))


@PROPERTY
@given(
    sizes,
    st.integers(1, 3),
    sizes,
    st.integers(0, 5),
    dtypes,
    st.sampled_from([linear_kernel, exponential_kernel, gaussian_kernel]),
    seeds,
)
def test_kernel_attention_is_functional_descent(d, n_y, n, depth, dtype, kernel, seed):
    x, y, x_query = normals(seed, dtype, (d, n), (n_y, n), (d, 2))
    x, x_query = 0.4 * x, 0.4 * x_query
    rate = 0.5 / float(kernel(x, x).norm())
    found = kernel_attention(kernel, x, y, x_query, rate, depth)
    expected = functional_descent(kernel, x, y, x_query, rate, depth)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=tight(dtype))


def test_functional_descent_fits_its_data_in_the_end():
    x, y = normals(0, torch.float64, (2, 5), (1, 5))
    gram = gaussian_kernel(x, x)
    rate = 1.0 / float(torch.linalg.eigvalsh(gram)[-1])
    fitted = functional_descent(gaussian_kernel, x, y, x, rate, 20_000)
    torch.testing.assert_close(fitted, y, rtol=1e-2, atol=1e-2)


def test_linear_kernel_attention_is_gradient_descent():
    x, y, x_query = normals(0, torch.float64, (3, 6), (2, 6), (3, 2))
    weight = torch.zeros(2, 3, dtype=torch.float64)
    for _ in range(3):
        weight = weight + 0.05 * (y - weight @ x) @ x.T
    torch.testing.assert_close(kernel_attention(linear_kernel, x, y, x_query, 0.05, 3), weight @ x_query)
