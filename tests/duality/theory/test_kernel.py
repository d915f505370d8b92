import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dualview.duality.theory.features import (
    gram_features,
    random_directions,
    random_features,
    taylor_exp,
    taylor_features,
    taylor_remainder,
)
from dualview.duality.theory.kernel import (
    Head,
    augmented,
    generalisation_bound,
    kernel_model,
    lowest_attention,
    negative,
    negative_loss,
    negative_values,
    parallel_adapter,
    regularised_attention,
    regularised_slide,
    relu_fold,
    shortened,
    slide_alpha,
    softmax_head,
)
from dualview.duality.theory.toy_attention import relative_error
from dualview.io.errors import UserError

PROPERTY = settings(max_examples=25, deadline=None)

sizes = st.integers(1, 7)
seeds = st.integers(0, 10_000)


def normals(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def head_of(seed, d=4, d_v=3, n=6, own=2, size=0.7):
    dk, dv, ok, ov, q = normals(seed, (d, n), (d_v, n), (d, own), (d_v, own), (d,))
    return Head(size * dk, dv, size * ok, ov, size * q)


def slow_attention(head, exp=math.exp):
    """Softmax attention one token at a time, in Python."""
    keys, values, q = head.keys.numpy(), head.values.numpy(), head.query.numpy()
    weights = [exp(float(keys[:, i] @ q)) for i in range(keys.shape[1])]
    return sum(w * values[:, i] for i, w in enumerate(weights)) / sum(weights)


@PROPERTY
@given(sizes, sizes, st.integers(1, 8), st.integers(0, 4), st.floats(0.01, 100), seeds)
def test_theorem_exact_with_gram_features(d, d_v, n, own, rate, seed):
    head = head_of(seed, d, d_v, n, own, size=0.6)
    model = kernel_model(head)
    expected = torch.from_numpy(slow_attention(head))
    size = float(head.values.norm())
    leaf = model.initial().requires_grad_()
    (gradient,) = torch.autograd.grad(model.loss(leaf, rate), leaf)
    torch.testing.assert_close(model.gradient(rate), gradient)
    for weight in (model.step(rate), model.initial() - rate * gradient, model.token_steps(rate)[-1]):
        assert float((model.predict(weight) - expected).norm()) < 1e-10 * size
    assert model.token_steps(rate).shape[0] == n
    torch.testing.assert_close(model.step(rate), model.step(1.0), rtol=1e-9, atol=1e-9 * size)
    if own == 0:
        assert float(model.initial().abs().max()) == 0


def test_layer_has_the_fourth_root_on_both_sides():
    w_k, w_q, w_v, demos, own, x = normals(0, (16, 5), (16, 5), (3, 5), (5, 4), (5, 2), (5,))
    both = torch.cat([demos, own], dim=1)
    logits = (w_k @ both).T @ (w_q @ x) / 4
    torch.testing.assert_close(
        softmax_head(w_k, w_q, w_v, demos, own, x).output(), w_v @ both @ torch.softmax(logits, 0)
    )


def test_the_normaliser_depends_on_the_query():
    head = head_of(0)
    other = replace(head, query=-head.query)
    assert float(kernel_model(head).normaliser) != pytest.approx(float(kernel_model(other).normaliser), rel=0.01)


@PROPERTY
@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from([0.1, 0.5, 1.0]), seeds)
def test_gram_features_reproduce_the_kernel(d, n, size, seed):
    (z,) = normals(seed, (d, n))
    z = size * z
    phi = gram_features(z)
    kernel = np.array([[math.exp(float(z[:, i] @ z[:, j])) for j in range(n)] for i in range(n)])
    scale = np.sqrt(np.outer(np.diag(kernel), np.diag(kernel)))
    assert np.abs((phi.T @ phi).numpy() - kernel).max() <= 1e-13 * n * scale.max()


