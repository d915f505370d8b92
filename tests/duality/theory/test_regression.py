import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.duality.theory.regression import (
    gaussian_optimum,
    gd_layer,
    gd_plus_plus,
    gd_plus_plus_layer,
    gd_step,
    lsa_optimum,
    one_step_optimum,
    regression_tokens,
    run_layers,
    squared_loss,
    uniform_optimum,
)
from dualview.io.errors import UserError

PROPERTY = settings(max_examples=25, deadline=None)

sizes = st.integers(1, 8)
dtypes = st.sampled_from([torch.float64, torch.float32])
seeds = st.integers(0, 10_000)


def problem(seed, n_x, n_y, n, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n_x, n), (n_y, n), (n_x, 2), (n_y, n_x)]
    return [scale * torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


@PROPERTY
@given(sizes, st.integers(1, 4), sizes, st.integers(1, 5), dtypes, st.sampled_from([0.01, 1.0, 3.0]), seeds)
def test_layers_are_steps_for_any_data_and_any_start(n_x, n_y, n, depth, dtype, scale, seed):
    x, y, x_query, start = problem(seed, n_x, n_y, n, dtype, scale)
    rate = 0.1 / scale**2
    layer = gd_layer(start, rate, n)
    after = run_layers(regression_tokens(x, y, x_query, start), [layer] * depth)
    weight, inputs, targets = (t.double().numpy() for t in (start, x, y))
    for _ in range(depth):  # the gradient sample by sample
        weight = weight - rate / n * sum(
            np.outer(weight @ inputs[:, i] - targets[:, i], inputs[:, i]) for i in range(n)
        )
    tight = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-10}
    np.testing.assert_allclose(after.prediction.double().numpy(), weight @ x_query.double().numpy(), **tight)
    moved = targets - (weight - start.double().numpy()) @ inputs
    np.testing.assert_allclose(after.context.double().numpy(), np.concatenate([inputs, moved]), **tight)
    assert torch.equal(after.query[:n_x], x_query)


def test_without_a_start_the_query_slot_is_zero_and_gd_starts_at_zero():
    x, y, x_query, _ = problem(0, 3, 2, 5)
    tokens = regression_tokens(x, y, x_query)
    assert tokens.query[3:].abs().max() == 0
    after = run_layers(tokens, [gd_layer(torch.zeros(2, 3, dtype=torch.float64), 0.2, 5)])
    torch.testing.assert_close(after.prediction, 0.2 / 5 * y @ x.T @ x_query)


@PROPERTY
@given(sizes, st.integers(1, 4), sizes, seeds)
def test_gd_step_is_autograds(n_x, n_y, n, seed):
    x, y, _, weight = problem(seed, n_x, n_y, n)
    leaf = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(squared_loss(leaf, x, y), leaf)
    torch.testing.assert_close(gd_step(weight, x, y, 0.3), weight - 0.3 * gradient)


@PROPERTY
@given(sizes, st.integers(1, 3), sizes, st.integers(1, 4), seeds)
def test_gd_plus_plus_layers(n_x, n_y, n, depth, seed):
    x, y, x_query, _ = problem(seed, n_x, n_y, n)
    layer = gd_plus_plus_layer(n_x, n_y, 0.2, 0.01, n, x)
    found = run_layers(regression_tokens(x, y, x_query), [layer] * depth)
    torch.testing.assert_close(found.prediction, gd_plus_plus(x, y, x_query, 0.2, 0.01, depth), rtol=1e-9, atol=1e-10)


def test_gd_plus_plus_moves_eigenvalues_as_it_says():
    x, y, x_query, _ = problem(1, 4, 1, 9)
    layer = gd_plus_plus_layer(4, 1, 0.2, 0.01, 9, x)
    moved = run_layers(regression_tokens(x, y, x_query), [layer]).context[:4]
    before = torch.linalg.eigvalsh(x @ x.T)
    torch.testing.assert_close(
        torch.linalg.eigvalsh(moved @ moved.T), (before * (1 - 0.01 * before) ** 2).sort().values
    )


