"""What the kernel lab measures of a group of heads: features against their number, and the dual model's training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.duality.theory.features import RandomKind, log10_features_needed, random_estimates
from dualview.duality.theory.kernel import kernel_model, shortened
from dualview.duality.theory.linalg import norm
from dualview.io.errors import UserError
from dualview.lab.kernel.heads import HeadGroup

KINDS: Mapping[str, tuple[RandomKind, bool]] = {
    "positive": ("positive", False),
    "positive, centred keys": ("positive", True),
    "trigonometric": ("trigonometric", False),
    "trigonometric, centred keys": ("trigonometric", True),
}
"""Random features by name: their kind, and whether the mean is taken from the keys first (attention stays the same)."""
TOP = "largest weights"
GRID = tuple(number / 20 for number in range(21))
"""Shares of the demonstrations' tokens that the dual model has seen."""


def errors(found: Float[Tensor, "*size d_v head"], expected: Float[Tensor, "d_v head"]) -> Float[Tensor, " head *size"]:
    """‖found − expected‖ / ‖expected‖ of every head."""
    distance = (found - expected).square().sum(-2).sqrt() / expected.square().sum(-2).sqrt()
    return distance.movedim(-1, 0)


def mixed(
    weights: Float[Tensor, "*size token head"], values: Float[Tensor, "d_v token"]
) -> Float[Tensor, "*size d_v head"]:
    """V a with the weights a divided by their sum."""
    return values @ weights / weights.sum(-2, keepdim=True)


def feature_errors(
    group: HeadGroup, directions: Float[Tensor, "d direction"], sizes: Sequence[int], target: float
) -> dict[str, Any]:
    """Relative errors of the output by kind and number m, and the first-order prediction of the m that is needed.

    `largest weights` keeps the m tokens with the largest weights of the exact softmax; `uniform` weighs all the same.
    """
    exact = group.weights()
    output = mixed(exact, group.values)
    found: dict[str, Any] = {"errors": {}, "needed": {}}
    for name, (kind, centred) in KINDS.items():
        points = group.centred() if centred else group
        estimates = random_estimates(kind, points.keys, points.queries, directions, sizes)
        found["errors"][name] = errors(mixed(estimates, group.values), output).tolist()
        found["needed"][name] = [
            log10_features_needed(kind, points.keys, points.values, query, target) for query in points.queries.T
        ]
    rank = exact.argsort(dim=0, descending=True).argsort(dim=0)
    kept = torch.stack([exact * (rank < size) for size in sizes])
    found["errors"][TOP] = errors(mixed(kept, group.values), output).tolist()
    found["uniform"] = errors(mixed(torch.ones_like(exact), group.values), output).tolist()
    return found


# ----------------------------------------------------------------------------------------------- the dual model's steps


def predictions(group: HeadGroup, order: Int[Tensor, "demo head"]) -> Float[Tensor, "step d_v head"]:
    """ŷ_t = W_t φ(q) after each of the demonstrations' tokens, in this order; t = 0 is the model at W_0.

    With exact features a step adds a_i v_i (theorem 3.1), so ŷ_t = h' − Σ_{i not yet seen} a_i v_i.
    """
    weights = group.weights()
    picked = order + group.demos.start
    steps = weights.gather(0, picked)[:, None, :] * group.values.T[picked].movedim(-1, 1)
    left = torch.cat([steps.flip(0).cumsum(0).flip(0), torch.zeros_like(steps[:1])])
    return mixed(weights, group.values) - left


def in_gram_features(group: HeadGroup, index: int) -> Float[Tensor, "step d_v"]:
    """The same for one head in the prompt's order, by the dual model itself in exact (Gram) features."""
    model = kernel_model(shortened(group.head(index)))
    steps = model.demo_values * (model.query @ model.demo_features) / model.normaliser
    start = model.predict(model.initial())
    return torch.cat([start[None], start + steps.T.cumsum(0)])


def gram_errors(group: HeadGroup) -> list[float | None]:
    """Theorem 3.1 with exact features, over ‖h'‖: the largest of all steps; None where float64 cannot hold them."""
    n, found = len(group.demos), list[float | None]()
    paths = predictions(group, torch.arange(n)[:, None].expand(n, group.queries.shape[1]))
    for index in range(group.queries.shape[1]):
        try:
            gap = in_gram_features(group, index) - paths[..., index]
        except UserError:
            found.append(None)
        else:
            found.append(float(gap.square().sum(-1).max().sqrt()) / norm(paths[-1, :, index]))
    return found


def loss_decreases(group: HeadGroup) -> Float[Tensor, " demo"]:
    """Each demonstration token's part of L(W_0) − L(W_N), in the prompt's order; they sum to 1.

    A step along one token lowers L by Σ_i v_iᵀ v_t exp(k_iᵀ k_t) / (η D²): the same for every query but for D.
    """
    keys, values = (x[:, group.demos.start : group.demos.stop] for x in (group.keys, group.values))
    inner = keys.T @ keys
    parts = ((values.T @ values) * torch.exp(inner - inner.max())).sum(0)
    return parts / parts.sum()


def training(group: HeadGroup, draw: torch.Generator, near: float) -> dict[str, Any]:
    """The distance to h' along three orders of the tokens, and the loss; lists over heads."""
    n, heads = len(group.demos), group.queries.shape[1]
    weights = group.weights()[group.demos.start : group.demos.stop]
    orders = {
        "prompt": torch.arange(n)[:, None].expand(n, heads),
        "shuffled": torch.randperm(n, generator=draw)[:, None].expand(n, heads),
        "attention": weights.argsort(dim=0, descending=True),
    }
    at = [round(share * n) for share in GRID]
    found: dict[str, Any] = {}
    for name, order in orders.items():
        steps = predictions(group, order)
        path = errors(steps, steps[-1]).T
        beyond = torch.arange(1, n + 2)[:, None] * (path > near)
        found[name] = {
            "curve": path[at].T.tolist(),
            "until": (beyond.max(dim=0).values / n).tolist(),  # one step after the last that is too far
            "away": (path[1:] > path[:-1]).double().mean(0).tolist(),
        }
    for name, points in (("loss", group), ("loss, centred keys", group.centred())):
        parts = loss_decreases(points)
        path = torch.cat([torch.zeros(1, dtype=parts.dtype), parts.cumsum(0)])
        largest = int(parts.argmax())
        found[name] = {
            "curve": [path[at].tolist()] * heads,
            "largest": [float(parts[largest])] * heads,
            "its_attention": weights[largest].tolist(),
        }
    return found
