"""Identities of signed values (T12, an exercise that has an answer), with their misprints."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.sign import batch_sign, consistent_scale, l1_loss, sign_risks, sign_sign, signed_values
from dualview.duality.theory.toy_attention import relative_error
from dualview.duality.verify.check import NOTE, Draws, Sides, identity

SIGN = "exercise, answered"


@dataclass(frozen=True)
class SignProblem:
    """Keys, targets, a weight, the residuals as values, and a query."""

    keys: Float[Tensor, "d_k token"]
    targets: Float[Tensor, "d_v token"]
    weight: Float[Tensor, "d_v d_k"]
    query: Float[Tensor, " d_k"]
    alpha: float

    @property
    def values(self) -> Float[Tensor, "d_v token"]:
        """v_i = y_i − W k_i."""
        return self.targets - self.weight @ self.keys


def sign_problem(draws: Draws) -> SignProblem:
    """Random sizes; at least three tokens, so that the sign of a sum is not a sum of signs."""
    d_k, d_v, n = draws.size(3, 9), draws.size(3, 9), draws.size(3, 12)
    return SignProblem(
        draws.normal(d_k, n), draws.normal(d_v, n), draws.normal(d_v, d_k), draws.normal(d_k), draws.number(0.01, 1.0)
    )


@identity("α sign(V)Kᵀq = −α ∂(Σ_i‖Wk_i − y_i‖₁) q", SIGN, given=sign_problem)
def _l1(p: SignProblem) -> Sides:
    leaf = p.weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(l1_loss(leaf, p.keys, p.targets), leaf)
    stepped = p.weight - p.alpha * gradient
    return signed_values(p.keys, p.values, p.query, p.alpha), (stepped - p.weight) @ p.query


@identity("α sign(V)sign(K)ᵀq = Σ_i α sign(v_ik_iᵀ) q  (signSGD per sample)", SIGN, given=sign_problem)
def _per_sample(p: SignProblem) -> Sides:
    steps = [torch.sign(torch.outer(p.values[:, t], p.keys[:, t])) for t in range(p.keys.shape[1])]
    return sign_sign(p.keys, p.values, p.query, p.alpha), p.alpha * torch.stack(steps).sum(dim=0) @ p.query


@identity("α sign(VKᵀ)q = −α sign(∇L) q  (signSGD on the batch)", SIGN, given=sign_problem)
def _batch(p: SignProblem) -> Sides:
    leaf = p.weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(0.5 * (leaf @ p.keys - p.targets).square().sum(), leaf)
    return batch_sign(p.keys, p.values, p.query, p.alpha), -p.alpha * torch.sign(gradient) @ p.query


@_batch.misprint("sign descent = Attn(K, α sign V, q)", NOTE)
def _signed_values_as_sign_descent(p: SignProblem) -> Sides:
    return signed_values(p.keys, p.values, p.query, p.alpha), batch_sign(p.keys, p.values, p.query, p.alpha)


@_batch.misprint("x ← x + α sign(∇f)  [ascent]", NOTE)
def _sign_ascent(p: SignProblem) -> Sides:
    gradient = -p.values @ p.keys.T
    return p.alpha * torch.sign(gradient) @ p.query, batch_sign(p.keys, p.values, p.query, p.alpha)


@identity("α = (π/2) mean|v|/N (or by the median):  α sign(V)Kᵀ → W", SIGN, 0.03)
def _scale(draws: Draws) -> float:
    d, n = draws.size(2, 6), 200_000
    weight, keys = draws.normal(1, d), draws.normal(d, n)
    values = weight @ keys
    estimates = [float(consistent_scale(values, kind)) * torch.sign(values) @ keys.T for kind in ("mean", "median")]
    return max(relative_error(estimate, weight) for estimate in estimates)


@_scale.misprint("signed values with a constant α for every ‖w‖", NOTE, 0.03)
def _constant_alpha(draws: Draws) -> Sides:
    weight, keys = draws.normal(1, 3), draws.normal(3, 50_000)
    alpha = math.sqrt(math.pi / 2) / keys.shape[1]  # right for ‖w‖ = 1 only
    scale = draws.number(2.0, 4.0) / float(weight.square().sum().sqrt())
    return alpha * torch.sign(weight @ keys) @ keys.T, scale * weight


@identity("GD's one-step risk under noise σ² = (d+1+σ²)/(N+d+1+σ²)", SIGN, 0.02)
def _gd_risk(draws: Draws) -> float:
    n, d, noise = draws.size(5, 30), draws.size(5, 15), draws.number(0.0, 2.0)
    risk = next(
        r.risk for r in sign_risks(n, "gaussian", d, 10_000, draws.size(0, 10**6), noise) if r.estimator == "gd"
    )
    known = (d + 1 + noise**2) / (n + d + 1 + noise**2)
    return abs(risk - known)


IDENTITIES = (_l1, _per_sample, _batch, _scale, _gd_risk)