def test_known_answers():
    best = uniform_optimum(10, 10)
    assert best.rate == pytest.approx(6.06, abs=0.005) and best.loss == pytest.approx(0.2062, abs=5e-5)
    assert gaussian_optimum(10, 10).risk == pytest.approx(11 / 21) and gaussian_optimum(10, 10).rate == pytest.approx(
        10 / 21
    )
    wrong = gaussian_optimum(10, 10, 1 / 12)
    assert wrong.rate == pytest.approx(5.71, abs=0.005) and wrong.loss == pytest.approx(0.218, abs=5e-4)


def monte_carlo_loss(x, rate, generator):
    """½ mean (y_q − ŷ_q)², through the attention formula itself and with a drawn query."""
    tasks, n, d = x.shape
    w = torch.randn(tasks, d, generator=generator, dtype=torch.float64)
    query = x[
        torch.randperm(tasks, generator=generator), 0
    ]  # a query of the same distribution, independent of its task
    y = torch.einsum("tnd,td->tn", x, w)
    guess = rate / n * torch.einsum("tn,tnd,td->t", y, x, query)
    return 0.5 * float((guess - (w * query).sum(dim=1)).square().mean())


def test_monte_carlo_agrees_with_the_uniform_closed_form_and_other_rates_are_worse():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200_000, 10, 10, generator=generator, dtype=torch.float64) - 0.5
    losses = {rate: monte_carlo_loss(x, rate, torch.Generator().manual_seed(1)) for rate in (4.5, 6.06, 7.5)}
    assert losses[6.06] == pytest.approx(0.2062, rel=0.02)
    assert losses[6.06] < min(losses[4.5], losses[7.5])


def random_covariance(seed, d):
    root = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T / d + 0.2 * torch.eye(d, dtype=torch.float64)


@PROPERTY
@given(st.integers(1, 6), st.integers(1, 20), seeds)
def test_lsa_optimum_is_gamma_inverse(d, n, seed):
    sigma = random_covariance(seed, d)
    gamma = (n + 1) / n * sigma + torch.trace(sigma) / n * torch.eye(d, dtype=torch.float64)
    torch.testing.assert_close(lsa_optimum(sigma, n).matrix, torch.linalg.inv(gamma), rtol=1e-8, atol=1e-9)


@PROPERTY
@given(st.integers(1, 8), st.integers(1, 30))
def test_lsa_optimum_of_isotropic_inputs_is_the_single_step(d, n):
    best, step = lsa_optimum(torch.eye(d, dtype=torch.float64), n), gaussian_optimum(d, n)
    torch.testing.assert_close(best.matrix, step.rate * torch.eye(d, dtype=torch.float64))
    assert best.loss == pytest.approx(step.loss, abs=1e-12)


def test_lsa_optimum_with_prior_and_noise_beats_every_perturbation_on_the_same_tasks():
    d, n, tasks, noise = 3, 8, 100_000, 0.5
    sigma, prior = random_covariance(0, d), random_covariance(1, d)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tasks, n, d, generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(sigma).T
    w = torch.randn(tasks, d, generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(prior).T
    y = torch.einsum("tnd,td->tn", x, w) + noise * torch.randn(tasks, n, generator=generator, dtype=torch.float64)
    moment = torch.einsum("tn,tnd->td", y, x) / n

    def loss(matrix):
        error = moment @ matrix.T - w
        return 0.5 * float(torch.einsum("td,de,te->t", error, sigma, error).mean())

    best = lsa_optimum(sigma, n, prior, noise)
    assert loss(best.matrix) == pytest.approx(best.loss, rel=0.03)
    for seed in range(10):
        direction = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        bump = 0.2 * best.matrix.norm() * direction / direction.norm()
        assert loss(best.matrix + bump) > loss(best.matrix)
    assert loss(lsa_optimum(sigma, n).matrix) > loss(best.matrix)


def test_bad_sizes():
    with pytest.raises(UserError, match="kurtosis"):
        one_step_optimum(3, 3, kurtosis=0.5)
    with pytest.raises(UserError, match="n_demos"):
        one_step_optimum(3, 0)
