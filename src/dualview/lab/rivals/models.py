"""The trained models, several at once: the first dimension of each parameter is the model, so that five seeds cost
little more than one.

A layer is e ← e + U Σ_c α(c, e) c with α = cᵀ M e (linear) or its softmax over the context: M = W_Kᵀ W_Q, U = P W_V.
The query enters as (x_q, 0), is neither key nor value, and the prediction is minus its y coordinate (von Oswald et al.
2023). M starts near half the identity and U near 0: from a plain random start a layer often ends in a poor minimum that
reads one coordinate of w only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.io.errors import UserError
from dualview.io.progress import Advance
from dualview.lab.rivals.problems import Problems, Source, draw
from dualview.lab.rivals.small_matrices import applied, eye, product
from dualview.lab.training import Schedule, clip_each, training_steps
from dualview.lab.units import Unit

MIDDLE, SPREAD = 0.5, 0.1
"""Of the start: M = MIDDLE · I + SPREAD · noise, U = SPREAD/depth · noise."""
BOUND = 100.0
"""Second moments are clamped to ±BOUND between layers; von Oswald et al. clamp tokens to ±10."""
Answer = tuple[Float[Tensor, "model task"], Float[Tensor, "n_x model task"]]
"""ŷ and ∂ŷ/∂x_q."""


def _start(
    shape: Sequence[int], middle: float, spread: float, generators: Sequence[torch.Generator]
) -> Float[Tensor, "model ..."]:
    drawn = torch.stack([torch.randn(*shape, generator=each, device=each.device) for each in generators])
    return middle * torch.eye(shape[-1], device=drawn.device) + spread * drawn


class LinearModels(nn.Module):
    """Linear self-attention on tokens (x, y). With G = (1/N) Σ c cᵀ a layer is e ← (I + U G M) e for every token.

    So G ← (I + U G M) G (I + U G M)ᵀ, the context is read through G alone, and ŷ is linear in x_q.
    """

    def __init__(self, n_x: int, depth: int, shared: bool, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.depth = depth
        shape = (1 if shared else depth, n_x + 1, n_x + 1)
        self.m = nn.Parameter(_start(shape, MIDDLE, SPREAD, generators))
        self.u = nn.Parameter(_start(shape, 0.0, SPREAD / depth, generators))

    def slope(self, second: Float[Tensor, "d d model task"]) -> Float[Tensor, "n_x model task"]:
        """∂ŷ/∂x_q = −(last row of Π_l (I + U_l G_l M_l)), from the last layer to the first."""
        own, size = self.m.shape[1], second.shape[0]
        ms, us = (weight.permute(1, 2, 3, 0)[..., None] for weight in (self.m, self.u))
        one, moves = eye(size, second, 2), list[Tensor]()
        for layer in range(self.depth - 1):
            move = one + product(product(us[layer % own], second), ms[layer % own])
            moves.append(move)
            second = product(product(move, second), move.transpose(0, 1)).clamp(-BOUND, BOUND)
        last = (self.depth - 1) % own
        read = applied(second, us[last][-1])  # the last layer's last row needs no products of matrices
        row = one[-1] + applied(ms[last].transpose(0, 1), read)
        for move in reversed(moves):
            row = applied(move.transpose(0, 1), row)
        return -row[:-1]

    def losses(self, problems: Problems) -> Float[Tensor, " model"]:
        """½ E (ŷ − y)², the expectation over the query in closed form."""
        moments = problems.moments()
        return moments.risk(self.slope(moments.second)).mean(-1)

    def answer(self, problems: Problems) -> Answer:
        moments = problems.moments()
        slope = self.slope(moments.second)
        return moments.predicted(slope), slope


class TokenModels(nn.Module):
    """Attention token by token: softmax with several heads, or separate tokens whose first layer has softmax.

    Separate tokens are (x_1, 0, p_1), (0, y_1, p_2), …, (x_q, 0, p_2N+1) with position codes p; the first layer can
    copy each y to its x, the others are linear.
    """

    def __init__(
        self, n_x: int, depth: int, heads: int, separate: bool, generators: Sequence[torch.Generator], codes: int = 16
    ) -> None:
        super().__init__()
        self.n_x, self.separate, self.codes = n_x, separate, codes if separate else 0
        layers, width = depth + separate, n_x + 1 + self.codes
        self.softmax = [number == 0 or not separate for number in range(layers)]
        shape = (layers, 1 if separate else heads, width, width)
        start = _start(shape, MIDDLE, SPREAD, generators)
        if separate:  # at half the identity each token would attend to itself, and the copying is not found
            start[:, 0] -= MIDDLE * torch.eye(width, device=start.device)
        self.m = nn.Parameter(start)
        self.u = nn.Parameter(_start(shape, 0.0, SPREAD if separate else SPREAD / depth, generators))

    def tokens(
        self, problems: Problems, x_query: Float[Tensor, "model task n_x"]
    ) -> Float[Tensor, "model task token d"]:
        x, y = torch.cat([problems.x, x_query[..., None, :]], -2), problems.y[..., None]
        if not self.separate:
            return torch.cat([x, torch.nn.functional.pad(y, (0, 0, 0, 1))], -1)
        inputs = torch.nn.functional.pad(x, (0, 1))
        labels = torch.nn.functional.pad(torch.nn.functional.pad(y, (self.n_x, 0)), (0, 0, 0, 1))
        both = torch.stack([inputs, labels], -2).flatten(-3, -2)[..., :-1, :]
        places = positions(both.shape[-2], self.codes).to(both)
        return torch.cat([both, places.expand(*both.shape[:-1], -1)], -1)

    def predicted(self, problems: Problems, x_query: Float[Tensor, "model task n_x"]) -> Float[Tensor, "model task"]:
        tokens = self.tokens(problems, x_query)
        last = len(self.softmax) - 1
        for layer, softmax in enumerate(self.softmax):
            context = tokens[..., :-1, :]
            tokens = tokens[..., -1:, :] if layer == last else tokens
            tokens = tokens + self._attended(layer, softmax, tokens, context)
        return -tokens[..., -1, self.n_x]

    def _attended(
        self,
        layer: int,
        softmax: bool,
        tokens: Float[Tensor, "model task token d"],
        context: Float[Tensor, "model task demo d"],
    ) -> Float[Tensor, "model task token d"]:
        total = torch.zeros_like(tokens)
        for head in range(self.m.shape[2]):
            m, u = self.m[:, None, layer, head], self.u[:, None, layer, head]
            logits = (tokens @ m.mT) @ context.mT
            weights = torch.softmax(logits, -1) if softmax else logits / context.shape[-2]
            total = total + (weights @ context) @ u.mT
        return total

    def copying(self, problems: Problems) -> Float[Tensor, "way model"]:
        """Separate tokens: the mean softmax weight, in the first layer, of each y for its x and of each x for its y.

        Either way makes a token (x_i, y_i).
        """
        tokens = self.tokens(problems, problems.x_query)
        weights = torch.softmax((tokens @ self.m[:, None, 0, 0].mT) @ tokens[..., :-1, :].mT, -1)
        ways = (weights[..., 0:-1:2, 1::2], weights[..., 1::2, 0::2])
        return torch.stack([way.diagonal(dim1=-2, dim2=-1).mean((1, 2)) for way in ways])

    def losses(self, problems: Problems) -> Float[Tensor, " model"]:
        """½ (ŷ − y)²."""
        return 0.5 * (self.predicted(problems, problems.x_query) - problems.y_query).square().mean(-1)

    def answer(self, problems: Problems) -> Answer:
        at = problems.x_query.clone().requires_grad_()
        with torch.enable_grad():
            found = self.predicted(problems, at)
            (slope,) = torch.autograd.grad(found.sum(), at)
        return found.detach(), slope.permute(2, 0, 1)


def positions(count: int, codes: int) -> Float[Tensor, "token code"]:
    """Cosines and sines of `codes`/2 frequencies that share no period: a shift by one is a rotation of the code."""
    golden = (math.sqrt(5) - 1) / 2
    frequencies = torch.tensor([math.pi * ((number * golden) % 1) for number in range(1, codes // 2 + 1)])
    angles = torch.arange(count)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


Models = LinearModels | TokenModels


def made(kind: str, n_x: int, depth: int, heads: int, generators: Sequence[torch.Generator]) -> Models:
    """Untrained models of a kind: linear, shared, softmax or separate."""
    if kind in ("linear", "shared"):
        return LinearModels(n_x, depth, kind == "shared", generators)
    return TokenModels(n_x, depth, heads, kind == "separate", generators)


def train(
    models: Models,
    sources: Sequence[Source],
    generators: Sequence[torch.Generator],
    schedule: Schedule,
    unit: Unit,
    advance: Advance,
) -> None:
    """Train in place; every model has a source and a generator.

    Each model's gradient is clipped by its own norm. A step whose gradient is not finite is left out for that model.
    """
    named = {str(number): each for number, each in enumerate(generators)}
    for _ in training_steps(models, schedule, advance, unit, named):
        models.losses(draw(sources, generators, schedule.batch_size)).sum().backward()
        clip_each(models.parameters(), schedule.clip, leave_out=True)
    if not all(bool(weight.isfinite().all()) for weight in models.parameters()):
        raise UserError("The training diverged: some weights are not finite; give a lower --lr.")
