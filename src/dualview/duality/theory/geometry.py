"""How similar two weight updates are, and two sets of token vectors: geometry only, with what 0 and 1 mean.

Two random d × d matrices have a cosine of order 1/d but share directions by chance as their ranks grow, so every number
here means little without the same number for shuffled tokens or another query (`weight_space`, `meta_gradients`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.linalg import column_norms, left_svd, norm, singular_values
from dualview.io.errors import UserError


def cosine(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> float:
    """⟨A, B⟩_F / (‖A‖ ‖B‖): 1 same direction, 0 orthogonal, −1 opposite; NaN if either is zero (undefined)."""
    x, y = a.double().flatten(), b.double().flatten()
    norms = norm(x) * norm(y)
    return float(x @ y) / norms if norms > 0 else float("nan")


def column_cosines(a: Float[Tensor, "d token"], b: Float[Tensor, "d token"]) -> Float[Tensor, " token"]:
    """The cosine token by token (one per column); NaN where either column is zero."""
    return (a * b).sum(dim=0) / (column_norms(a) * column_norms(b))


def stable_rank(a: Float[Tensor, "m n"]) -> float:
    """‖A‖_F² / ‖A‖₂²: between 1 (one direction) and rank A (all equal); 0 for the zero matrix."""
    values = singular_values(a.double())
    top = float(values[0]) if values.numel() else 0.0
    return float((values / top).square().sum()) if top > 0 else 0.0


def orthonormal_basis(a: Float[Tensor, "m n"], rank: int | None = None) -> Float[Tensor, "m rank"]:
    """The leading left singular vectors; all those above rounding when no rank is asked for."""
    u, s = left_svd(a)
    if s.numel() == 0 or float(s[0]) == 0:
        raise UserError("The zero matrix spans no subspace: it has no principal angles.")
    # numpy's rule for the rank of a matrix: singular values below it are rounding.
    above = int((s > s[0] * max(a.shape) * torch.finfo(a.dtype).eps).sum())
    return u[:, : above if rank is None else min(rank, above)]


def overlap(u: Float[Tensor, "m r"], v: Float[Tensor, "m s"]) -> float:
    """Mean squared cosine of the principal angles between the spaces of two orthonormal bases: ‖uᵀv‖² / min(r, s).

    1 if one space contains the other, 0 if they are orthogonal; r/m for two random r-dimensional subspaces of R^m.
    """
    return norm(u.T @ v) ** 2 / min(u.shape[1], v.shape[1])


def linear_cka(a: Float[Tensor, "d_a token"], b: Float[Tensor, "d_b token"]) -> float:
    """Linear CKA (Kornblith et al. 2019, eq. 4) over tokens: 1 equal up to rotation and scale, 0 uncorrelated.

    ‖B_c A_cᵀ‖_F² / (‖A_c A_cᵀ‖_F ‖B_c B_cᵀ‖_F) with columns centred. It is biased upwards when d is not
    small next to the number of tokens: two independent sets can score high, so compare it with shuffled tokens.
    """
    x, y = (t.double() - t.double().mean(dim=1, keepdim=True) for t in (a, b))
    cross = norm(y @ x.T) ** 2
    scale = norm(x.T @ x) * norm(y.T @ y)
    return cross / scale if scale > 0 else float("nan")


@dataclass(frozen=True)
class WeightComparison:
    """Two updates of one matrix side by side."""

    cosine: float
    left_overlap: float
    """Mean squared cosine of the principal angles of the leading column spaces: 1 shared, about rank/d by chance."""
    right_overlap: float
    """The same for the row spaces."""
    stable_rank_icl: float
    stable_rank_ft: float
    norm_ratio: float
    """‖ΔW_ICL‖ / ‖ΔW_FT‖."""


def compare_weights(icl: Float[Tensor, "m n"], ft: Float[Tensor, "m n"], rank: int = 8) -> WeightComparison:
    """ΔW_ICL and ΔW_FT: direction, subspaces of the `rank` leading singular vectors, ranks and sizes."""
    return WeightComparison(
        cosine=cosine(icl, ft),
        left_overlap=overlap(orthonormal_basis(icl, rank), orthonormal_basis(ft, rank)),
        right_overlap=overlap(orthonormal_basis(icl.T, rank), orthonormal_basis(ft.T, rank)),
        stable_rank_icl=stable_rank(icl),
        stable_rank_ft=stable_rank(ft),
        norm_ratio=norm(icl) / norm(ft),
    )
