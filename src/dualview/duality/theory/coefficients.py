"""Why a weight trained by SGD is a weighted sum of its gradients, and with which weights.

Every variant of SGD that `torch.optim.SGD` offers is linear in the pair (weights, momentum buffer), so after T steps

    W_T = a W_0 + Σ_s c_s G_s,      G_s the gradient of step s, a and c_s plain numbers.

For a constant rate η, momentum μ and decoupled decay λ the numbers are (dualities T1b)

    a = (1 − ηλ)^T,      c_s = −η Σ_{t=s}^{T−1} (1 − ηλ)^{T−1−t} μ^{t−s}.

`unroll` finds them for any rates and any mixture of momentum, dampening, Nesterov, coupled decay (torch's
`weight_decay`, which passes through the momentum buffer), decoupled decay and clipping, by running the linear recursion
backwards:

    g = clip·G + κ w                       κ: coupled decay
    m ← μ m + (1 − τ) g                    τ: dampening; m ← g on the buffer's first step
    u = g + μ m (Nesterov) or m            u = g when μ = 0
    w ← (1 − ηλ) w − η u                   λ: decoupled decay

Adam is not of this form: it divides each element of G_s by its own running scale, so its update is no scalar times G_s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dualview.io.errors import UserError


@dataclass(frozen=True)
class StepRule:
    """The hyper-parameters of one SGD step on one parameter."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    coupled_decay: float = 0.0
    """torch.optim.SGD's `weight_decay`: added to the gradient, so it enters the momentum buffer."""
    decoupled_decay: float = 0.0
    """Weights are multiplied by 1 − lr·decay before the step (as in AdamW and SGDW)."""
    clip: float = 1.0
    """The scalar that multiplied the gradient before the step; −1 for `maximize`."""

    def __post_init__(self) -> None:
        if self.coupled_decay and self.decoupled_decay:
            raise UserError("A step has both coupled and decoupled weight decay: set one of them to 0.")


@dataclass(frozen=True)
class Coefficients:
    """W_T = initial · W_0 + Σ_s steps[s] · G_s."""

    initial: float
    steps: tuple[float, ...]


def _linear_map(rule: StepRule, first: bool) -> tuple[np.ndarray, np.ndarray]:
    """A and b of one step as a linear map, (w, m) ← A (w, m) + b G."""
    keep = 1 - rule.lr * rule.decoupled_decay
    if rule.momentum == 0:  # torch neither reads nor writes the buffer
        return np.diag([keep - rule.lr * rule.coupled_decay, 1.0]), np.array([-rule.lr * rule.clip, 0.0])
    # torch fills an empty buffer with the gradient itself, without dampening.
    fresh = 1.0 if first else 1 - rule.dampening
    mu = 0.0 if first else rule.momentum
    # u = from_g · g + from_m · m, with m the buffer before the step
    from_g = 1 + rule.momentum * fresh if rule.nesterov else fresh
    from_m = rule.momentum * mu if rule.nesterov else mu
    # what g and the buffer before the step add to (w, m), g itself holding κ w
    of_g, of_m = np.array([-rule.lr * from_g, fresh]), np.array([-rule.lr * from_m, mu])
    return np.stack([of_g * rule.coupled_decay + [keep, 0.0], of_m], axis=1), of_g * rule.clip


def unroll(rules: Sequence[StepRule | None]) -> Coefficients:
    """The numbers a and c_s of W_T = a W_0 + Σ_s c_s G_s, for any sequence of SGD steps, in O(T).

    `None` is a step at which the parameter had no gradient (torch then leaves it, its decay and its buffer alone).

    >>> unroll([StepRule(lr=0.1), StepRule(lr=0.2)])
    Coefficients(initial=1.0, steps=(-0.1, -0.2))
    """
    maps: list[tuple[np.ndarray, np.ndarray]] = []
    buffered = False
    for rule in rules:
        maps.append((np.eye(2), np.zeros(2)) if rule is None else _linear_map(rule, first=not buffered))
        buffered = buffered or (rule is not None and rule.momentum != 0)
    row = np.array([1.0, 0.0])  # (1, 0) A_{T-1} … A_{s+1}
    steps: list[float] = []
    for matrix, gradient in reversed(maps):
        steps.append(float(row @ gradient))
        row = row @ matrix
    return Coefficients(initial=float(row[0]), steps=tuple(reversed(steps)))


def constant_rate(steps: int, lr: float, momentum: float = 0.0, decoupled_decay: float = 0.0) -> Coefficients:
    """T1b as printed: a = (1−ηλ)^T, c_s = −η Σ_{t=s}^{T−1} (1−ηλ)^{T−1−t} μ^{t−s}."""
    keep = 1 - lr * decoupled_decay
    return Coefficients(
        initial=keep**steps,
        steps=tuple(
            -lr * sum(keep ** (steps - 1 - t) * momentum ** (t - s) for t in range(s, steps)) for s in range(steps)
        ),
    )
