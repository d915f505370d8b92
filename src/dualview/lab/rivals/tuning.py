"""Each rule at its best: the free parameters with the lowest loss on problems that are not reported.

A search by L-BFGS with exact gradients, from several starts: the rule's best with one step fewer and a small step
more, and, where one rule contains another, the other's best. Preconditioned GD with one step needs no search: its best
A is known in closed form (Ahn et al. 2023; Mahankali et al. 2023, arXiv 2307.03576).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]

from dualview.duality.theory.regression import lsa_optimum
from dualview.lab.rivals.problems import Moments, Source
from dualview.lab.rivals.rules import Rule, slope_of

Start = Sequence[float]


@dataclass(frozen=True)
class Tuned:
    """A rule and the loss ½ E (ŷ − y)² it reaches on the problems it was tuned on."""

    rule: Rule
    loss: float


def tuned_rules(source: Source, problems: Moments, depths: Sequence[int]) -> dict[str, list[Tuned]]:
    """Every rule with as many steps as each of these depths, in rising order; a rule without steps once.

    With one step γ has no effect: GD++ is then gradient descent, and preconditioned GD++ preconditioned GD.
    """
    noise = math.log(max(source.noise, 0.01) ** 2 / source.n_demos)
    ridge = best("ridge", None, [[noise]], problems)
    closed = lsa_optimum(torch.diag(source.scale), source.n_demos, noise=source.noise).matrix.diagonal()
    rate = float((closed * source.scale).sum() / source.scale.sum())
    found: dict[str, list[Tuned]] = {"ols": [at(Rule("ols", None, []), problems)], "ridge": [ridge]}
    found |= {name: [] for name in ("gd", "preconditioned", "gd_plus_plus", "preconditioned_plus_plus", "newton")}
    for steps in sorted(depths):
        spread = _spread(steps)
        starts = [[rate * f for f in spread], *_longer(found["gd"], steps, [[0.3 * rate]])]
        found["gd"].append(best("gd", steps, starts, problems))
        start = found["newton"][-1].rule.theta if found["newton"] else [1.0, 0.0, ridge.rule.theta[0]]
        found["newton"].append(best("newton", steps, [start], problems))
        if steps == 1:
            found["preconditioned"].append(at(Rule("preconditioned", 1, closed.tolist()), problems))
            continue
        starts = [[f * a for f in spread for a in closed.tolist()]]
        starts += _longer(found["preconditioned"], steps, [(0.3 * closed).tolist()])
        found["preconditioned"].append(best("preconditioned", steps, starts, problems))
        starts = [[rate] * steps + [0.1 * rate] * (steps - 1)]
        starts += _longer(found["gd_plus_plus"], steps, [[rate], [0.05 * rate]])
        found["gd_plus_plus"].append(best("gd_plus_plus", steps, starts, problems))
        white = (-0.5 * source.scale.log()).tolist()
        starts = [[0.0] * source.n_x + found["gd_plus_plus"][-1].rule.theta]
        longer = _longer(found["preconditioned_plus_plus"], steps, [[0.8], [0.05]], source.n_x)
        starts += longer or [[*white, *([0.8] * steps), *([0.1] * (steps - 1))]]
        found["preconditioned_plus_plus"].append(best("preconditioned_plus_plus", steps, starts, problems))
    return found


def best(name: str, steps: int | None, starts: Sequence[Start], problems: Moments) -> Tuned:
    """The lowest loss that any of the starts leads to."""
    found = [_descended(name, steps, start, problems) for start in starts]
    return min(found, key=lambda each: each.loss)


def _descended(name: str, steps: int | None, start: Start, problems: Moments) -> Tuned:
    predict = slope_of(name, steps)

    def loss(point: Float[np.ndarray, " free"]) -> tuple[float, Float[np.ndarray, " free"]]:
        theta = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        value = problems.risk(predict(problems, theta)).mean()
        if not math.isfinite(value.item()):
            return 1e30, np.zeros_like(point)  # the line search then takes a shorter step
        (gradient,) = torch.autograd.grad(value, theta)
        return value.item(), gradient.numpy()

    how: dict[str, Any] = {"method": "L-BFGS-B", "jac": True, "options": {"maxiter": 100, "ftol": 1e-10}}
    found = cast("Any", optimize).minimize(loss, np.array(start), **how)
    return Tuned(Rule(name, steps, [float(value) for value in found.x]), float(found.fun))


def at(rule: Rule, problems: Moments) -> Tuned:
    """A rule as it is."""
    return Tuned(rule, float(problems.risk(rule(problems)).mean()))


def _spread(steps: int) -> list[float]:
    """Factors around 1: equal rates are a saddle of the loss, which does not depend on their order."""
    return [1.0] if steps == 1 else [0.5 + 1.5 * step / (steps - 1) for step in range(steps)]


def _longer(before: Sequence[Tuned], steps: int, more: Sequence[Start], fixed: int = 0) -> list[list[float]]:
    """The best with fewer steps, and further small ones: θ's fixed part, then every kind of step's parameters.

    `more` has one more step's values of each kind; a second kind (γ) has one fewer of them than steps.
    """
    if not before:
        return []
    theta, had = before[-1].rule.theta, before[-1].rule.steps or 0
    end = fixed + had * len(more[0])
    first = [*theta[:end], *(list(more[0]) * (steps - had))]
    second = [*theta[end:], *(list(more[1]) * (steps - had))] if len(more) > 1 else []
    return [first + second]