@PROPERTY
@given(st.integers(1, 7), st.integers(1, 8), st.floats(0.1, 24), st.floats(0.1, 24), seeds)
@example(d=1, n=1, of_keys=19.0, of_query=24.0, seed=0)
def test_the_theorem_is_exact_for_long_keys_too(d, n, of_keys, of_query, seed):
    """Norms up to the domain's end: logits of hundreds, kernel values of 1e-200 beside 1e200."""
    head = head_of(seed, d, 3, n, 2)
    keys = of_keys * head.keys / head.keys.norm(dim=0).max()
    query = of_query * head.query / head.query.norm()
    head = replace(head, demo_keys=keys[:, :n], own_keys=keys[:, n:], query=query)
    logits = keys.T @ query
    expected = head.values @ torch.softmax(logits, 0)
    model = kernel_model(head)
    size = float(head.values.norm())
    assert float((model.predict(model.step(0.3)) - expected).norm()) < 1e-12 * size
    products = model.query @ torch.cat([model.demo_features, model.own_features], 1)
    # A key's first feature is exp(kᵀq − ‖q‖²/2): below the smallest normal number it has lost digits, or is 0.
    half, tiny = float(query @ query) / 2, torch.finfo(torch.float64).tiny
    held = logits - half > math.log(tiny)
    torch.testing.assert_close(products[held], torch.exp(logits[held]), rtol=1e-10, atol=0)
    assert bool((products[~held] <= 2 * tiny * math.exp(half)).all())


def test_keys_that_are_too_long_are_refused_and_can_be_shortened():
    head = head_of(3, d=5, n=7)
    long = replace(head, **{name: 30 * getattr(head, name) for name in ("demo_keys", "own_keys", "query")})
    with pytest.raises(UserError, match="the longest point has norm"):
        kernel_model(long)
    with pytest.raises(UserError, match="the longest point has norm"):
        gram_features(torch.full((4, 3), 30.0))
    far = replace(head, demo_keys=head.demo_keys + 40, own_keys=head.own_keys + 40)  # softmax does not see the shift
    with pytest.raises(UserError, match="the longest point has norm"):
        kernel_model(far)
    short = shortened(far)
    torch.testing.assert_close(short.output(), far.output(), rtol=1e-10, atol=1e-12)
    model = kernel_model(short)
    torch.testing.assert_close(model.predict(model.step(1.0)), far.output(), rtol=1e-10, atol=1e-12)


def test_shortening_balances_keys_and_query():
    head = head_of(4)
    lopsided = replace(head, demo_keys=1e6 * head.demo_keys, own_keys=1e6 * head.own_keys, query=1e-6 * head.query)
    short = shortened(lopsided)
    torch.testing.assert_close(short.output(), head.output())
    assert float(short.keys.norm(dim=0).max()) == pytest.approx(float(short.query.norm()))
    nothing = replace(head, query=0 * head.query)
    torch.testing.assert_close(shortened(nothing).output(), nothing.output())


def test_features_that_leave_nothing_to_divide_by_are_refused():
    with pytest.raises(UserError, match="normaliser"):
        kernel_model(head_of(0), lambda points: torch.zeros(3, points.shape[1], dtype=points.dtype))


@PROPERTY
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 6), seeds)
def test_taylor_features_are_the_truncated_series(d, n, order, seed):
    (z,) = normals(seed, (d, n))
    phi = taylor_features(z, order)
    series = np.array(
        [
            [sum(float(z[:, i] @ z[:, j]) ** m / math.factorial(m) for m in range(order + 1)) for j in range(n)]
            for i in range(n)
        ]
    )
    np.testing.assert_allclose((phi.T @ phi).numpy(), series, rtol=1e-9, atol=1e-9)
    assert phi.shape[0] == sum(d**m for m in range(order + 1))


@PROPERTY
@given(st.floats(-20, 20), st.integers(0, 30))
@example(15.0, 20)
def test_taylor_remainder_bounds_the_error(t, order):
    at = torch.tensor([t], dtype=torch.float64)
    error = abs(math.exp(t) - float(taylor_exp(at, order)))
    assert error <= float(taylor_remainder(at, order)) * (1 + 1e-9) + 1e-6 * math.exp(abs(t)) * 1e-8


@pytest.mark.parametrize("order", [0, 7, 20, 30])
def test_taylor_remainder_against_fractions(order):
    """All digits: torch's own incomplete gamma function is 2e-9 too small at 15 and order 20."""
    points = [0.0, -0.25, 0.25, 3.0, 10.0, 14.75, 15.0, -20.0]
    exact = [
        float(sum(Fraction(abs(t)) ** n / math.factorial(n) for n in range(order + 1, order + 120))) for t in points
    ]
    found = taylor_remainder(torch.tensor(points, dtype=torch.float64), order)
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-13)
    assert taylor_remainder(torch.tensor([math.inf, 800.0]), order).isinf().all()
    assert taylor_remainder(torch.tensor([math.nan]), order).isnan().all()


