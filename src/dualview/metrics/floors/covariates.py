"""Numbers that each query has for ICL and FT alike: what agrees through them alone is no similarity.

Where both settings write a direction v, t_q v in query q, and more of it in some queries than in others, their updates
are alike by t_q. Taking v out query by query is not enough: v is known only from the mean update, which other
directions are mixed into. But the strength of a query's update along the mean tells t_q whatever v is, so every
direction that grows with it can be fitted and removed. The same holds for what is known of a query from the start: its
length, and how far zero-shot is for its label.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from dualview.metrics.agreement import centred_log_odds
from dualview.metrics.arrays import as_type, library
from dualview.metrics.cosine import dot, norm, ratio

QUERIES_FOR_EACH = 2
"""How many queries there must be for each number that is fitted."""
_NEW = 1e-3
"""A number of which less than this is not explained by those before it, over its size, is left out."""


def known_numbers(
    zsl: Float[np.ndarray, "query candidate"],
    gold: Int[np.ndarray, " query"],
    length: Int[np.ndarray, " query"] | None = None,
) -> Float[np.ndarray, "number query"]:
    """What is known of each query without any update: its length in tokens, if recorded, and zero-shot's log-odds of
    its label."""
    odds = centred_log_odds(zsl)[np.arange(gold.size), gold]
    rows = [odds] if length is None else [length.astype(np.float64), odds]
    return np.stack([row for row in rows if np.isfinite(row).all()] or [np.zeros(gold.size)])


def covariates(
    updates: Float[np.ndarray, "*batch query dim"],
    usable: Bool[np.ndarray, "*batch query"],
    known: Float[np.ndarray, "*_batch number query"] | None = None,
) -> Float[np.ndarray, "*batch row query"]:
    """Orthonormal rows that span, over the usable queries: 1, the strength ⟨u_q, mean u⟩, and what is known.

    As many of them as there are queries for; a number that the rows before it explain has zeros.
    """
    clean = library(updates).where(usable[..., None], updates, 0.0)
    ones = as_type(usable, "float64")
    numbers = [ones, dot(clean, clean.mean(-2)[..., None, :] + 0 * clean)]
    if known is not None:
        numbers += [known[..., number, :] * ones for number in range(known.shape[-2])]
    return orthonormal_rows(numbers[: max(1, int(usable.shape[-1]) // QUERIES_FOR_EACH)])


def orthonormal_rows(numbers: Sequence[Float[np.ndarray, "*batch query"]]) -> Float[np.ndarray, "*batch row query"]:
    """The numbers made orthonormal, one after the other; zeros for one that those before it explain."""
    xp, rows = library(numbers[0]), list[np.ndarray]()
    for number in numbers:
        rest = number
        for _ in range(2):  # the second time takes out what rounding has left
            for row in rows:
                rest = rest - dot(rest, row)[..., None] * row
        size = norm(rest)
        new = (size > _NEW * norm(number))[..., None]
        rows.append(xp.where(new, xp.nan_to_num(ratio(rest, size[..., None])), 0.0))
    return xp.stack(rows, -2)
