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


def principal_angles(
    a: Float[Tensor, "m p"], b: Float[Tensor, "m q"], rank: int | None = None
) -> Float[Tensor, " angle"]:
    """Angles between the (leading) column spaces, in radians, ascending: 0 a shared direction, π/2 an orthogonal one.

    Björck & Golub (1973): large angles from the cosines, small ones from the sines, so both are accurate. For row
    spaces pass the transposes. Two random r-dimensional subspaces of R^m have a mean squared cosine of r/m.
    """
    u, v = orthonormal_basis(a, rank), orthonormal_basis(b, rank)
    # The sines below need the smaller space to be projected onto the larger one.
    if v.shape[1] > u.shape[1]:
        u, v = v, u
    cosines = singular_values(u.T @ v).clamp(max=1)
    # singular values of the part of v outside u, ascending, to pair with the descending cosines
    sines = singular_values(v - u @ (u.T @ v)).clamp(max=1).flip(0)
    # arccos loses half the digits near 0 and arcsin near π/2.
    return torch.where(cosines.square() < 0.5, torch.arccos(cosines), torch.arcsin(sines))


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
    stable_rank_a: float
    stable_rank_b: float
    norm_ratio: float
    """‖A‖ / ‖B‖."""


def compare_weights(a: Float[Tensor, "m n"], b: Float[Tensor, "m n"], rank: int = 8) -> WeightComparison:
    """ΔW_ICL and ΔW_FT: direction, subspaces of the `rank` leading singular vectors, ranks and sizes."""

    def overlap(x: Tensor, y: Tensor) -> float:
        return float(torch.cos(principal_angles(x, y, rank)).square().mean())

    return WeightComparison(
        cosine=cosine(a, b),
        left_overlap=overlap(a, b),
        right_overlap=overlap(a.T, b.T),
        stable_rank_a=stable_rank(a),
        stable_rank_b=stable_rank(b),
        norm_ratio=norm(a) / norm(b),
    )
