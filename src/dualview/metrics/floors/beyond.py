"""What updates are beyond all that queries share: the mean, what grows with a number of the query, the span, and the
directions that ICL and FT share most.

The last of these answers a question that covariates leave open. Some number t_q of each query, which nobody has
measured (how hard it is, which of a few topics it has), may move both settings along a direction v: both write t_q v,
and are alike by t_q without being alike query by query. Neither t nor v is known, but in

    C = ½ Σ_q (x_q y_qᵀ + y_q x_qᵀ)        x_q, y_q: what ICL and FT do to query q

v stands out. So the eigenvectors u_1 … u_K of C with the largest |eigenvalues| are found, and ⟨u_k, x_q⟩ and ⟨u_k, y_q⟩
tell t_q. What grows with either is fitted in both settings and removed, as with other covariates, and with it u_k
itself. Removing u_k alone would not do: in thousands of dimensions v is known poorly, but t_q well. What is left of
t_q v is the product of what the direction and the numbers have missed.

*Cross-fitted*: the u_k of one half of a block's queries come from the other half. So nothing of a query's own noise
decides what is removed from it, and unrelated updates are as often left above 0 as below. Had they come from the same
queries, whatever is alike by chance would be taken out first, and any p-value after it be wrong.

What ICL and FT share along so few directions cannot be told from such a t_q, so it counts as explained. But a number
like t_q leaves each setting with a part of its own, if a small one. Where neither has a tenth of its length left in a
block of queries, these few directions are all there is to compare (of a model that only ever writes the answer, say),
and the block is compared as it was. A block, not a query: the queries with the largest t_q have the least left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from dualview.metrics.arrays import as_type, eigh, library, put_like
from dualview.metrics.cosine import dot, norm, ratio, root
from dualview.metrics.floors.covariates import covariates, orthonormal_rows
from dualview.metrics.floors.updates import BlockVectors, Compared, inner_products, short
from dualview.records.setting import MEAN_RIDGE

MOST_SHARED = 2
"""K: how many directions are removed. With one, three hidden topics pass; with three, identical updates of rank
three could not be told."""
QUERIES_FOR_A_DIRECTION = 12
"""A block has one direction for every so many queries: from 12 on one, from 24 on two, and none with fewer. In each
half a direction costs two fitted numbers."""
_NOTHING_ELSE = 0.1
"""Where both settings have less than this share of their lengths left, the shared directions are all they are."""
_ROUNDING = 1e-10
"""A square that is less than this share of the largest is rounding."""


@dataclass(frozen=True)
class Beyond:
    """ICL's or FT's updates beyond what the block's queries share and outside the heads' span (or else the direction of
    zsl)."""

    rows: Float[np.ndarray, "layer block group member dim"]
    inverse: Float[np.ndarray, "layer block group member"]
    """1 over their lengths, 0 where they are rounding; NaN where the update itself is undefined."""
    portion: Float[np.ndarray, "layer block group member"]
    """Their lengths over those of the whole updates, at most 1."""
    fitted: Float[np.ndarray, "layer block group"]
    """How many numbers were fitted to the queries of a block, the mean among them."""


@dataclass(frozen=True)
class _Side:
    """One setting on the way there: what is left of it, and which queries count."""

    rows: Float[np.ndarray, "layer block group member dim"]
    kept: Bool[np.ndarray, "layer block group member"]
    own: Float[np.ndarray, "layer block group member dim"]
    """Each query's unit vector along zsl; zeros where the heads' span was removed before."""
    whole: Float[np.ndarray, "layer block group member"]
    fitted: Float[np.ndarray, "layer block group"]

    def measured(self) -> Beyond:
        length = norm(self.rows)
        # Where nothing is left (all queries share the update, or it lies in the span) nothing is similar: 0, not NaN.
        left = self.kept & ~short(length**2, self.whole)
        inverse = library(length).where(left, ratio(0 * length + 1, length), 0.0) + 0 * self.whole
        return Beyond(self.rows, inverse, ratio(length, self.whole).clip(0.0, 1.0), self.fitted)


def beyond_shared(v: BlockVectors, compared: Compared, *, outputs: bool) -> tuple[Beyond, Beyond]:
    """What is left of ICL's and FT's updates; the directions that both share most are removed from `outputs` only."""
    xp, usable = library(v.u), compared.usable
    unit = v.z if v.off else ratio(v.z, root(compared.products.zz)[..., None])  # not looked at outside the span
    count = as_type(usable.sum(axis=-1), "float64")[..., None]

    def side(row: np.ndarray, whole: np.ndarray) -> _Side:
        kept = usable & ~short(dot(row, row), whole)
        clean = row if bool(kept.all()) else xp.where(kept[..., None], row, 0.0)
        if v.off:  # what all queries share is gone; its mean over this block may still be there
            rows = clean - ratio(clean.sum(axis=-2), count)[..., None, :]
            return _Side(rows, kept, xp.zeros_like(rows), whole, 1 + 0 * count[..., 0])
        own = xp.where(kept[..., None], xp.nan_to_num(unit), 0.0)
        known = covariates(clean, kept, None if v.known is None else v.known[:, None])
        rows = _without_shared_and_own_direction(clean, own, known)
        return _Side(rows, kept, own, whole, dot(known, known).sum(axis=-1))

    x, y = v.off or (v.u, v.w)
    sides = side(x, compared.x_norm), side(y, compared.y_norm)
    if outputs:
        sides = _without_most_shared(*sides)
    return sides[0].measured(), sides[1].measured()


def _without_most_shared(x: _Side, y: _Side) -> tuple[_Side, _Side]:
    """Both settings less what grows with their strengths along u_k in each half of a block, and less u_k itself."""
    xp, members = library(x.rows), int(x.rows.shape[-2])
    several = min(MOST_SHARED, members // QUERIES_FOR_A_DIRECTION)
    if not several:
        return x, y
    both = x.kept & y.kept & xp.isfinite(dot(x.rows, x.rows) + dot(y.rows, y.rows))
    clean = [xp.where(both[..., None], side.rows, 0.0) for side in (x, y)]
    there, numbers, found = as_type(both, "float64"), list[np.ndarray](), list[tuple[np.ndarray, np.ndarray]]()
    for half in (0, 1):  # queries stand in a block in random order: every other one is a random half
        mine = put_like(np.arange(members) % 2 == half, there)
        others = [side[..., 1 - half :: 2, :] for side in clean]
        directions = most_shared(others[0], others[1], several)
        read = [directions @ side.swapaxes(-1, -2) for side in clean]
        numbers += [there * mine, *(side[..., each, :] * mine for each in range(several) for side in read)]
        found.append((mine, directions))
    known = orthonormal_rows(numbers)
    fitted = dot(known, known).sum(axis=-1) - 1  # the block's mean is fitted already

    def without(side: _Side) -> np.ndarray:
        change = _fitted_change(side.rows, side.own, known)
        rows = _outside(side.rows - known.swapaxes(-1, -2) @ change, side.own)
        for mine, directions in found:
            rows = xp.where(mine[:, None], _without_directions(rows, side.own, directions), rows)
        return rows

    left = without(x), without(y)

    def size(rows: np.ndarray) -> np.ndarray:  # of the whole block
        return root(xp.where(both, dot(rows, rows), 0.0).sum(axis=-1))

    gone = [size(rows) < _NOTHING_ELSE * size(side.rows) for rows, side in zip(left, (x, y), strict=True)]
    nothing = (gone[0] & gone[1])[..., None, None]
    return (
        replace(x, rows=xp.where(nothing, x.rows, left[0]), fitted=x.fitted + fitted),
        replace(y, rows=xp.where(nothing, y.rows, left[1]), fitted=y.fitted + fitted),
    )


def most_shared(
    x: Float[np.ndarray, "*batch query dim"], y: Float[np.ndarray, "*batch query dim"], several: int
) -> Float[np.ndarray, "*batch direction dim"]:
    """So many eigenvectors of ½ Σ (x yᵀ + y xᵀ), those of the largest |eigenvalues|; zeros where there are too few.

    With Z = (x; y) one below the other and ZZᵀ = VΛVᵀ they are ZᵀVΛ^(−½) b, for the eigenvectors b of ½ (AᵀB + BᵀA), A
    and B the rows of VΛ^½ that belong to x and to y: nothing of d × d numbers is formed.
    """
    xp, queries = library(x), int(x.shape[-2])
    rows = xp.concatenate((x, y), -2)
    squares, vectors = eigh(inner_products(rows, rows))
    least = _ROUNDING * squares[..., -1:]
    size = root(xp.where(squares > least, squares, 0.0))
    scaled = vectors * size[..., None, :]
    product = scaled[..., :queries, :].swapaxes(-1, -2) @ scaled[..., queries:, :]
    symmetric = (product + product.swapaxes(-1, -2)) / 2
    values, within = eigh(symmetric @ symmetric)  # squared: the largest of either sign come last
    inverse = xp.where(size > 0, ratio(0 * size + 1, size), 0.0)
    directions = ((vectors * inverse[..., None, :]) @ within[..., -several:]).swapaxes(-1, -2) @ rows
    return xp.where((root(values[..., -several:]) > least)[..., None], directions, 0.0)


def _without_directions(
    rows: Float[np.ndarray, "*batch member dim"],
    own: Float[np.ndarray, "*batch member dim"],
    directions: Float[np.ndarray, "*batch direction dim"],
) -> Float[np.ndarray, "*batch member dim"]:
    """Rows outside their own directions o, less their projection on U' = (1 − ooᵀ)U, U the orthonormal directions.

    Less their projection on U alone they would keep (1 − UUᵀ)(1 − ooᵀ)U ≠ 0 of each, which both settings have alike.
    With a = Uᵀo, (U'ᵀU')⁻¹ = 1 + aaᵀ/(1 − aᵀa).
    """
    xp = library(rows)
    weights, along = (side @ directions.swapaxes(-1, -2) for side in (rows, own))
    free = 1 - dot(along, along)
    free = xp.where(free > _ROUNDING, free, float("inf"))  # o lies among the directions: nothing of it is left in rows
    weights = weights + along * (dot(along, weights) / free)[..., None]
    return rows - _outside(weights @ directions, own)


def _outside(
    rows: Float[np.ndarray, "*batch member dim"], own: Float[np.ndarray, "*batch member dim"]
) -> Float[np.ndarray, "*batch member dim"]:
    """(1 − ooᵀ) of each row, o its own direction."""
    return rows - dot(rows, own)[..., None] * own


def _fitted_change(
    rows: Float[np.ndarray, "layer block group member dim"],
    own: Float[np.ndarray, "layer block group member dim"],
    known: Float[np.ndarray, "layer block group number member"],
) -> Float[np.ndarray, "layer block group number dim"]:
    """M of `models.head_span`, for P_q the projection on a query's own direction.

    From (Σ z_q z_qᵀ ⊗ (1 − P_q) + ρ) M = Σ z_q ⊗ (1 − P_q) u_q, z_q the columns of `known`, by Woodbury's formula in as
    many dimensions as there are queries. Of those that are not there row, direction and z are 0.
    """
    of_query, total = known.swapaxes(-1, -2), known @ _outside(rows, own)
    matrix = put_like(np.eye(int(rows.shape[-2])), rows) * (1 + MEAN_RIDGE)
    matrix = matrix - (of_query @ known) * inner_products(own, own)
    weights = library(rows).linalg.solve(matrix, dot(inner_products(own, total), of_query)[..., None])
    return (total + known @ (weights * own)) / (1 + MEAN_RIDGE)


def _without_shared_and_own_direction(
    rows: Float[np.ndarray, "layer block group member dim"],
    own: Float[np.ndarray, "layer block group member dim"],
    known: Float[np.ndarray, "layer block group number member"],
) -> Float[np.ndarray, "layer block group member dim"]:
    """What `models.head_span` leaves of the heads' span, for a query's own direction in its place."""
    of_query, change = known.swapaxes(-1, -2), _fitted_change(rows, own, known)
    shared, left = _outside(of_query[..., :1] @ change[..., :1, :], own), _outside(rows - of_query @ change, own)
    return left - library(rows).nan_to_num(ratio(dot(left, shared), dot(shared, shared)))[..., None] * shared
