"""Linear regression with inputs of a given condition number, many problems for each of several models.

x ~ N(0, Σ), w ~ N(0, I), y = wᵀx + noise; the query's target has no noise. Σ is diagonal, its eigenvalues a geometric
sequence from its largest to its smallest, with mean 1: every condition number κ has the same E y². It is the same in
all problems, so a model can learn it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.lab.rivals.small_matrices import applied


def eigenvalues(n_x: int, condition: float) -> Float[Tensor, " n_x"]:
    """Σ's: κ^0, κ^(−1/(n_x−1)), …, κ^−1, divided by their mean."""
    powers = torch.arange(n_x, dtype=torch.float64) / max(1, n_x - 1)
    values = condition**-powers
    return values / values.mean()


@dataclass(frozen=True)
class Spectrum:
    """S = U diag(λ) Uᵀ and Uᵀc of many problems, batch last."""

    values: Float[Tensor, " n_x *batch"]
    basis: Float[Tensor, "n_x n_x *batch"]
    labels: Float[Tensor, " n_x *batch"]

    def slope(self, factors: Float[Tensor, " n_x *batch"]) -> Float[Tensor, " n_x *batch"]:
        """f(S) c from f(λ)."""
        return applied(self.basis, factors * self.labels)


@dataclass(frozen=True)
class Moments:
    """All that linear attention and every rule here read of a context, batch last, and the question asked of it.

    A token (x, y) enters linear attention only through Σ_i (x_i, y_i)(x_i, y_i)ᵀ.
    """

    second: Float[Tensor, "d d *batch"]
    """(1/N) Σ_i e_i e_iᵀ of the tokens e_i = (x_i, y_i), d = n_x + 1."""
    x_query: Float[Tensor, " n_x *batch"]
    y_query: Float[Tensor, " *batch"]
    truth: Float[Tensor, " n_x *batch"]
    """w."""
    scale: Float[Tensor, " n_x *batch_or_1"]
    """The eigenvalues of Σ."""

    @property
    def inputs(self) -> Float[Tensor, "n_x n_x *batch"]:
        """S = (1/N) Σ x_i x_iᵀ."""
        return self.second[:-1, :-1]

    @property
    def labels(self) -> Float[Tensor, " n_x *batch"]:
        """c = (1/N) Σ y_i x_i."""
        return self.second[:-1, -1]

    def predicted(self, slope: Float[Tensor, " n_x *batch"]) -> Float[Tensor, " *batch"]:
        """ŷ = slopeᵀ x_q."""
        return (slope * self.x_query).sum(0)

    def risk(self, slope: Float[Tensor, " n_x *batch"]) -> Float[Tensor, " *batch"]:
        """½ E (ŷ − y)² over the query, in closed form: ½ (s − w)ᵀ Σ (s − w)."""
        return 0.5 * (self.scale * (slope - self.truth).square()).sum(0)

    @cached_property
    def spectrum(self) -> Spectrum:
        """S in its eigenbasis."""
        values, basis = torch.linalg.eigh(self.inputs.movedim((0, 1), (-2, -1)))
        basis = basis.movedim((-2, -1), (0, 1)).contiguous()
        return Spectrum(values.movedim(-1, 0).contiguous(), basis, (basis * self.labels[:, None]).sum(0))

    def first(self, count: int) -> Moments:
        """The first few problems of one model."""
        second, x_query, y_query, truth = (
            part[..., :count].contiguous() for part in (self.second, self.x_query, self.y_query, self.truth)
        )
        return Moments(second, x_query, y_query, truth, self.scale)

    def with_inputs(self, factors: Float[Tensor, " n_x"]) -> Moments:
        """The problems of one model with each input times a factor, and w divided by it: the same labels."""
        each = factors[:, None]
        both = torch.cat([each, torch.ones_like(each[:1])])
        second = both[:, None] * self.second * both[None]
        return Moments(second, each * self.x_query, self.y_query, self.truth / each, self.scale * each.square())

    def of_model(self, number: int) -> Moments:
        """One model's problems, in float64."""
        parts = (self.second, self.x_query, self.y_query, self.truth, self.scale)
        return Moments(*(part[..., number, :].double() for part in parts))


@dataclass(frozen=True)
class Problems:
    """Problems of several models: the first dimension is the model."""

    x: Float[Tensor, "model task demo n_x"]
    y: Float[Tensor, "model task demo"]
    x_query: Float[Tensor, "model task n_x"]
    y_query: Float[Tensor, "model task"]
    truth: Float[Tensor, "model task n_x"]
    scale: Float[Tensor, "model n_x"]
    """The eigenvalues of each model's Σ."""

    def moments(self) -> Moments:
        tokens = torch.cat([self.x, self.y[..., None]], -1)
        second = tokens.mT @ tokens / tokens.shape[-2]
        return Moments(
            second.permute(2, 3, 0, 1).contiguous(),
            self.x_query.permute(2, 0, 1).contiguous(),
            self.y_query,
            self.truth.permute(2, 0, 1).contiguous(),
            self.scale.mT[..., None],
        )


@dataclass(frozen=True)
class Source:
    """Where one model's problems come from."""

    n_x: int
    n_demos: int
    condition: float
    noise: float
    """Standard deviation of the noise on the demonstrations' labels."""

    @property
    def scale(self) -> Float[Tensor, " n_x"]:
        """The eigenvalues of Σ, in float64."""
        return eigenvalues(self.n_x, self.condition)

    def draw(self, generator: torch.Generator, tasks: int) -> tuple[Tensor, ...]:
        """The parts of `Problems` for one model."""
        where = generator.device
        scale = self.scale.to(where, torch.float32)
        x = torch.randn(tasks, self.n_demos + 1, self.n_x, generator=generator, device=where) * scale.sqrt()
        truth = torch.randn(tasks, self.n_x, generator=generator, device=where)
        y = (x @ truth[..., None])[..., 0]
        noise = self.noise * torch.randn(tasks, self.n_demos, generator=generator, device=where)
        return x[:, :-1], y[:, :-1] + noise, x[:, -1], y[:, -1], truth, scale


def draw(sources: Sequence[Source], generators: Sequence[torch.Generator], tasks: int) -> Problems:
    """`tasks` new problems for each model, each from its own generator."""
    drawn = [source.draw(generator, tasks) for source, generator in zip(sources, generators, strict=True)]
    return Problems(*(torch.stack(parts) for parts in zip(*drawn, strict=True)))
