"""Regression in context: one linear attention layer is one step of gradient descent (von Oswald et al. 2023, Prop. 1).

Context tokens e_i = (x_i, y_i), i = 1 … N; the query token enters as e_q = (x_q, −W_0 x_q), never with its label, and
is not among the keys and values. With L(W) = 1/(2N) Σ ‖W x_i − y_i‖² and ΔW = −η ∇L(W_0),

    W_K = W_Q = [[I, 0], [0, 0]],   W_V = [[0, 0], [W_0, −I]],   P = (η/N) I
    e ← e + P (W_V E)(W_K E)ᵀ (W_Q e)
      ⇒  y_j ← y_j − ΔW x_j,   y_q ← −(W_0 + ΔW) x_q,   prediction = −y_q.

The same layer applied k times is k steps of gradient descent, from any W_0: the value W_0 x_j − y_j is the residual of
the current weights at every depth, because each step is subtracted from y_j.

GD++ also moves the inputs, x_j ← x_j − γ X Xᵀ x_j, which shrinks large eigenvalues: l becomes l (1 − γ l)².
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.linalg import solve_right
from dualview.duality.theory.toy_attention import lin_attn
from dualview.io.errors import UserError

Inputs = Float[Tensor, "n_x demo"]
Targets = Float[Tensor, "n_y demo"]
Asked = Float[Tensor, "n_x query"]
"""The queries' inputs, which have no target."""
Answers = Float[Tensor, "n_y query"]
Weight = Float[Tensor, "n_y n_x"]


def squared_loss(weight: Weight, x: Inputs, y: Targets) -> Float[Tensor, ""]:
    """L(W) = 1/(2N) Σ_i ‖W x_i − y_i‖²."""
    return 0.5 * (weight @ x - y).square().sum() / x.shape[1]


def gd_step(weight: Weight, x: Inputs, y: Targets, rate: float) -> Weight:
    """W − η ∇L(W) = W − (η/N) (W X − Y) Xᵀ."""
    return weight - rate / x.shape[1] * (weight @ x - y) @ x.T


@dataclass(frozen=True)
class LinearSelfAttention:
    """e ← e + P · LinAttn(W_K E, W_V E, W_Q e), with d = n_x + n_y."""

    w_k: Float[Tensor, "d d"]
    w_q: Float[Tensor, "d d"]
    w_v: Float[Tensor, "d d"]
    p: Float[Tensor, "d d"]

    def __call__(self, tokens: Float[Tensor, "d token"], context: Float[Tensor, "d demo"]) -> Float[Tensor, "d token"]:
        """Update `tokens`; keys and values come from `context` only."""
        return tokens + self.p @ lin_attn(self.w_k @ context, self.w_v @ context, self.w_q @ tokens)


def _diagonal(n_x: int, n_y: int, x_value: float, y_value: float, like: Tensor) -> Tensor:
    return torch.diag(torch.cat([like.new_full((n_x,), x_value), like.new_full((n_y,), y_value)]))


def gd_layer(weight0: Weight, rate: float, n_demos: int) -> LinearSelfAttention:
    """The K, Q, V and P of Prop. 1: one layer, one gradient step, for any data and any W_0."""
    n_y, n_x = weight0.shape
    read_x = _diagonal(n_x, n_y, 1.0, 0.0, weight0)
    w_v = _diagonal(n_x, n_y, 0.0, -1.0, weight0)
    w_v[n_x:, :n_x] = weight0
    return LinearSelfAttention(
        w_k=read_x, w_q=read_x, w_v=w_v, p=_diagonal(n_x, n_y, 1.0, 1.0, weight0) * (rate / n_demos)
    )


def gd_plus_plus_layer(
    n_x: int, n_y: int, rate: float, gamma: float, n_demos: int, like: Tensor
) -> LinearSelfAttention:
    """One layer of GD++ (W_0 = 0): W_V = diag(I, −I), P = diag(−γ I, (η/N) I); dtype and device as `like`."""
    read_x = _diagonal(n_x, n_y, 1.0, 0.0, like)
    return LinearSelfAttention(
        w_k=read_x,
        w_q=read_x,
        w_v=_diagonal(n_x, n_y, 1.0, -1.0, like),
        p=_diagonal(n_x, n_y, -gamma, rate / n_demos, like),
    )


@dataclass(frozen=True)
class Regression:
    """Tokens of a regression in context after some layers."""

    context: Float[Tensor, "d demo"]
    query: Float[Tensor, "d query"]
    n_x: int

    @property
    def prediction(self) -> Answers:
        """Minus the query tokens' y block."""
        return -self.query[self.n_x :]


def regression_tokens(x: Inputs, y: Targets, x_query: Asked, weight0: Weight | None = None) -> Regression:
    """e_i = (x_i, y_i) and e_q = (x_q, −W_0 x_q); zeros in the query's y block when W_0 = 0."""
    start = y.new_zeros(y.shape[0], x_query.shape[1]) if weight0 is None else -(weight0 @ x_query)
    return Regression(context=torch.cat([x, y]), query=torch.cat([x_query, start]), n_x=x.shape[0])


