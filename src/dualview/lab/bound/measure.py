"""The dual model's loss on its demonstrations and on fresh tokens, next to what theorem 3.2 says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dualview.duality.theory.kernel import Head, generalisation_bound
from dualview.io.errors import UserError
from dualview.lab.kernel.heads import HeadGroup


def measured(
    group: HeadGroup, sizes: Sequence[int], draw: torch.Generator, delta: float, *, shuffled: bool = False
) -> dict[str, list[float]]:
    """Losses, gap and bound of the first head's dual model, trained on N tokens for every N of `sizes` (nested).

    The sample S is drawn from the group's demonstration tokens; those that no sample has are the fresh ones:

        W = (1/D) Σ_{i ∈ S} v_i φ(k_i)ᵀ,    L̂ = −mean over S of v_iᵀ W φ(k_i),    L = the same over fresh tokens

    `shuffled` gives each token another token's value (the control).
    """
    inside = slice(group.demos.start, group.demos.stop)
    keys, values, query = group.keys[:, inside], group.values[:, inside], group.queries[:, 0]
    if shuffled:
        values = values[:, torch.randperm(values.shape[1], generator=draw)]
    order = torch.randperm(keys.shape[1], generator=draw)
    picked, fresh = order[: max(sizes)], order[max(sizes) :]
    inner, logits = keys[:, picked].T @ keys, keys.T @ query
    top = inner.max()  # exponents are large for long keys; log D is taken from them before exp
    products = (values[:, picked].T @ values) * torch.exp(inner - top)
    found: dict[str, list[float]] = {
        name: [] for name in ("empirical", "expected", "gap", "share", "slack", "complexity")
    }
    for n in sizes:
        s = picked[:n]
        scale = torch.exp(top - torch.logsumexp(logits[s], 0))
        empirical, expected = (-products[:n, at].sum() / len(at) for at in (s, fresh))
        share, empirical, expected = expected / empirical, scale * empirical, scale * expected
        slack, complexity = _slack(Head(keys[:, s], values[:, s], keys[:, :0], values[:, :0], query), delta)
        row = (empirical, expected, expected - empirical, share, slack, complexity)
        for name, value in zip(found, row, strict=True):
            found[name].append(float(value))
    return found


def _slack(head: Head, delta: float) -> tuple[float, float]:
    """What theorem 3.2 adds to L̂, and the part of it that is the complexity term; NaN where it is no number."""
    try:
        bound = generalisation_bound(head, delta)
    except UserError:
        return math.nan, math.nan
    return bound.complexity + bound.confidence, bound.complexity
