"""torch.linalg with types: its functions have none, and this keeps that in one place."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


def norm(x: Float[Tensor, "*shape"]) -> float:
    """‖x‖, the root of the sum of squares over every element (Frobenius for a matrix), in float64."""
    return float(torch.linalg.vector_norm(x.detach().double()))


def column_norms(x: Float[Tensor, "d column"]) -> Float[Tensor, " column"]:
    """‖x_i‖ for every column."""
    found: Tensor = torch.linalg.vector_norm(x, dim=0)
    return found


def singular_values(x: Float[Tensor, "m n"]) -> Float[Tensor, " rank"]:
    """Singular values, descending."""
    found: Tensor = torch.linalg.svdvals(x)
    return found


@dataclass(frozen=True)
class LeftSvd:
    """x = vectors · diag(values) · (right singular vectors)ᵀ."""

    vectors: Float[Tensor, "m rank"]
    values: Float[Tensor, " rank"]


def left_svd(x: Float[Tensor, "m n"]) -> LeftSvd:
    """Left singular vectors and singular values, descending."""
    vectors, values, _ = torch.linalg.svd(x, full_matrices=False)
    return LeftSvd(vectors, values)


@dataclass(frozen=True)
class Eigen:
    """x = vectors · diag(values) · vectorsᵀ, values ascending."""

    values: Float[Tensor, " n"]
    vectors: Float[Tensor, "n n"]


def symmetric_eigen(x: Float[Tensor, "n n"]) -> Eigen:
    """Eigenvalues and orthonormal eigenvectors of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(x)
    return Eigen(values, vectors)


def solve_right(a: Float[Tensor, "m n"], x: Float[Tensor, "n n"]) -> Float[Tensor, "m n"]:
    """A X⁻¹, without forming the inverse."""
    found: Tensor = torch.linalg.solve(x, a, left=False)
    return found


def random_rotations(count: int, d: int, generator: torch.Generator) -> Float[Tensor, "count d d"]:
    """Uniformly distributed orthogonal matrices, in float64."""
    q, r = torch.linalg.qr(torch.randn(count, d, d, generator=generator, dtype=torch.float64))
    # without the signs q is not uniformly distributed
    found: Tensor = q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1)).unsqueeze(-2)
    return found