def run_layers(tokens: Regression, layers: Sequence[LinearSelfAttention]) -> Regression:
    """Pass context and query through the layers; the query never becomes a key or a value."""
    context, query = tokens.context, tokens.query
    for layer in layers:
        context, query = layer(context, context), layer(query, context)
    return Regression(context=context, query=query, n_x=tokens.n_x)


def gd_plus_plus(x: Inputs, y: Targets, x_query: Asked, rate: float, gamma: float, steps: int) -> Answers:
    """GD++ without attention: each step fits the residuals on the present inputs, then conditions those inputs."""
    prediction = y.new_zeros(y.shape[0], x_query.shape[1])
    residual = y
    for _ in range(steps):
        update = rate / x.shape[1] * residual @ x.T
        prediction, residual = prediction + update @ x_query, residual - update @ x
        shrink = torch.eye(x.shape[0]).to(x) - gamma * x @ x.T
        x, x_query = shrink @ x, shrink @ x_query
    return prediction


@dataclass(frozen=True)
class StepOptimum:
    """The best single gradient step from W_0 = 0, on average over tasks."""

    rate: float
    loss: float
    """½ E (y_q − ŷ_q)²."""
    risk: float
    """The loss as a fraction of ½ E y_q²: 1 is no better than predicting 0, 0 is perfect."""


def one_step_optimum(dim: int, n_demos: int, variance: float = 1.0, kurtosis: float = 3.0) -> StepOptimum:
    """Best step of size η/N for y = wᵀx, w ~ N(0, I), x with iid coordinates of this variance and kurtosis E x⁴/σ⁴.

    With S = (1/N) Σ x_i x_iᵀ: loss(η) = (σ²/2) E tr (I − ηS)², so η* = d σ² / E tr S² and
    loss = (σ²/2)(d − d² σ⁴ / E tr S²), E tr S² = σ⁴ [ (κ − 1 + d) d/N + (1 − 1/N) d ].

    >>> best = one_step_optimum(10, 10, variance=1 / 12, kurtosis=1.8)   # U(−½, ½), von Oswald's data
    >>> round(best.rate, 2), round(best.loss, 4)
    (6.06, 0.2062)
    """
    if dim < 1 or n_demos < 1 or variance <= 0 or kurtosis < 1:
        raise UserError("one_step_optimum needs dim ≥ 1, n_demos ≥ 1, variance > 0 and kurtosis ≥ 1.")
    trace = (kurtosis - 1 + dim) * dim / n_demos + (1 - 1 / n_demos) * dim  # E tr S² / σ⁴
    risk = 1 - dim / trace
    return StepOptimum(rate=dim / (trace * variance), loss=0.5 * variance * dim * risk, risk=risk)


def uniform_optimum(dim: int, n_demos: int, half_width: float = 0.5) -> StepOptimum:
    """`one_step_optimum` for x ~ U(−a, a): variance a²/3, kurtosis 9/5."""
    return one_step_optimum(dim, n_demos, half_width**2 / 3, 9 / 5)


def gaussian_optimum(dim: int, n_demos: int, variance: float = 1.0) -> StepOptimum:
    """`one_step_optimum` for x ~ N(0, σ²I): η* = N/((N + d + 1) σ²), risk (d + 1)/(N + d + 1)."""
    return one_step_optimum(dim, n_demos, variance, 3.0)


@dataclass(frozen=True)
class LsaOptimum:
    """The best one-layer linear self-attention: ŷ = x_qᵀ A (1/n) Σ y_i x_i."""

    matrix: Float[Tensor, "d d"]
    loss: float
    """½ E (y_q − ŷ_q)², against the noiseless target."""


def lsa_optimum(
    covariance: Float[Tensor, "d d"], n_demos: int, prior: Float[Tensor, "d d"] | None = None, noise: float = 0.0
) -> LsaOptimum:
    """The analytic optimum for x ~ N(0, Σ), w ~ N(0, Λ), y = wᵀx + noise (Ahn 2306.00297, Zhang 2306.09927).

    With S = (1/n) Σ x_i x_iᵀ the loss is quadratic in A, and A = ΛΣ M⁻¹ with

        M = E[SΛS] + (σ²/n) Σ = ((n+1)/n) ΣΛΣ + ((tr ΣΛ + σ²)/n) Σ.

    For Λ = I and σ = 0 this is A = Γ⁻¹, Γ = ((n+1)/n) Σ + (tr Σ/n) I; for Σ = I the single step n/(n + d + 1). Gaussian
    inputs only: for uniform inputs see `uniform_optimum`.
    """
    prior = torch.eye(covariance.shape[0]).to(covariance) if prior is None else prior
    seen = covariance @ prior @ covariance
    trace = (covariance * prior.T).sum()
    moment = (n_demos + 1) / n_demos * seen + (trace + noise**2) / n_demos * covariance
    matrix = solve_right(prior @ covariance, moment)
    # at the optimum the quadratic's minimum is half of what the linear term takes away
    return LsaOptimum(matrix=matrix, loss=0.5 * float(trace - (matrix * seen.T).sum()))
