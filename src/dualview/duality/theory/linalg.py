"""torch.linalg with types: its functions have none, and this keeps that in one place."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

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


def left_svd(x: Float[Tensor, "m n"]) -> tuple[Float[Tensor, "m rank"], Float[Tensor, " rank"]]:
    """Left singular vectors and singular values, descending."""
    vectors, values, _ = torch.linalg.svd(x, full_matrices=False)
    return vectors, values


def symmetric_eigen(x: Float[Tensor, "n n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"]]:
    """Eigenvalues (ascending) and orthonormal eigenvectors of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(x)
    return values, vectors


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
