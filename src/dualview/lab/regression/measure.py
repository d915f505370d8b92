"""Losses of predictors on regression in context, how similar two of them are, and the best gradient descent.

Everything is summed in float64 over chunks of the same evaluation problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from dualview.duality.theory.regression import uniform_optimum
from dualview.lab.problems import LinearTasks, Tasks
from dualview.lab.regression.models import Predictor, gd_plus_plus, gradient_descent
from dualview.lab.rivals.rules import plus_plus_factor
from dualview.lab.summaries import student_ci

CHUNK = 10_000


def losses(predict: Predictor, tasks: Tasks) -> Float[np.ndarray, " task"]:
    """½ (ŷ − y)² of every problem."""
    with torch.no_grad():
        parts = [(predict(part) - part.y_query).double().square() / 2 for part in tasks.chunks(CHUNK)]
    return torch.cat(parts).cpu().numpy()


def mean_loss(predict: Predictor, tasks: Tasks) -> float:
    return float(losses(predict, tasks).mean())


def slopes(predict: Predictor, tasks: Tasks) -> Float[Tensor, "task n_x"]:
    """∂ŷ/∂x_q: the linear model that a predictor has found in each context (exact where it is linear in x_q)."""
    at = tasks.x_query.clone().requires_grad_()
    (slope,) = torch.autograd.grad(predict(tasks.with_query(at)).sum(), at)
    return slope.double()


def similarity(one: Predictor, other: Predictor, tasks: Tasks) -> dict[str, float]:
    """Two predictors on the same problems, each number a mean over them (von Oswald et al. 2023, section 3).

    prediction_difference   |ŷ − ŷ'|; 0 is equality
    model_cosine            cos(∂ŷ/∂x_q, ∂ŷ'/∂x_q); 1 is the same direction, 0 orthogonal; ignores scale
    model_difference        ‖∂ŷ/∂x_q − ∂ŷ'/∂x_q‖
    """
    sums = np.zeros(3)
    for part in tasks.chunks(CHUNK):
        with torch.no_grad():
            gap = (one(part) - other(part)).double().abs().sum()
        a, b = slopes(one, part), slopes(other, part)
        cosine = torch.cosine_similarity(a, b, dim=-1).sum()
        sums += [float(gap), float(cosine), float((a - b).norm(dim=-1).sum())]
    names = ("prediction_difference", "model_cosine", "model_difference")
    return dict(zip(names, (sums / len(tasks)).tolist(), strict=True))


# -------------------------------------------------------------------------------------------------------- step sizes


def best_rate(tasks: Tasks, steps: int, guess: float) -> float:
    """The rate of `steps` steps of gradient descent with the lowest loss on these problems.

    The loss is a polynomial of degree 2k in η. One step's is a parabola, and the search in (0, 4 · guess) finds its
    minimum. Without noise the mean over w and x_q, up to a factor Σ (1 − ηλ/N)^{2k} over the eigenvalues λ of X Xᵀ, is
    convex at any k; on a sample, or with noise, more steps may have several minima, and the search finds one of them.
    """

    def loss(rate: float) -> float:
        return mean_loss(gradient_descent(float(rate), steps), tasks)

    how = {"bounds": (0.0, 4 * guess), "method": "bounded", "options": {"xatol": 1e-4 * guess}}
    return float(cast("Any", optimize).minimize_scalar(loss, **how).x)


@dataclass(frozen=True)
class PlusPlus:
    """GD++ at its best: a rate and a γ per step."""

    rates: list[float]
    gammas: list[float]

    @property
    def predictor(self) -> Predictor:
        return gd_plus_plus(self.rates, self.gammas)


@dataclass(frozen=True)
class Spectrum:
    """Problems in the eigenbasis U of X Xᵀ, where a step of GD++ is a few products of numbers; float64.

    A step reads only X Xᵀ, c = X yᵀ and x_q, and leaves U as it is: ŷ = Σ_i f(λ_i) c_i q_i with the eigenvalues λ, and
    c and q in U. So a search over η and γ, which needs hundreds of losses, is cheap on all of the problems.
    """

    eigenvalues: Float[Tensor, "task n_x"]
    products: Float[Tensor, "task n_x"]
    """c_i q_i."""
    target: Float[Tensor, " task"]
    n_demos: int

    @classmethod
    def of(cls, tasks: Tasks) -> Spectrum:
        values, products = list[Tensor](), list[Tensor]()
        for part in tasks.chunks(CHUNK):
            x = part.x.double()
            size, basis = torch.linalg.eigh(x.mT @ x)
            labels = torch.einsum("tdi,tnd,tn->ti", basis, x, part.y.double())
            values.append(size)
            products.append(labels * torch.einsum("tdi,td->ti", basis, part.x_query.double()))
        return cls(torch.cat(values), torch.cat(products), tasks.y_query.double(), tasks.x.shape[1])

    def loss(self, rates: Sequence[float], gammas: Sequence[float]) -> float:
        """The mean of ½ (ŷ − y)² after GD++ with these rates and γ."""
        factor = plus_plus_factor(self.eigenvalues, [rate / self.n_demos for rate in rates], gammas)
        return float(((factor * self.products).sum(-1) - self.target).square().mean() / 2)


def best_plus_plus(tasks: Tasks, steps: int, rate: float, *, shared: bool) -> PlusPlus:
    """The rates and γ of GD++ with the lowest loss on these problems, shared by all steps or one pair each.

    A search from the best rate of plain descent, in units of it and of 1/tr(X Xᵀ).
    """
    problems = Spectrum.of(tasks)
    unit = 1 / float(problems.eigenvalues.sum(-1).mean())

    def unpack(point: Float[np.ndarray, " n"]) -> PlusPlus:
        pairs = np.broadcast_to(point.reshape(-1, 2), (steps, 2))
        return PlusPlus((pairs[:, 0] * rate).tolist(), (pairs[:, 1] * unit).tolist())

    def loss(point: Float[np.ndarray, " n"]) -> float:
        found = unpack(point)
        return problems.loss(found.rates, found.gammas)

    minimize, close = cast("Any", optimize).minimize, {"xatol": 1e-4, "fatol": 1e-9}
    together = minimize(loss, np.array([1.0, 0.5]), method="Nelder-Mead", options=close).x
    if shared:
        return unpack(together)
    return unpack(minimize(loss, np.tile(together, steps), method="L-BFGS-B", options={"eps": 1e-6}).x)


# ------------------------------------------------------------------------------------------------------------ shifts


@dataclass(frozen=True)
class Shift:
    """Problems unlike the training's: one quantity varied over a range."""

    name: str
    title: str
    at: list[float]

    def moved(self, base: LinearTasks, value: float) -> LinearTasks:
        if self.name == "input_scale":
            return replace(base, input_range=base.input_range * value)
        if self.name == "weight_scale":
            return replace(base, weight_scale=base.weight_scale * value)
        return replace(base, corrupted=int(value))


def shifts_of(base: LinearTasks) -> list[Shift]:
    """Their ranges: inputs times .5 to 2, weights times .5 to 5, and 0, 2, … of the labels replaced by N(0, 1)."""
    return [
        Shift("input_scale", "scale of the inputs", [round(v, 2) for v in np.arange(0.5, 2.001, 0.03)]),
        Shift("weight_scale", "scale of the true weights", [round(v, 1) for v in np.arange(0.5, 5.001, 0.1)]),
        Shift("corrupted", "labels replaced by noise", [float(v) for v in range(0, base.n_demos, 2)]),
    ]


def first_guess(base: LinearTasks) -> float:
    """The best rate of one step without noise, in closed form: the start of the search."""
    return uniform_optimum(base.n_x, base.n_demos, base.input_range / 2).rate


def paired(one: Float[np.ndarray, " task"], other: Float[np.ndarray, " task"]) -> dict[str, Any]:
    """Mean of `one`, its ratio to the mean of `other`, and their difference with its 95 % interval.

    Each task is a draw of its own, so the interval is Student's over draws.
    """
    gap = one - other
    return {
        "loss": float(one.mean()),
        "ratio": float(one.mean() / other.mean()),
        "difference": float(gap.mean()),
        "difference_ci": student_ci(gap.tolist()),
    }
