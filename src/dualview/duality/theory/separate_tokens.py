"""Regression in context with x and y as separate tokens, and the layer that merges them (von Oswald et al. 2023, §4).

The tokens of N demonstrations and of M queries are, with orthonormal position codes p_1, p_2, …,

    (x_1, 0, p_1), (0, y_1, p_2), (x_2, 0, p_3), (0, y_2, p_4), …        and        (x_q, 0, 0).

The copying layer is linear attention by position. Keys hold the position before their own, queries their own,
values y:

    W_K e = Tᵀ p,  T p_t = p_t+1,      W_Q e = p,      W_V e = (0, y, 0),      P = I.

The key of (0, y_i, p_2i) is p_2i−1, the position of x_i, and of no other token with a y. So x_i's token becomes
(x_i, y_i, p_2i−1) and nothing else changes. The tokens of y stay: their x is 0, so their keys are 0 in the layers of
Proposition 1, which read x alone. Copying and then k such layers are exactly k steps of gradient descent.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dualview.duality.theory.regression import (
    Answers,
    Asked,
    Inputs,
    LinearSelfAttention,
    Regression,
    Targets,
    gd_layer,
)


def separate_tokens(x: Inputs, y: Targets, x_query: Asked) -> Regression:
    """2N context tokens, x_1, y_1, x_2, y_2, …, each with its position's unit vector; queries have no position."""
    n_x, n = x.shape
    n_y, count = y.shape[0], 2 * n
    context = x.new_zeros(n_x + n_y + count, count)
    context[:n_x, 0::2] = x
    context[n_x : n_x + n_y, 1::2] = y
    context[n_x + n_y :] = torch.eye(count).to(x)
    query = torch.cat([x_query, x.new_zeros(n_y + count, x_query.shape[1])])
    return Regression(context=context, query=query, n_x=n_x)


def copying_layer(n_x: int, n_y: int, n_demos: int, like: Tensor, *, shift: int = 1) -> LinearSelfAttention:
    """Adds to each token the y of the token `shift` places after it; dtype and device as `like`."""
    count = 2 * n_demos
    width = n_x + n_y + count
    key, query, value = (like.new_zeros(width, width) for _ in range(3))
    place = slice(n_x + n_y, width)
    # a unit vector at t moves to t − shift; the ones that would leave the context become 0
    key[place, place] = torch.diag(like.new_ones(count - abs(shift)), shift)
    query[place, place] = torch.eye(count).to(like)
    value[n_x : n_x + n_y, n_x : n_x + n_y] = torch.eye(n_y).to(like)
    return LinearSelfAttention(w_k=key, w_q=query, w_v=value, p=torch.eye(width).to(like))


def gd_layer_on_separate(n_x: int, n_y: int, rate: float, n_demos: int, like: Tensor) -> LinearSelfAttention:
    """Proposition 1's layer for W_0 = 0, which ignores positions; N is the number of demonstrations, not of tokens."""
    small = gd_layer(like.new_zeros(n_y, n_x), rate, n_demos)
    padding = (0, 2 * n_demos, 0, 2 * n_demos)
    parts = {name: torch.nn.functional.pad(weight, padding) for name, weight in vars(small).items()}
    return LinearSelfAttention(**parts)


def merged(tokens: Regression, n_y: int) -> Regression:
    """The tokens (x_i, y_i) that a copying layer has made, without positions and without the tokens of y."""
    kept = slice(0, tokens.n_x + n_y)
    return replace(tokens, context=tokens.context[kept, 0::2], query=tokens.query[kept])


def prediction(tokens: Regression, n_y: int) -> Answers:
    """Minus the queries' y block; what follows it is positions."""
    return -tokens.query[tokens.n_x : tokens.n_x + n_y]