def test_taylor_error_falls_factorially():
    """On random five-dimensional points of the usual size: about 1e-1, 1e-3, 1e-8 at orders 4, 8, 16."""
    keys, values, q = normals(1, (5, 20), (3, 20), (5,))
    keys, q = keys * 5**-0.25, q * 5**-0.25
    head = Head(keys, values, keys[:, :0], values[:, :0], q)
    errors = []
    for order in (4, 8, 16):
        weights = taylor_exp(keys.T @ q, order)
        errors.append(relative_error(values @ weights / weights.sum(), head.output()))
    assert errors[0] < 0.5 and errors[1] < errors[0] / 20 and errors[2] < errors[1] / 1e3 and errors[2] < 1e-6
    model = kernel_model(head, partial(taylor_features, order=6))
    weights = taylor_exp(keys.T @ q, 6)
    torch.testing.assert_close(model.predict(model.step(1.0)), values @ weights / weights.sum())


def test_too_many_taylor_features():
    with pytest.raises(UserError, match="too many"):
        taylor_features(torch.ones(64, 2), 5)


@pytest.mark.parametrize("orthogonal", [False, True])
def test_random_features_are_unbiased_and_their_error_falls_as_the_root(orthogonal):
    head = head_of(2, size=0.2)
    expected = head.output()

    def root_mean_square(m):
        models = [kernel_model(head, random_features(m, seed, orthogonal)) for seed in range(100)]
        return math.sqrt(np.mean([relative_error(model.predict(model.step(1.0)), expected) ** 2 for model in models]))

    errors = {m: root_mean_square(m) for m in (128, 1024, 8192)}
    slope = math.log(errors[8192] / errors[128]) / math.log(8192 / 128)
    assert slope == pytest.approx(-0.5, abs=0.08)
    assert errors[128] > errors[1024] > errors[8192]
    points = torch.cat([head.demo_keys, head.query[:, None]], dim=1)
    phi = random_features(200_000, 0, orthogonal)(points)
    np.testing.assert_allclose((phi.T @ phi).numpy(), torch.exp(points.T @ points).numpy(), rtol=0.05)
    assert float(phi.min()) > 0


def test_orthogonal_directions_are_orthogonal_and_lower_the_error():
    w = random_directions(6, 12, torch.Generator().manual_seed(0), orthogonal=True)
    gram = w[:, :6].T @ w[:, :6]
    torch.testing.assert_close(gram, torch.diag(torch.diagonal(gram)), rtol=0, atol=1e-10)
    head = head_of(3, d=8, size=0.4)

    def mean_square(orthogonal):
        models = [kernel_model(head, random_features(64, seed, orthogonal)) for seed in range(300)]
        return np.mean([relative_error(m.predict(m.step(1.0)), head.output()) ** 2 for m in models])

    assert mean_square(True) < mean_square(False)


@PROPERTY
@given(seeds, st.integers(1, 12))
def test_relu_fold(seed, d_ff):
    head = head_of(seed)
    w_1, b_1, w_2, b_2 = normals(seed + 1, (d_ff, 3), (d_ff,), (4, d_ff), (4,))
    h = head.output()
    matrix, offset = relu_fold(w_1, b_1, w_2, b_2, h)
    expected = w_2 @ torch.relu(w_1 @ h + b_1) + b_2
    torch.testing.assert_close(matrix @ h + offset, expected)
    folded = kernel_model(augmented(head, on_values=lambda v: matrix @ v))
    torch.testing.assert_close(folded.predict(folded.step(0.3)) + offset, expected, rtol=1e-8, atol=1e-9)


