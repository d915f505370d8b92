"""Predictors for regression in context: trained self-attention, the same with constructed weights, gradient descent.

Tokens e_i = (x_i, y_i) as rows; the query enters as (x_q, 0) and is neither key nor value; the prediction is minus its
last coordinate (von Oswald et al. 2023, arXiv 2212.07677, section 2 and Prop. 1). Weights are those of
`duality.theory.regression.LinearSelfAttention`, which has tokens as columns; row tokens use their transposes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.duality.theory.regression import (
    LinearSelfAttention,
    gd_layer,
    gd_plus_plus_layer,
    gd_step,
    regression_tokens,
    run_layers,
)
from dualview.lab.problems import Tasks
from dualview.lab.regression.settings import RegressionSettings

Predictor = Callable[[Tasks], Float[Tensor, " task"]]
"""ŷ for each problem's query."""


class SelfAttention(nn.Module):
    """e ← e + Σ_heads P_h · Attn(W_K,h E, W_V,h E, W_Q,h e), linear or softmax; no biases, no norms."""

    def __init__(self, d: int, heads: int, softmax: bool, std: float, generator: torch.Generator) -> None:
        super().__init__()
        self.heads, self.softmax = heads, softmax

        def drawn() -> nn.Parameter:
            return nn.Parameter(std * torch.randn(heads, d, d, generator=generator, device=generator.device))

        self.w_k, self.w_q, self.w_v, self.p = drawn(), drawn(), drawn(), drawn()

    @classmethod
    def of(cls, weights: LinearSelfAttention) -> SelfAttention:
        """One linear head with these weights."""
        like = weights.p
        made = cls(like.shape[0], 1, False, 0.0, torch.Generator(like.device))
        for name in ("w_k", "w_q", "w_v", "p"):
            setattr(made, name, nn.Parameter(getattr(weights, name).detach()[None].clone()))
        return made

    def weights(self) -> LinearSelfAttention:
        """A single linear head's weights, for the algebra."""
        return LinearSelfAttention(*(weight.detach()[0] for weight in (self.w_k, self.w_q, self.w_v, self.p)))

    def forward(
        self, tokens: Float[Tensor, "task token d"], context: Float[Tensor, "task demo d"]
    ) -> Float[Tensor, "task token d"]:
        key, value = self._project(self.w_k, context), self._project(self.w_v, context)
        logits = self._project(self.w_q, tokens) @ key.mT
        if self.softmax:
            logits = torch.softmax(logits * key.shape[-1] ** -0.5, -1)
        mixed = (logits @ value).transpose(1, 2).flatten(2)
        return tokens + mixed @ self.p.mT.flatten(0, 1)

    def _project(
        self, weight: Float[Tensor, "head d d"], tokens: Float[Tensor, "task token d"]
    ) -> Float[Tensor, "task head token d"]:
        return (tokens @ weight.flatten(0, 1).T).unflatten(-1, (self.heads, -1)).transpose(1, 2)


class InContext(nn.Module):
    """`depth` layers of self-attention, one set of weights for all (recurrent) or one each."""

    def __init__(self, layers: Sequence[SelfAttention], depth: int, clamp: float | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.depth, self.clamp = depth, clamp

    @classmethod
    def fresh(cls, d: int, settings: RegressionSettings, generator: torch.Generator) -> InContext:
        """Their initialisation: variance 0.002/layers over the fan-in; their clamp at ±10 above three layers.

        Softmax attention starts at 1/layers over the fan-in: from their start it stays near uniform weights for long.
        """
        depth, softmax = settings.layers, settings.softmax
        std = ((1.0 if softmax else 0.002) / depth / d) ** 0.5
        own = 1 if settings.recurrent else depth
        made = [SelfAttention(d, settings.heads, softmax, std, generator) for _ in range(own)]
        return cls(made, depth, clamp=10.0 if depth > 3 else None)

    @classmethod
    def constructed(cls, layers: Sequence[LinearSelfAttention]) -> InContext:
        """Constructed weights, one layer each."""
        return cls([SelfAttention.of(layer) for layer in layers], len(layers))

    def forward(self, tasks: Tasks) -> Float[Tensor, " task"]:
        return self.transform(tasks.context, tasks.query)

    def transform(
        self, context: Float[Tensor, "task demo d"], query: Float[Tensor, "task 1 d"]
    ) -> Float[Tensor, " task"]:
        """From tokens to prediction."""
        tokens = torch.cat([context, query], 1)
        for number in range(self.depth):
            context = tokens[:, :-1]
            if number == self.depth - 1:
                tokens = tokens[:, -1:]  # only the query is read off
            tokens = self.layers[number % len(self.layers)](tokens, context)
            if self.clamp is not None:
                tokens = tokens.clamp(-self.clamp, self.clamp)
        return -tokens[:, -1, -1]


def gradient_descent(rate: float, steps: int) -> Predictor:
    """`steps` of gradient descent from W = 0 on the demonstrations, then W x_q."""

    def one(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        weight = x.new_zeros(1, x.shape[0])
        for _ in range(steps):
            weight = gd_step(weight, x, y, rate)
        return (weight @ x_query)[0, 0]

    return lambda tasks: _each(one, tasks)


def gd_plus_plus(rates: Sequence[float], gammas: Sequence[float]) -> Predictor:
    """GD++ with a rate and a γ for each step."""

    def one(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        layers = plus_plus_layers(rates, gammas, x)
        return run_layers(regression_tokens(x, y, x_query), layers).prediction[0, 0]

    return lambda tasks: _each(one, tasks)


def gd_layers(rate: float, steps: int, x: Float[Tensor, "n_x demo"]) -> list[LinearSelfAttention]:
    """Proposition 1's weights for problems of this shape, one layer a step."""
    n_x, n_demos = x.shape
    return [gd_layer(x.new_zeros(1, n_x), rate, n_demos)] * steps


def plus_plus_layers(
    rates: Sequence[float], gammas: Sequence[float], x: Float[Tensor, "n_x demo"]
) -> list[LinearSelfAttention]:
    """GD++'s weights for problems of this shape."""
    n_x, n_demos = x.shape
    pairs = zip(rates, gammas, strict=True)
    return [gd_plus_plus_layer(n_x, 1, rate, gamma, n_demos, x) for rate, gamma in pairs]


def _each(one: Callable[[Tensor, Tensor, Tensor], Tensor], tasks: Tasks) -> Float[Tensor, " task"]:
    """A function of one problem, with tokens as columns, on all of them."""
    return torch.func.vmap(one)(tasks.x.mT, tasks.y[:, None], tasks.x_query[..., None])


def interpolated(trained: LinearSelfAttention, constructed: LinearSelfAttention, n_x: int) -> LinearSelfAttention:
    """Half way between trained and constructed weights, in what a layer computes: M = W_Qᵀ W_K and U = P W_V.

    (M, U) and (M/β, βU) are one layer; β = mean of M's x-diagonal fixes the scale before averaging (their notebook).
    """
    m, u = trained.w_q.T @ trained.w_k, trained.p @ trained.w_v
    beta = m.diagonal()[:n_x].mean()
    m = 0.5 * (m / beta + constructed.w_q.T @ constructed.w_k)
    u = 0.5 * (beta * u + constructed.p @ constructed.w_v)
    one = torch.eye(m.shape[0]).to(m)
    return LinearSelfAttention(w_k=m, w_q=one, w_v=u, p=one)
