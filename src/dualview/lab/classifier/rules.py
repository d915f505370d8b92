"""What a classifier could do with its demonstrations, and how close a model's answers are to it.

Each rule gives the query a number for every class c, from the demonstrations' features u_i and classes y_i:

    one step       Σ_i e(y_i)_c u_iᵀu_q, e(y) = onehot(y) − 1/k     one gradient step of a linear classifier
    balanced step  Σ_i e(y_i)_c (u_iᵀu_q − b)                       the same less b for every demonstration of the class
    class means    mean of u_iᵀu_q over the demonstrations of c     each class's step divided by its number of them
    ridge          e_cᵀ (K + λ)⁻¹ k_q, K_ij = u_iᵀu_j               least squares, the limit of many steps at λ = 0

A bias in the linear classifier would add b > 0 to every uᵀu; to subtract it is no gradient step in any features, since
uᵀu − b is then no kernel. Closeness is the cosine of the numbers of all queries and classes, centred for each query:
what a softmax over labels cannot see does not count. b and λ are those that are closest on other problems than those
reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.lab.classifier.training import Problems

RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SHIFTS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
Answers = Float[Tensor, "problem class"]


def step(problems: Problems, classes: int, shift: float = 0.0) -> Answers:
    """One step; with a shift, the balanced one."""
    shown, similar = _demos(problems, classes)
    return centred(torch.einsum("pik,pi->pk", shown - 1 / classes, similar - shift))


def class_means(problems: Problems, classes: int, _: float = 0.0) -> Answers:
    """A class without a demonstration gets 0."""
    shown, similar = _demos(problems, classes)
    return centred(torch.einsum("pik,pi->pk", shown, similar) / shown.sum(1).clamp(min=1))


def ridge(problems: Problems, classes: int, penalty: float) -> Answers:
    shown, similar = _demos(problems, classes)
    u = problems.u[:, :-1].double()
    weights = torch.linalg.solve(u @ u.mT + penalty * torch.eye(u.shape[1], dtype=u.dtype), similar)
    return centred(torch.einsum("pik,pi->pk", shown - 1 / classes, weights))


def _demos(
    problems: Problems, classes: int
) -> tuple[Float[Tensor, "problem demo class"], Float[Tensor, "problem demo"]]:
    """The demonstrations' classes, and how similar they are to the last word, the query."""
    u = problems.u.double()
    return nn.functional.one_hot(problems.y[:, :-1], classes).double(), (u[:, :-1] @ u[:, -1:].mT)[..., 0]


def centred(answers: Answers) -> Answers:
    return answers.double() - answers.double().mean(-1, keepdim=True)


def closeness(answers: Answers, rule: Answers) -> float | None:
    """The cosine over all queries and classes; None where one of them is 0 everywhere."""
    size = float(answers.norm() * rule.norm())
    return float((answers * rule).sum()) / size if size > 0 else None


RULES: dict[str, tuple[Callable[[Problems, int, float], Answers], Sequence[float]]] = {
    "one step": (step, (0.0,)),
    "balanced step": (step, SHIFTS),
    "class means": (class_means, (0.0,)),
    "ridge": (ridge, RIDGES),
}
"""Each rule and the values of its parameter to choose from."""


def measure(answers: Answers, problems: Problems, classes: int, held_out: int) -> dict[str, Any]:
    """Closeness to every rule, its accuracy and its parameter, which the first `held_out` problems choose."""
    answers = centred(answers)
    first, rest = problems[:held_out], problems[held_out:]
    gold = rest.y[:, -1]

    def right(said: Answers) -> float:
        return float((said.argmax(-1) == gold).double().mean())

    found: dict[str, Any] = {"closeness": {}, "right": {"model": right(answers[held_out:])}, "parameter": {}}
    for name, (rule, values) in RULES.items():
        near = {at: closeness(answers[:held_out], rule(first, classes, at)) or 0.0 for at in values}
        best = max(near, key=lambda at: near[at])
        said = rule(rest, classes, best)
        found["closeness"][name] = closeness(answers[held_out:], said)
        found["right"][name] = right(said)
        found["parameter"][name] = best
    return found