@PROPERTY
@given(seeds, st.floats(0.01, 2), st.floats(0, 2))
def test_regularised_strictly(seed, rate, decay):
    head = head_of(seed)
    model = kernel_model(head)
    leaf = model.initial().requires_grad_()
    (gradient,) = torch.autograd.grad(model.loss(leaf, rate) + 0.5 * decay * leaf.square().sum(), leaf)
    expected = model.predict(model.initial() - rate * gradient)
    torch.testing.assert_close(regularised_attention(head, rate, decay), expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(model.predict(model.step(rate, decay)), expected, rtol=1e-8, atol=1e-9)


def test_slides_regularised_form_matches_one_query_at_a_time_only():
    head = head_of(0, own=1)
    value = head.own_values[:, 0]
    alpha = slide_alpha(head, 0.5, 0.8)
    strict = regularised_attention(head, 0.5, 0.8)
    torch.testing.assert_close(regularised_slide(head, alpha, value), strict)
    other = replace(head, query=3 * head.query)
    assert relative_error(regularised_slide(other, alpha, value), regularised_attention(other, 0.5, 0.8)) > 1e-3
    with pytest.raises(UserError, match="only own token"):
        slide_alpha(head_of(0, own=2), 0.5, 0.8)


def test_regularisation_without_own_tokens_does_nothing_strictly_but_much_on_the_slides():
    head = head_of(0, own=0)
    torch.testing.assert_close(regularised_attention(head, 0.5, 0.8), head.output())
    assert relative_error(regularised_slide(head, 0.4, head.demo_values[:, 0]), head.output()) > 0.1


@PROPERTY
@given(seeds)
def test_augmented_changes_attention_and_dual_model_alike(seed):
    head = head_of(seed)
    changed = augmented(head, on_values=torch.tanh, on_keys=lambda k: 0.5 * k + 0.1)
    model = kernel_model(changed)
    torch.testing.assert_close(
        model.predict(model.step(1.0)), torch.from_numpy(slow_attention(changed)), rtol=1e-8, atol=1e-9
    )
    torch.testing.assert_close(changed.query, head.query)
    assert relative_error(augmented(head).output(), head.output()) == 0


def test_parallel_adapter_reads_the_token_itself():
    weight, down, up, x = normals(0, (3, 5), (2, 5), (3, 2), (5, 4))
    slow = torch.stack([weight @ x[:, t] + 0.5 * up @ torch.clamp(down @ x[:, t], min=0) for t in range(4)], dim=1)
    torch.testing.assert_close(parallel_adapter(weight, down, up, 0.5, x), slow)


@PROPERTY
@given(seeds, st.integers(1, 3), st.floats(0, 2), st.floats(0.05, 3))
def test_negative_is_a_step_on_the_negative_loss(seed, count, beta, rate):
    head = head_of(seed)
    negatives = lowest_attention(head.demo_keys.T @ head.demo_keys, count)
    model = kernel_model(head)
    leaf = model.initial().requires_grad_()
    features, values, total = model.demo_features, model.demo_values, 0.0
    for i in range(values.shape[1]):  # the loss as printed, pair by pair
        total = total + values[:, i] @ leaf @ features[:, i]
        for j in negatives[:, i].tolist():
            total = total - beta / count * values[:, j] @ leaf @ features[:, i]
    loss = -total / (rate * model.normaliser)
    torch.testing.assert_close(negative_loss(model, leaf, rate, negatives, beta), loss)
    (gradient,) = torch.autograd.grad(loss, leaf)
    expected = model.predict(model.initial() - rate * gradient)
    torch.testing.assert_close(negative(head, negatives, beta).output(), expected, rtol=1e-7, atol=1e-8)


def test_negative_values_are_the_values_of_the_changed_tokens():
    w_v, x = normals(0, (3, 5), (5, 6))
    negatives = torch.tensor([[1, 2, 3, 4, 5, 0], [2, 3, 4, 5, 0, 1]])
    moved = torch.stack([x[:, i] - 0.5 * (x[:, (i + 1) % 6] + x[:, (i + 2) % 6]) / 2 for i in range(6)], dim=1)
    torch.testing.assert_close(negative_values(w_v @ x, negatives, 0.5), w_v @ moved)


def test_lowest_attention_leaves_the_token_itself_out():
    logits = torch.tensor([[-9.0, 1.0, 2.0], [0.0, -9.0, 1.0], [5.0, 0.0, -9.0]])
    assert lowest_attention(logits, 1).tolist() == [[1, 2, 1]]
    for count in (0, 3):
        with pytest.raises(UserError, match="between 1 and 2"):
            lowest_attention(logits, count)


def test_bound_by_features_and_by_kernel_values_agree():
    head = head_of(0)
    found = generalisation_bound(head, delta=0.1)
    model = kernel_model(head)
    weight = model.step(1.0)
    predicted = weight @ model.demo_features
    n = head.demo_keys.shape[1]
    assert found.norm == pytest.approx(float(weight.norm()))
    assert found.empirical == pytest.approx(-float((head.demo_values * predicted).sum()) / n)
    assert found.radius == pytest.approx(
        max(float(head.demo_values.norm(dim=0).max()), float(predicted.norm(dim=0).max()))
    )
    trace = sum(math.exp(float(head.demo_keys[:, i] @ head.demo_keys[:, i])) for i in range(n))
    assert found.complexity_order == pytest.approx(found.norm * found.radius * 3 * math.sqrt(trace) / n)
    assert found.confidence_order == pytest.approx(math.sqrt(math.log(10) / n))
    assert found.bound == pytest.approx(found.empirical + found.complexity + found.confidence)


def test_bound_is_a_number_or_an_error():
    head = head_of(0)

    def longer(factor):
        return replace(head, **{name: factor * getattr(head, name) for name in ("demo_keys", "own_keys", "query")})

    assert math.isfinite(generalisation_bound(longer(8)).bound)
    with pytest.raises(UserError, match="no number for keys of norm"):
        generalisation_bound(longer(60))
    # logits of ±900, whose exponentials are no numbers, but keys that are short
    steep = replace(head, query=900 / float((head.keys.T @ head.query).abs().max()) * head.query)
    found = generalisation_bound(steep)
    weights = [torch.softmax(steep.keys.T @ steep.query, 0), torch.logsumexp(steep.keys.T @ steep.query, 0)]
    predicted = steep.values @ torch.exp(steep.keys.T @ steep.demo_keys - weights[1])
    assert found.empirical == pytest.approx(-float((steep.demo_values * predicted).sum()) / 6)


def test_bound_falls_as_the_root_of_the_demonstrations():
    keys, values, q = normals(0, (4, 4000), (3, 4000), (4,))
    keys, q = 0.5 * keys, 0.5 * q

    def slack(n):
        bound = generalisation_bound(Head(keys[:, :n], values[:, :n], keys[:, :0], values[:, :0], q))
        return bound.complexity / bound.norm, bound.confidence / bound.radius**2

    for few, many in zip(slack(40), slack(4000), strict=True):
        assert few / many == pytest.approx(10, rel=0.25)


def test_bound_holds_for_a_fixed_model_on_fresh_data():
    """The statement itself, for one W chosen beforehand: expected loss below the bound in (nearly) every draw."""
    generator = torch.Generator().manual_seed(0)
    d, d_v, n = 3, 2, 30
    w_k, w_v = 0.4 * torch.randn(d, d, generator=generator).double(), torch.randn(d_v, d, generator=generator).double()
    population = torch.rand(d, 20_000, generator=generator).double() * 2 - 1
    anchor_keys, anchor_values = (
        0.4 * torch.randn(d, 4, generator=generator).double(),
        torch.randn(d_v, 4, generator=generator).double(),
    )

    def model(keys):  # W φ(k) with W = Σ_a v_a φ(a)ᵀ
        return anchor_values @ torch.exp(anchor_keys.T @ keys)

    loss = lambda x: -((w_v @ x) * model(w_k @ x)).sum(dim=0)  # noqa: E731
    norm = float((anchor_values.T @ anchor_values * torch.exp(anchor_keys.T @ anchor_keys)).sum().sqrt())
    radius = float(torch.maximum((w_v @ population).norm(dim=0).max(), model(w_k @ population).norm(dim=0).max()))
    expected, violations = float(loss(population).mean()), 0
    for _ in range(200):
        sample = population[:, torch.randint(0, 20_000, (n,), generator=generator)]
        weights = (w_v @ sample).square().sum(dim=0) * torch.exp((w_k @ sample).square().sum(dim=0))
        slack = 2 * norm * float(weights.sum().sqrt()) / n + 6 * radius**2 * math.sqrt(math.log(2 / 0.05) / (2 * n))
        violations += expected > float(loss(sample).mean()) + slack
    assert violations <= 0.05 * 200


def test_bound_needs_demonstrations_and_a_probability():
    with pytest.raises(UserError, match="at least one"):
        generalisation_bound(head_of(0, n=0))
    with pytest.raises(UserError, match="delta"):
        generalisation_bound(head_of(0), delta=1.0)
