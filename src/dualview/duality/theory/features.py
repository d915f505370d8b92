"""Four ways to realise φ with φ(a)ᵀφ(b) = exp(aᵀb), the kernel of softmax attention (Ren & Liu 2024, section 3).

| features      | exact?                     | size          | error                                               |
|---------------|----------------------------|---------------|-----------------------------------------------------|
| Gram          | on the given points only   | n points      | rounding, while exp(½‖k‖²) and exp(kᵀq) are numbers |
| Taylor        | in the limit of the order  | Σ_{n≤p} d^n   | ≤ Σ_{n>p} |kᵀq|^n / n! per kernel value             |
| positive      | on average                 | m             | falls as m^{−½}; variance grows like exp(‖k + q‖²)  |
| trigonometric | on average                 | m             | falls as m^{−½}; variance grows like exp(‖k − q‖²)  |

Each takes points as columns and returns their features as columns.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.learners import gaussian_kernel
from dualview.duality.theory.linalg import column_norms, random_rotations, symmetric_eigen
from dualview.io.errors import UserError

FeatureMap = Callable[[Float[Tensor, "d point"]], Float[Tensor, "feature point"]]
"""Maps all points of one problem at once (Gram features know no other points)."""

LARGEST_FEATURES = 2_000_000

RandomKind = Literal["positive", "trigonometric"]


def gram_features(points: Float[Tensor, "d point"]) -> Float[Tensor, "point point"]:
    """Exact features on these points, the last of them (an attention's query q) to full relative precision.

        φ(q) = (e^{‖q‖²/2}, 0),    φ(k_i) = (e^{k_iᵀq − ‖q‖²/2}, e^{‖k_i‖²/2} √Λ Uᵀ e_i)

    The first step of a Cholesky factorisation, at q, makes φ(k_i)ᵀφ(q) = exp(k_iᵀq) however small it is. The rest,
    U Λ Uᵀ = G − g gᵀ, is what q does not explain of the keys' Gaussian Gram matrix G_ij = e^{−‖k_i−k_j‖²/2}, with
    g_i = e^{−‖k_i−q‖²/2}; factored by eigenvectors, because coinciding keys make it singular. Since exp(aᵀb) =
    e^{‖a‖²/2} e^{−‖a−b‖²/2} e^{‖b‖²/2} and G's diagonal is 1, points of very different norms are kept apart; between
    two keys, kernel values below rounding (½‖a − b‖² above 36 in float64) are lost.

    Domain: e^{‖z‖²/2} and exp(k_iᵀq) must be numbers of the points' dtype (‖z‖ up to about 26 in float64, 9 in
    float32); beyond it is an error. Softmax attention depends on less than φ does: `kernel.shortened`.
    """
    keys, query = points[:, :-1], points[:, -1:]
    half = 0.5 * points.square().sum(dim=0)
    with_query = gaussian_kernel(keys, query)
    values, vectors = symmetric_eigen(gaussian_kernel(keys, keys) - with_query @ with_query.T)
    # Eigenvalues that are 0 on paper may come out slightly negative.
    rest = (vectors * values.clamp(min=0).sqrt()).T * torch.exp(half[:-1])
    first = torch.cat([keys.T @ query[:, 0] - half[-1], half[-1:]]).exp()
    found = torch.cat([first[None], torch.cat([rest, rest.new_zeros(rest.shape[0], 1)], dim=1)])
    rounded = torch.finfo(points.dtype).tiny / torch.finfo(points.dtype).eps  # below, a number has lost its digits
    lost = keys.shape[1] > 0 and float(first[:-1].max()) < rounded
    if lost or not bool(torch.isfinite(found).all() and torch.isfinite(torch.exp(keys.T @ query)).all()):
        longest = float(column_norms(points).max())
        raise UserError(
            f"Exact features need exp(‖z‖²/2) to be a number of {points.dtype}, and the longest point has norm "
            f"{longest:.3g}; shorten keys and query without changing their attention (`kernel.shortened`)."
        )
    return found


def taylor_exp(t: Float[Tensor, "*shape"], order: int) -> Float[Tensor, "*shape"]:
    """Σ_{n≤order} t^n / n!, the kernel that `taylor_features` realises, without forming them."""
    total, term = torch.ones_like(t), torch.ones_like(t)
    for n in range(1, order + 1):
        term = term * t / n
        total = total + term
    return total


def taylor_remainder(t: Float[Tensor, "*shape"], order: int) -> Float[Tensor, "*shape"]:
    """Σ_{n>order} |t|^n / n!, a bound on |exp(t) − taylor_exp(t)|."""
    # It is e^|t| times an incomplete gamma function, but torch's has only nine correct digits in float64.
    size, total, term = t.abs(), torch.zeros_like(t), torch.ones_like(t)
    n, eps = 0, torch.finfo(t.dtype).eps
    while n <= order or bool((term > eps * total).any()):
        n += 1
        term = term * size / n
        if n > order:
            total = total + term
    return total


def taylor_features(points: Float[Tensor, "d point"], order: int) -> Float[Tensor, "feature point"]:
    """φ(z) = (z^{⊗n} / √n!)_{n≤order}: every monomial of degree ≤ order, so Σ_n d^n features. For small d only."""
    d, n_points = points.shape
    if sum(d**n for n in range(order + 1)) > LARGEST_FEATURES:
        raise UserError(
            f"Taylor features of order {order} in {d} dimensions are too many: use taylor_exp, or random features."
        )
    power = points.new_ones(1, n_points)
    blocks = [power]
    for n in range(1, order + 1):
        # z^{⊗n}/√n! from z^{⊗(n−1)}/√(n−1)!
        power = torch.einsum("ap,bp->abp", power, points).reshape(-1, n_points) / math.sqrt(n)
        blocks.append(power)
    return torch.cat(blocks)


def random_directions(
    d: int, n_features: int, generator: torch.Generator, orthogonal: bool = False
) -> Float[Tensor, "d feature"]:
    """w_r ~ N(0, I_d) in float64, as columns; `orthogonal` (in blocks of d) lowers the variance."""
    plain = torch.randn(d, n_features, generator=generator, dtype=torch.float64)
    if not orthogonal:
        return plain
    rotations = random_rotations(-(-n_features // d), d, generator)
    return rotations.transpose(0, 1).reshape(d, -1)[:, :n_features] * column_norms(plain)


def random_features(n_features: int, seed: int, orthogonal: bool = False, kind: RandomKind = "positive") -> FeatureMap:
    """Random features, both kinds unbiased for exp(aᵀb); the same seed gives the same directions w_r.

        positive        φ(z) = e^{−‖z‖²/2} [exp(w_rᵀ z)]_r / √m               (Choromanski et al. 2021)
        trigonometric   φ(z) = e^{‖z‖²/2} [cos w_rᵀz, sin w_rᵀz]_r / √(m/2)     (Rahimi & Recht 2007)

    Positive ones keep attention weights positive; trigonometric ones, two for each of m/2 directions, may not.
    """
    count = n_features if kind == "positive" else n_features // 2

    def features(points: Float[Tensor, "d point"]) -> Float[Tensor, "feature point"]:
        generator = torch.Generator().manual_seed(seed)
        directions = random_directions(points.shape[0], count, generator, orthogonal).to(points)
        inner, half = directions.T @ points, 0.5 * points.square().sum(dim=0)
        if kind == "positive":
            return torch.exp(inner - half) / math.sqrt(count)
        return torch.cat([torch.cos(inner), torch.sin(inner)]) * torch.exp(half) / math.sqrt(count)

    return features


def random_estimates(
    kind: RandomKind,
    keys: Float[Tensor, "d token"],
    queries: Float[Tensor, "d query"],
    directions: Float[Tensor, "d direction"],
    sizes: Sequence[int],
) -> Float[Tensor, "size token query"]:
    """φ(k)ᵀφ(q) by the first m random features for every m of `sizes` (ascending), up to a factor of each query.

    The factor cancels in attention. Features are kept as logarithms and their largest is taken out before exp, so that
    points of any length neither overflow nor leave a query without weights.
    """
    half = 0.5 * keys.square().sum(dim=0)
    if kind == "trigonometric":
        cuts = [0, *(size // 2 for size in sizes)]
        parts: list[Tensor] = []
        for low, high in pairwise(cuts):
            a, b = directions[:, low:high].T @ keys, directions[:, low:high].T @ queries
            parts.append(torch.cos(a).T @ torch.cos(b) + torch.sin(a).T @ torch.sin(b))
        return torch.stack(parts).cumsum(0) * torch.exp(half - half.max())[:, None]
    total, height = keys.new_zeros(keys.shape[1], queries.shape[1]), queries.new_full((queries.shape[1],), -math.inf)
    found: list[Tensor] = []
    for low, high in pairwise([0, *sizes]):
        of_keys = directions[:, low:high].T @ keys - half
        largest = of_keys.max(dim=1, keepdim=True).values
        of_queries = directions[:, low:high].T @ queries + largest
        top = torch.maximum(height, of_queries.max(dim=0).values)
        block = torch.exp(of_keys - largest).T @ torch.exp(of_queries - top)
        total, height = total * torch.exp(height - top) + block, top
        found.append(total)
    return torch.stack(found)


def log10_features_needed(
    kind: RandomKind,
    keys: Float[Tensor, "d token"],
    values: Float[Tensor, "d_v token"],
    query: Float[Tensor, " d"],
    error: float,
) -> float:
    """log₁₀ of the m at which independent directions give attention's output with this relative error (to first order).

        E‖ŷ − y‖² ≈ (1/directions) Σ_ij a_i a_j (v_i − y)ᵀ(v_j − y) C_ij,     a = softmax(Kᵀq),  y = V a
        positive:       C_ij = exp((k_i + q)ᵀ(k_j + q)) − 1,           one feature for each direction
        trigonometric:  C_ij = cosh((k_i − q)ᵀ(k_j − q)) − 1,          two

    C is the covariance of two estimated kernel values over their product (delta method for the ratio of sums).
    """
    weights = torch.softmax(keys.T @ query, dim=0)
    output = values @ weights
    off = (values - output[:, None]) * weights
    sign = 1.0 if kind == "positive" else -1.0
    shifted = keys + sign * query[:, None]
    inner = shifted.T @ shifted
    top = inner.abs().max()
    c = torch.exp(inner - top) if kind == "positive" else 0.5 * (torch.exp(inner - top) + torch.exp(-inner - top))
    spread = ((off.T @ off) * (c - torch.exp(-top))).sum().clamp(min=torch.finfo(c.dtype).tiny)
    features = 1 if kind == "positive" else 2
    return float(top + torch.log(features * spread) - 2 * torch.log(error * column_norms(output[:, None]))) / math.log(
        10
    )
