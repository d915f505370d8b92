"""Numbers that each query has for ICL and FT alike: what agrees through them alone is no similarity.

Where both settings write a direction v, t_q v in query q, and more of it in some queries than in others, their updates
are alike by t_q. Taking v out query by query is not enough: v is known only from the mean update, which other
directions are mixed into. But the strength of a query's update along the mean tells t_q whatever v is, so every
direction that grows with it can be fitted and removed. The same holds for the query's length.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from dualview.metrics.arrays import as_type, library
from dualview.metrics.cosine import dot, norm, ratio

QUERIES_FOR_EACH = 4
"""How many queries there must be for each number that is fitted."""
_NEW = 1e-3
"""A number of which less than this is not explained by the others, over its size, is left out."""


def covariates(
    updates: Float[np.ndarray, "*batch query dim"],
    usable: Bool[np.ndarray, "*batch query"],
    length: Float[np.ndarray, "*_batch query"] | None = None,
) -> Float[np.ndarray, "*batch number query"]:
    """Orthonormal rows that span, over the usable queries: 1, the strength ⟨u_q, mean u⟩, and the length.

    As many of them as there are queries for; a number that the rows before it explain has zeros.
    """
    xp = library(updates)
    clean = xp.where(usable[..., None], updates, 0.0)
    ones = as_type(usable, "float64")
    numbers = [ones, dot(clean, clean.mean(-2)[..., None, :] + 0 * clean)]
    numbers += [] if length is None else [length * ones]
    rows: list[np.ndarray] = []
    for number in numbers[: max(1, int(usable.shape[-1]) // QUERIES_FOR_EACH)]:
        rest = number
        for _ in range(2):  # the second time takes out what rounding has left
            for row in rows:
                rest = rest - dot(rest, row)[..., None] * row
        size = norm(rest)
        new = (size > _NEW * norm(number))[..., None]
        rows.append(xp.where(new, xp.nan_to_num(ratio(rest, size[..., None])), 0.0))
    return xp.stack(rows, -2)
