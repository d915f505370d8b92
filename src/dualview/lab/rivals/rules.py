"""The rules a trained model may have found, each as the linear model ŝ it finds in a context: ŷ = ŝᵀ x_q.

With S = (1/N) Σ x_i x_iᵀ and c = (1/N) Σ y_i x_i, every rule starts from 0:

    OLS                     S⁻¹ c
    ridge                   (S + λI)⁻¹ c
    gradient descent        s ← s + η_t (c − S s)
    preconditioned GD       s ← s + A_t (c − S s)                       Ahn et al. 2023, arXiv 2306.00297
    GD++                    as GD, then x ← (I − γ_t S) x               von Oswald et al. 2023, arXiv 2212.07677
    preconditioned GD++     GD++ on the inputs A x                      Ahn et al. 2023, theorem 4
    Newton                  M ← 2M − M S_λ M, s = M c,  S_λ = S + λI    Fu et al. 2023, arXiv 2310.17086
                            M_0 = (a I + b S_λ / ‖S_λ‖) / ‖S_λ‖; theirs has a = 0

Σ is diagonal and every coordinate's sign is a symmetry of the problems, so A_t is taken diagonal. The free parameters
are a rule's θ, one real vector; the rates are a step's own, as a model's layers have their own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.lab.rivals.problems import Moments
from dualview.lab.rivals.small_matrices import applied, eye, product

Theta = Float[Tensor, " free"]
Slope = Float[Tensor, " n_x *batch"]


def ols(problems: Moments, _theta: Theta) -> Slope:
    found = problems.spectrum
    return found.slope(1 / found.values)


def ridge(problems: Moments, theta: Theta) -> Slope:
    """θ = log λ."""
    found = problems.spectrum
    return found.slope(1 / (found.values + theta[0].exp()))


def gradient_descent(problems: Moments, theta: Theta) -> Slope:
    """θ: a rate for each step."""
    found = problems.spectrum
    factor = torch.zeros_like(found.values)
    for rate in theta:
        factor = factor + rate * (1 - found.values * factor)
    return found.slope(factor)


def preconditioned(problems: Moments, theta: Theta) -> Slope:
    """θ: the diagonal of A_t for each step, one after another."""
    inputs, labels = problems.inputs, problems.labels
    slope = torch.zeros_like(labels)
    for diagonal in theta.reshape(-1, labels.shape[0]):
        slope = slope + diagonal.reshape(-1, *(1,) * (labels.ndim - 1)) * (labels - applied(inputs, slope))
    return slope


def plus_plus(problems: Moments, theta: Theta) -> Slope:
    """θ: k rates, then k − 1 values of γ (the last step's has no effect)."""
    found, steps = problems.spectrum, (len(theta) + 1) // 2
    return found.slope(plus_plus_factor(found.values, theta[:steps], theta[steps:]))


def plus_plus_factor(
    values: Float[Tensor, ...], rates: Sequence[float] | Tensor, gammas: Sequence[float] | Tensor
) -> Float[Tensor, ...]:
    """GD++ by eigenvalues, ŝ = f(S) c: from f = 0 and l = m = 1, in each step (the last γ has no effect)

    f ← f + η m l,    l ← (1 − ηλ) (1 − γλ) l,    m ← (1 − γλ) m,    λ ← (1 − γλ)² λ.
    """
    labels = moved = torch.ones_like(values)
    factor = torch.zeros_like(values)
    for step, rate in enumerate(rates):
        factor = factor + rate * moved * labels
        if step < len(rates) - 1:
            shrunk = 1 - gammas[step] * values
            labels, moved = (1 - rate * values) * shrunk * labels, shrunk * moved
            values = shrunk.square() * values
    return factor


def preconditioned_plus_plus(problems: Moments, theta: Theta) -> Slope:
    """θ: the logarithms of A's diagonal, then as for GD++."""
    n_x, batch = problems.labels.shape[0], problems.labels.ndim - 1
    diagonal = theta[:n_x].exp().reshape(-1, *(1,) * batch)
    rest = theta[n_x:]
    steps = (len(rest) + 1) // 2
    inputs = diagonal[:, None] * problems.inputs * diagonal[None]
    labels, one = diagonal * problems.labels, eye(n_x, inputs, batch)
    moved, slope = one, torch.zeros_like(labels)
    for step in range(steps):
        # the inputs are now moved · A x, so what they find reads the query through the same map
        slope = slope + rest[step] * applied(moved.transpose(0, 1), labels)
        if step < steps - 1:
            shrink = one - rest[steps + step] * inputs
            labels = applied(shrink, labels - rest[step] * applied(inputs, labels))
            moved, inputs = product(shrink, moved), product(product(shrink, inputs), shrink)
    return diagonal * slope


def newton(problems: Moments, theta: Theta, steps: int) -> Slope:
    """θ = (a, b, log λ); by eigenvalues, where M ← 2M − M S_λ M is m ← m (2 − λ m)."""
    found = problems.spectrum
    values = found.values + theta[2].exp()
    largest = values.amax(0)
    inverse = (theta[0] + theta[1] * values / largest) / largest
    for _ in range(steps):
        inverse = inverse * (2 - values * inverse)
    return found.slope(inverse)


@dataclass(frozen=True)
class Rule:
    """A rule with its free parameters fixed."""

    name: str
    steps: int | None
    """None: it has none."""
    theta: list[float]

    def __call__(self, problems: Moments) -> Slope:
        return slope_of(self.name, self.steps)(problems, torch.tensor(self.theta, dtype=torch.float64))


_BY_NAME: dict[str, Callable[[Moments, Theta], Slope]] = {
    "gd": gradient_descent,
    "gd_plus_plus": plus_plus,
    "preconditioned": preconditioned,
    "preconditioned_plus_plus": preconditioned_plus_plus,
    "ridge": ridge,
    "ols": ols,
}


def slope_of(name: str, steps: int | None) -> Callable[[Moments, Theta], Slope]:
    """A rule as a function of problems and θ."""
    if name.startswith("newton"):
        return lambda problems, theta: newton(problems, theta, steps or 0)
    return _BY_NAME[name]
