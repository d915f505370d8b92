"""Regression problems to be solved in context: each has N demonstrations (x_i, y_i) and one query x_q.

Linear (von Oswald et al. 2023, arXiv 2212.07677, as in their code): w ~ N(0, I), x ~ U(−r/2, r/2) with input range r,
y = wᵀx. With r = 1 that is U(−.5, .5), although the paper's text says U(−1, 1).

Sine: y = a sin(x + φ), x ~ U(−5, 5), a ~ U(.1, .5), φ ~ U(0, π). Their code draws a and φ from one key, so they
depend on each other; here they are independent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Tasks:
    """A batch of problems, tokens as rows."""

    x: Float[Tensor, "task demo n_x"]
    y: Float[Tensor, "task demo"]
    x_query: Float[Tensor, "task n_x"]
    y_query: Float[Tensor, " task"]
    """The target, always without noise."""

    def __len__(self) -> int:
        return self.x.shape[0]

    def chunks(self, size: int) -> Iterator[Tasks]:
        """The same problems, `size` at a time."""
        parts = (part.split(size) for part in (self.x, self.y, self.x_query, self.y_query))
        yield from (Tasks(*part) for part in zip(*parts, strict=True))

    def first(self, count: int) -> Tasks:
        return next(self.chunks(count))

    @property
    def context(self) -> Float[Tensor, "task demo d"]:
        """The demonstrations' tokens (x_i, y_i)."""
        return torch.cat([self.x, self.y[..., None]], -1)

    @property
    def query(self) -> Float[Tensor, "task 1 d"]:
        """The query's token (x_q, 0)."""
        return torch.cat([self.x_query, self.x_query.new_zeros(len(self), 1)], -1)[:, None]

    def loss(self, predicted: Float[Tensor, " task"]) -> Float[Tensor, ""]:
        """½ (ŷ − y)², averaged."""
        return 0.5 * (predicted - self.y_query).square().mean()

    def with_query(self, x_query: Float[Tensor, "task n_x"]) -> Tasks:
        """The same demonstrations asked about other inputs."""
        return replace(self, x_query=x_query)


def named_generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of one named draw of one seed, independent of every other name's and seed's."""
    digest = hashlib.sha256(f"{name}/{seed}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8]) >> 1)


@dataclass(frozen=True)
class LinearTasks:
    """y = wᵀx, w ~ weight_scale · N(0, I), x ~ U(−input_range/2, input_range/2)."""

    n_x: int = 10
    n_demos: int = 10
    input_range: float = 1.0
    weight_scale: float = 1.0
    noise: float = 0.0
    """Standard deviation of the noise on the demonstrations' labels."""
    corrupted: int = 0
    """How many of the demonstrations' labels are replaced by draws from N(0, 1)."""

    def draw(self, generator: torch.Generator, count: int) -> Tasks:
        where = generator.device
        x = torch.rand(count, self.n_demos + 1, self.n_x, generator=generator, device=where).sub_(0.5)
        x *= self.input_range
        w = self.weight_scale * torch.randn(count, self.n_x, 1, generator=generator, device=where)
        y = (x @ w)[..., 0]
        labels, target = y[:, :-1], y[:, -1]
        if self.noise:
            labels = labels + self.noise * torch.randn(labels.shape, generator=generator, device=where)
        if self.corrupted:
            drawn = torch.randn(count, self.corrupted, generator=generator, device=where)
            labels = torch.cat([drawn, labels[:, self.corrupted :]], 1)
        return Tasks(x[:, :-1], labels, x[:, -1], target)


@dataclass(frozen=True)
class SineTasks:
    """y = a sin(x + φ)."""

    n_demos: int = 10
    half_width: float = 5.0
    noise: float = 0.0

    def draw(self, generator: torch.Generator, count: int) -> Tasks:
        where = generator.device
        x = torch.rand(count, self.n_demos + 1, generator=generator, device=where).sub_(0.5) * (2 * self.half_width)
        amplitude = 0.1 + 0.4 * torch.rand(count, 1, generator=generator, device=where)
        phase = math.pi * torch.rand(count, 1, generator=generator, device=where)
        y = amplitude * torch.sin(x + phase)
        labels = y[:, :-1]
        if self.noise:
            labels = labels + self.noise * torch.randn(labels.shape, generator=generator, device=where)
        return Tasks(x[:, :-1, None], labels, x[:, -1:], y[:, -1])
