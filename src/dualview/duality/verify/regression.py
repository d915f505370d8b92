"""Identities of regression in context and of recurrent and kernel learners: T3, T7 to T11."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.learners import (
    Kernel,
    delta_rule,
    exponential_kernel,
    functional_descent,
    gaussian_kernel,
    kernel_attention,
    linear_kernel,
    mesa,
    mesa_recursion,
)
from dualview.duality.theory.linalg import norm
from dualview.duality.theory.regression import (
    gaussian_optimum,
    gd_layer,
    gd_plus_plus,
    gd_plus_plus_layer,
    gd_step,
    lsa_optimum,
    regression_tokens,
    run_layers,
    squared_loss,
    uniform_optimum,
)
from dualview.duality.theory.toy_attention import relative_error
from dualview.duality.verify.check import Draws, Identity

VON_OSWALD = "von Oswald et al. 2023"


@dataclass(frozen=True)
class Task:
    """A random regression with a starting weight and queries."""

    x: Float[Tensor, "n_x demo"]
    y: Float[Tensor, "n_y demo"]
    x_query: Float[Tensor, "n_x query"]
    weight0: Float[Tensor, "n_y n_x"]
    rate: float

    @property
    def n_demos(self) -> int:
        """N."""
        return self.x.shape[1]


def regression_task(draws: Draws) -> Task:
    """Any data at all: targets need not be linear in the inputs."""
    n_x, n_y, n = draws.size(), draws.size(1, 4), draws.size(2, 12)
    return Task(
        x=draws.normal(n_x, n),
        y=draws.normal(n_y, n),
        x_query=draws.normal(n_x, 3),
        weight0=draws.normal(n_y, n_x),
        rate=draws.number(0.05, 0.5),
    )


def autograd_step(task: Task, weight: Float[Tensor, "n_y n_x"]) -> Float[Tensor, "n_y n_x"]:
    """W − η ∇L(W), the gradient by autograd."""
    leaf = weight.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(squared_loss(leaf, task.x, task.y), leaf)
    return weight - task.rate * gradient


def _query(draws: Draws) -> float:
    task = regression_task(draws)
    tokens = regression_tokens(task.x, task.y, task.x_query, task.weight0)
    after = run_layers(tokens, [gd_layer(task.weight0, task.rate, task.n_demos)])
    return relative_error(after.prediction, autograd_step(task, task.weight0) @ task.x_query)


def _context(draws: Draws) -> float:
    task = regression_task(draws)
    tokens = regression_tokens(task.x, task.y, task.x_query, task.weight0)
    after = run_layers(tokens, [gd_layer(task.weight0, task.rate, task.n_demos)])
    moved = task.y - (autograd_step(task, task.weight0) - task.weight0) @ task.x
    return relative_error(after.context, torch.cat([task.x, moved]))


def _many_layers(draws: Draws) -> float:
    task, depth = regression_task(draws), draws.size(2, 6)
    tokens = regression_tokens(task.x, task.y, task.x_query, task.weight0)
    after = run_layers(tokens, [gd_layer(task.weight0, task.rate, task.n_demos)] * depth)
    weight = task.weight0
    for _ in range(depth):
        weight = autograd_step(task, weight)
    return relative_error(after.prediction, weight @ task.x_query)


def _gd_plus_plus(draws: Draws) -> float:
    task, depth = regression_task(draws), draws.size(2, 5)
    gamma = draws.number(0.001, 0.02)
    n_x, n_y = task.x.shape[0], task.y.shape[0]
    layer = gd_plus_plus_layer(n_x, n_y, task.rate, gamma, task.n_demos, task.x)
    found = run_layers(regression_tokens(task.x, task.y, task.x_query), [layer] * depth).prediction
    return relative_error(found, gd_plus_plus(task.x, task.y, task.x_query, task.rate, gamma, depth))


def one_step_risk(inputs: Float[Tensor, "task demo d"], rate: float, draws: Draws) -> float:
    """Monte Carlo risk of one gradient step from 0, as a fraction: mean ‖(I − ηS)w‖² / mean ‖w‖² (x_q isotropic)."""
    n_tasks, n, d = inputs.shape
    truth = draws.normal(n_tasks, d)
    labels = torch.einsum("tnd,td->tn", inputs, truth)
    estimate = rate / n * torch.einsum("tn,tnd->td", labels, inputs)
    return float((estimate - truth).square().sum() / truth.square().sum())


def _uniform_known_answer(draws: Draws) -> float:
    best = uniform_optimum(10, 10)
    found = one_step_risk(draws.uniform(20_000, 10, 10) - 0.5, best.rate, draws)
    printed = max(abs(best.rate - 6.06) / 6.06, abs(best.loss - 0.2062) / 0.2062)
    return max(abs(found - best.risk) / best.risk, printed)


def _gaussian_known_answer(draws: Draws) -> float:
    best = gaussian_optimum(10, 10)
    found = one_step_risk(draws.normal(20_000, 10, 10), best.rate, draws)
    return max(abs(found - 11 / 21) / (11 / 21), abs(best.risk - 11 / 21))


def _lsa_optimum(draws: Draws) -> float:
    d, n, tasks = draws.size(2, 4), draws.size(4, 10), 40_000
    # eigenvalues between ½ and 2 in a random basis: a wider spread would only need more draws
    root = torch.diag(0.7 + 0.7 * draws.uniform(d)) @ torch.matrix_exp(_skew(draws.normal(d, d)))
    covariance = root.T @ root
    x = draws.normal(tasks, n, d) @ root
    sample = x.mT @ x / n
    mean, square = sample.mean(dim=0), (sample @ sample).mean(dim=0)
    best = lsa_optimum(covariance, n)
    # the loss ½ tr Σ(AS − I)(AS − I)ᵀ is least where A E[S²] = E[S]
    return norm(best.matrix @ square - mean) / norm(mean)


def _skew(a: Tensor) -> Tensor:
    return a - a.T


def _delta_rule(draws: Draws) -> float:
    d_k, d_v, n = draws.size(), draws.size(), draws.size(2, 12)
    keys, values, rates, decays = draws.matrix(n, d_k).T, draws.normal(d_v, n), draws.uniform(n), draws.uniform(n)
    state = draws.normal(d_v, d_k)
    found = delta_rule(keys, values, rates, decays, state)
    for t in range(n):
        leaf = (decays[t] * state).requires_grad_()
        (gradient,) = torch.autograd.grad(0.5 * (leaf @ keys[:, t] - values[:, t]).square().sum(), leaf)
        state = leaf.detach() - rates[t] * gradient
    return relative_error(found, state)


@dataclass(frozen=True)
class Memory:
    """Keys and values to be stored by ridge regression of strength λ."""

    keys: Float[Tensor, "d_k token"]
    values: Float[Tensor, "d_v token"]
    strength: float


def memory(draws: Draws) -> Memory:
    """λ stays away from 1, where λ and 1/λ cannot be told apart."""
    d_k, d_v, n = draws.size(), draws.size(), draws.size(2, 12)
    return Memory(draws.normal(d_k, n), draws.normal(d_v, n), draws.number(2.0, 5.0))


def ridge_gradient(problem: Memory, weight: Float[Tensor, "d_v d_k"]) -> float:
    """‖∇‖ of ½‖S K − V‖² + ‖S‖²/(2λ) at `weight`, relative to ‖V Kᵀ‖: zero at the ridge solution."""
    gradient = (weight @ problem.keys - problem.values) @ problem.keys.T + weight / problem.strength
    return norm(gradient) / norm(problem.values @ problem.keys.T)


def _mesa(draws: Draws) -> float:
    problem = memory(draws)
    closed = mesa(problem.keys, problem.values, problem.strength)
    recursive = mesa_recursion(problem.keys, problem.values, problem.strength).weight
    return max(ridge_gradient(problem, closed), relative_error(recursive, closed))


def _kernel_descent(draws: Draws) -> float:
    task, depth = regression_task(draws), draws.size(1, 5)
    kernels: tuple[Kernel, ...] = (linear_kernel, exponential_kernel, gaussian_kernel)
    kernel = kernels[draws.size(0, 2)]
    x, x_query = 0.5 * task.x, 0.5 * task.x_query
    rate = task.rate / norm(kernel(x, x))  # any rate keeps the identity; a stable one keeps the numbers small
    found = kernel_attention(kernel, x, task.y, x_query, rate, depth)
    return relative_error(found, functional_descent(kernel, x, task.y, x_query, rate, depth))


def _gd_formula(draws: Draws) -> float:
    task = regression_task(draws)
    return relative_error(
        gd_step(task.weight0, task.x, task.y, task.rate) - task.weight0,
        autograd_step(task, task.weight0) - task.weight0,
    )


IDENTITIES = (
    Identity("ΔW = −(η/N) Σ_i (W₀x_i − y_i) x_iᵀ = −η ∇L(W₀)", VON_OSWALD, _gd_formula),
    Identity("−LSA(x_q, −W₀x_q)_y = (W₀ + ΔW) x_q", VON_OSWALD + ", Prop. 1", _query),
    Identity("LSA(x_j, y_j) = (x_j, y_j − ΔW x_j)", VON_OSWALD + ", Prop. 1", _context),
    Identity("k layers = k gradient steps, from any W₀", VON_OSWALD, _many_layers),
    Identity("GD++ layers = GD on inputs x ← (I − γXXᵀ)x", VON_OSWALD, _gd_plus_plus),
    Identity(
        "x ~ U(−½,½), d = N = 10: best single step 6.06, loss .2062",
        VON_OSWALD + ", derived",
        _uniform_known_answer,
        0.03,
    ),
    Identity("x ~ N(0,I), d = N = 10: risk (d+1)/(N+d+1) = 11/21", "Ahn et al. 2023", _gaussian_known_answer, 0.03),
    Identity(
        "best one-layer LSA: A = Γ⁻¹, Γ = ((n+1)/n)Σ + (tr Σ/n)I, where A E[S²] = E[S]",
        "Ahn, Zhang et al. 2023",
        _lsa_optimum,
        0.05,
    ),
    Identity(
        "kernel attention layers y ← y − r Σ_i K(x_i,·) y_i = functional GD, f(x_q) = −y_q",
        "Cheng et al. 2024",
        _kernel_descent,
    ),
    Identity("(gated) DeltaNet αS(I − βkkᵀ) + βvkᵀ = SGD on ½‖Sk − v‖²", "Schlag 2021, Yang 2024", _delta_rule),
    Identity(
        "mesa layer VKᵀ(KKᵀ + I/λ)⁻¹ = ridge solution = Sherman–Morrison recursion",
        "von Oswald et al. 2023b",
        _mesa,
        1e-11,
    ),
)
