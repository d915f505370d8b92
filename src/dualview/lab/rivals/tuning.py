"""Each rule at its best: the free parameters with the lowest loss on problems that are not reported.

A search by L-BFGS with exact gradients: short ones from many starts on the first few problems, then a long one from
the best of them on all. The losses of GD++ have several minima (with two steps and κ = 1 the poorer of two has a loss
1.4 times the other's), so the starts are: the rule's best with fewer steps and further ones, a rule's best that it
contains, and random ones. All problems count in the end, because a polynomial of high degree that is tuned on few
explodes on contexts that are a little longer. Preconditioned GD with one step needs no search: its best A is known in
closed form (Ahn et al. 2023; Mahankali et al. 2023, arXiv 2307.03576).
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
from dualview.metrics.statistics import generator

Start = Sequence[float]
FEW, SHORT, LONG = 500, 40, 80
"""Problems of the short searches, and iterations of short and long ones."""
MATRICES = 5000
"""Problems at most for preconditioned GD++, the one rule that multiplies matrices."""
RANDOM = 12
"""Random starts of GD++."""


@dataclass(frozen=True)
class Tuned:
    """A rule and the loss ½ E (ŷ − y)² it reaches on the problems it was tuned on."""

    rule: Rule
    loss: float


def tuned_rules(source: Source, problems: Moments, steps: Sequence[int]) -> dict[str, list[Tuned]]:
    """Every rule with each of these numbers of steps, in rising order; a rule without steps once.

    With one step γ has no effect: GD++ is then gradient descent, and preconditioned GD++ preconditioned GD.
    """
    noise = math.log(max(source.noise, 0.01) ** 2 / source.n_demos)
    ridge = best("ridge", None, [[noise]], problems)
    found: dict[str, list[Tuned]] = {"ols": [at(Rule("ols", None, []), problems)], "ridge": [ridge]}
    found |= {name: [] for name in ("gd", "preconditioned", "gd_plus_plus", "preconditioned_plus_plus", "newton")}
    for count in sorted(steps):
        found["gd"].append(_descent(source, problems, count, found["gd"]))
        found["newton"].append(_newton(problems, count, found["newton"], ridge))
        found["preconditioned"].append(_preconditioned(source, problems, count, found["preconditioned"], found["gd"]))
        if count > 1:
            found["gd_plus_plus"].append(_plus_plus(source, problems, count, found["gd_plus_plus"]))
            both, plain = found["preconditioned_plus_plus"], found["gd_plus_plus"]
            both.append(_preconditioned_plus_plus(source, problems, count, both, plain))
    return found


def best(name: str, steps: int | None, starts: Sequence[Start], problems: Moments, *, candidates: int = 2) -> Tuned:
    """The lowest loss that the starts lead to: a short search from each, a long one from the best few."""
    few = problems.first(FEW)
    short = sorted((_descended(name, steps, start, few, SHORT) for start in starts), key=lambda each: each.loss)
    long = [_descended(name, steps, each.rule.theta, problems, LONG) for each in short[:candidates]]
    return min(long, key=lambda each: each.loss)


def at(rule: Rule, problems: Moments) -> Tuned:
    """A rule as it is."""
    return Tuned(rule, float(problems.risk(rule(problems)).mean()))


def _descended(name: str, steps: int | None, start: Start, problems: Moments, most: int) -> Tuned:
    predict = slope_of(name, steps)

    def loss(point: Float[np.ndarray, " free"]) -> tuple[float, Float[np.ndarray, " free"]]:
        theta = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        value = problems.risk(predict(problems, theta)).mean()
        if not math.isfinite(value.item()):
            return 1e30, np.zeros_like(point)  # the line search then takes a shorter step
        (gradient,) = torch.autograd.grad(value, theta)
        return value.item(), gradient.numpy()

    how: dict[str, Any] = {"method": "L-BFGS-B", "jac": True, "options": {"maxiter": most, "ftol": 1e-10}}
    found = cast("Any", optimize).minimize(loss, np.array(start), **how)
    return Tuned(Rule(name, steps, [float(value) for value in found.x]), float(found.fun))


# ------------------------------------------------------------------------------------------------------- rule by rule


def _closed_form(source: Source) -> Float[np.ndarray, " n_x"]:
    """The best A of one step, a diagonal."""
    found = lsa_optimum(torch.diag(source.scale), source.n_demos, noise=source.noise)
    return found.matrix.diagonal().numpy()


def _rate(source: Source) -> float:
    """A good rate of one step."""
    return float((source.scale.numpy() * _closed_form(source)).sum() / source.scale.sum())


def _spread(steps: int) -> Float[np.ndarray, " step"]:
    """Factors around 1: equal rates are a saddle of the loss, which does not depend on their order."""
    return np.linspace(0.5, 2.0, steps) if steps > 1 else np.ones(1)


def _descent(source: Source, problems: Moments, steps: int, before: Sequence[Tuned]) -> Tuned:
    starts = [(_rate(source) * _spread(steps)).tolist(), *_longer(before, steps, [0.3 * _rate(source)])]
    return best("gd", steps, starts, problems)


def _newton(problems: Moments, steps: int, before: Sequence[Tuned], ridge: Tuned) -> Tuned:
    starts = [[a, b, ridge.rule.theta[0]] for a, b in ((1.0, 0.0), (0.0, 1.0), (2.0, -1.0), (5.0, -4.5))]
    return best("newton", steps, [*starts, *(each.rule.theta for each in before[-1:])], problems)


def _preconditioned(
    source: Source, problems: Moments, steps: int, before: Sequence[Tuned], descent: Sequence[Tuned]
) -> Tuned:
    closed = _closed_form(source)
    if steps == 1:
        return at(Rule("preconditioned", 1, closed.tolist()), problems)
    starts = [np.outer(_spread(steps), closed).flatten().tolist(), *_longer(before, steps, (0.3 * closed).tolist())]
    starts.append(np.repeat(descent[-1].rule.theta, source.n_x).tolist())
    return best("preconditioned", steps, starts, problems)


def _plus_plus(source: Source, problems: Moments, steps: int, before: Sequence[Tuned]) -> Tuned:
    rate, draw = _rate(source), generator(0, f"GD++/{source.condition:g}/{steps}")
    starts = [[rate] * steps + [0.1 * rate] * (steps - 1)]
    starts += [longer for more in (0.3, 1.0, 4.0) for longer in _longer_plus(before, steps, more * rate, 0.3 * rate)]
    for _ in range(RANDOM):
        rates = rate * np.exp(draw.uniform(-1.5, 2.0, steps))
        starts.append([*rates.tolist(), *(rate * draw.uniform(0.05, 0.6, steps - 1)).tolist()])
    return best("gd_plus_plus", steps, starts, problems)


def _preconditioned_plus_plus(
    source: Source, problems: Moments, steps: int, before: Sequence[Tuned], plain: Sequence[Tuned]
) -> Tuned:
    """Starts: no preconditioner, and the one that whitens, with GD++ at its best on whitened inputs."""
    n_x = source.n_x
    white = -0.5 * source.scale.log()
    few = problems.first(FEW).with_inputs(white.exp())
    inside = _plus_plus(Source(n_x, source.n_demos, 1.0, source.noise), few, steps, [])
    starts = [[0.0] * n_x + plain[-1].rule.theta, [*white.tolist(), *inside.rule.theta]]
    starts += _longer_plus(before, steps, 1.0, 0.3, n_x)
    found = best("preconditioned_plus_plus", steps, starts, problems.first(MATRICES), candidates=1)
    # on all problems it must not lose to the rule it contains, which was tuned on all of them
    contained = Rule("preconditioned_plus_plus", steps, starts[0])
    return min(at(found.rule, problems), at(contained, problems), key=lambda each: each.loss)


def _longer(before: Sequence[Tuned], steps: int, more: Start) -> list[list[float]]:
    """The best with fewer steps, and further ones."""
    return [[*each.rule.theta, *(list(more) * (steps - (each.rule.steps or 0)))] for each in before[-1:]]


def _longer_plus(before: Sequence[Tuned], steps: int, rate: float, gamma: float, fixed: int = 0) -> list[list[float]]:
    """The same where θ has a fixed part, then the rates, then the values of γ."""
    found: list[list[float]] = []
    for each in before[-1:]:
        theta, had = each.rule.theta, each.rule.steps or 0
        end, more = fixed + had, steps - had
        found.append([*theta[:end], *([rate] * more), *theta[end:], *([gamma] * more)])
    return found
