"""Separate tokens: the copying layer against a loop over tokens, and gradient descent by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.duality.theory.regression import run_layers
from dualview.duality.theory.separate_tokens import (
    copying_layer,
    gd_layer_on_separate,
    merged,
    prediction,
    separate_tokens,
)

size = st.integers(1, 4)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), n_x=size, n_y=size, n=size, depth=st.integers(1, 4))
def test_copying_and_layers_are_gradient_descent(seed, n_x, n_y, n, depth):
    draw = np.random.default_rng(seed)
    x, y, x_query = draw.normal(size=(n_x, n)), draw.normal(size=(n_y, n)), draw.normal(size=(n_x, 3))
    tokens = separate_tokens(*map(torch.from_numpy, (x, y, x_query)))
    after = run_layers(tokens, [copying_layer(n_x, n_y, n, tokens.context)])
    np.testing.assert_allclose(merged(after, n_y).context.numpy(), np.concatenate([x, y]), atol=1e-12)
    layer = gd_layer_on_separate(n_x, n_y, 0.3, n, tokens.context)
    weight = np.zeros((n_y, n_x))
    for _ in range(depth):
        weight = weight - 0.3 / n * (weight @ x - y) @ x.T
    found = prediction(run_layers(after, [layer] * depth), n_y)
    np.testing.assert_allclose(found.numpy(), weight @ x_query, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shift", [1, -1, 2])
def test_the_layer_adds_the_y_of_the_token_that_far_on(shift):
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(d, 4, generator=draw, dtype=torch.float64) for d in (3, 2))
    tokens = separate_tokens(x, y, x[:, :1])
    after = run_layers(tokens, [copying_layer(3, 2, 4, x, shift=shift)])
    slow = tokens.context.clone()
    for at in range(8):
        if 0 <= at + shift < 8:
            slow[3:5, at] += tokens.context[3:5, at + shift]
    torch.testing.assert_close(after.context, slow)
    torch.testing.assert_close(after.query, tokens.query)  # a query has no position and copies nothing
