"""Is `Attn(W_K X, α sign(W_V X), q)` sign descent? No: signing the values is a subgradient step on the L1 loss.

Keys k_i and values v_i = y_i − W k_i (the residuals of a regression). Three readings of "sign":

    signed values      α sign(V) Kᵀ q          = the step of −α ∂ Σ_i ‖W k_i − y_i‖₁ (robust regression); an attention
    sign–sign          α sign(V) sign(K)ᵀ q    = one signSGD step per sample, since sign(v kᵀ) = sign(v) sign(k)ᵀ
    batch sign         α sign(V Kᵀ) q          = signSGD on the batch; the sign of a sum, no attention

For Gaussian keys and v_i = wᵀ k_i, E sign(v) k = √(2/π) w/‖w‖: the direction is right and the scale is lost; whatever
V's scale, the output is the same. α = (π/2) mean|v| / N brings it back (with heavy-tailed noise, the median's version);
no constant α can.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.toy_attention import Keys, Outputs, Queries, Values, lin_attn
from dualview.io.errors import UserError

Noise = Literal["none", "gaussian", "cauchy"]

NORMAL_MEDIAN = 0.6744897501960817
"""median |z| for z ~ N(0, 1)."""


def signed_values(keys: Keys, values: Values, query: Queries, alpha: float) -> Outputs:
    """α sign(V) Kᵀ q: the proposal; a subgradient step on the L1 loss, answering q."""
    return alpha * lin_attn(keys, torch.sign(values), query)


def sign_sign(keys: Keys, values: Values, query: Queries, alpha: float) -> Outputs:
    """α sign(V) sign(K)ᵀ q: the sum of per-sample signSGD steps."""
    return alpha * lin_attn(torch.sign(keys), torch.sign(values), query)


def batch_sign(keys: Keys, values: Values, query: Queries, alpha: float) -> Outputs:
    """α sign(V Kᵀ) q: one signSGD step on the whole batch."""
    return alpha * torch.sign(values @ keys.T) @ query


def l1_loss(weight: Float[Tensor, "d_v d_k"], keys: Keys, targets: Values) -> Float[Tensor, ""]:
    """Σ_i ‖W k_i − y_i‖₁; its descent step −α ∂ is α sign(V) Kᵀ with V = Y − W K."""
    return (weight @ keys - targets).abs().sum()


def consistent_scale(values: Values, kind: Literal["mean", "median"] = "mean") -> Float[Tensor, " d_v"]:
    """α per output, for which α sign(V) Kᵀ → W as N grows (Gaussian keys, exact values).

    mean: (π/2) mean|v| / N. median: √(π/2) median|v| / (.6745 N), the same limit, and finite under Cauchy noise.
    """
    size, n = values.abs(), values.shape[1]
    if kind == "mean":
        return math.pi / 2 * size.mean(dim=1) / n
    return math.sqrt(math.pi / 2) / NORMAL_MEDIAN * _median(size) / n


def _median(size: Tensor) -> Tensor:
    # torch.median takes the lower of the two middle values; this takes their mean
    return torch.quantile(size, 0.5, dim=-1)


@dataclass(frozen=True)
class Risk:
    """One cell of the risk table."""

    estimator: str
    n_samples: int
    noise: Noise
    risk: float
    """E ‖c ŵ − w‖² / E ‖w‖² with the best constant c: 0 perfect, 1 no better than predicting 0."""


def _estimates(keys: Float[Tensor, "draw token d"], values: Float[Tensor, "draw token"]) -> dict[str, Tensor]:
    signs, size = torch.sign(values), values.abs()

    def along(by: Tensor, over: Tensor) -> Tensor:
        return torch.einsum("bn,bnd->bd", by, over)

    gradient, signed = along(values, keys), along(signs, keys)
    return {
        "gd": gradient,
        "signed values": signed,
        "signed values, mean": signed * size.mean(dim=1, keepdim=True),
        "signed values, median": signed * _median(size).unsqueeze(1),
        "sign-sign": along(signs, torch.sign(keys)),
        "batch sign": torch.sign(gradient),
    }


def _noise(kind: Noise, values: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    if kind == "none":
        return values
    drawn = torch.empty_like(values)
    return values + scale * (
        drawn.normal_(generator=generator) if kind == "gaussian" else drawn.cauchy_(generator=generator)
    )


def sign_risks(
    n_samples: int, noise: Noise = "none", dim: int = 10, draws: int = 20_000, seed: int = 0, scale: float = 1.0
) -> list[Risk]:
    """Risk of each sign variant (and gradient descent) after one step from 0, over tasks w ~ N(0, I), k ~ N(0, I).

    The Monte Carlo error is about .005 at 20,000 draws. Known: gradient descent has (d + 1 + σ²)/(N + d + 1 + σ²) under
    Gaussian noise of variance σ²; batch sign cannot fall below 1 − 2/π.
    """
    if n_samples < 1 or dim < 1 or draws < 1:
        raise UserError("sign_risks needs n_samples, dim and draws of at least 1.")
    generator = torch.Generator().manual_seed(seed)
    moments: dict[str, tuple[float, float]] = {}  # Σ⟨ŵ, w⟩ and Σ‖ŵ‖² over draws: what the best multiplier needs
    size, left = 0.0, draws
    while left:
        batch = min(left, 2_000)  # bounds memory, and fixes the stream for a given seed
        left -= batch
        truth = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
        keys = torch.randn(batch, n_samples, dim, generator=generator, dtype=torch.float64)
        values = _noise(noise, torch.einsum("bnd,bd->bn", keys, truth), scale, generator)
        size += float(truth.square().sum())
        for name, estimate in _estimates(keys, values).items():
            cross, power = moments.get(name, (0.0, 0.0))
            moments[name] = cross + float((estimate * truth).sum()), power + float(estimate.square().sum())
    return [Risk(name, n_samples, noise, 1 - c**2 / (p * size)) for name, (c, p) in moments.items()]


def risk_table(
    samples: Iterable[int] = (10, 50),
    noises: Iterable[Noise] = ("none", "gaussian", "cauchy"),
    draws: int = 20_000,
    seed: int = 0,
) -> list[Risk]:
    """`sign_risks` for every number of samples and kind of noise: under Cauchy noise only the signs survive."""
    return [risk for n in samples for noise in noises for risk in sign_risks(n, noise, draws=draws, seed=seed)]
