"""Identities of regression in context and of recurrent and kernel learners: T3, T7 to T11."""

from dataclasses import dataclass, replace

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
from dualview.duality.theory.linalg import norm, solve_right
from dualview.duality.theory.regression import (
    LinearSelfAttention,
    Regression,
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
from dualview.duality.theory.separate_tokens import (
    copying_layer,
    gd_layer_on_separate,
    merged,
    prediction,
    separate_tokens,
)
from dualview.duality.theory.toy_attention import relative_error, soft_attn
from dualview.duality.verify.check import REVIEW, VON_OSWALD, Draws, Sides, identity


@dataclass(frozen=True)
class RegressionTask:
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

    @property
    def tokens(self) -> Regression:
        """The regression in context, the query at −W₀x_q."""
        return regression_tokens(self.x, self.y, self.x_query, self.weight0)

    @property
    def layer(self) -> LinearSelfAttention:
        """Prop. 1's layer for W₀."""
        return gd_layer(self.weight0, self.rate, self.n_demos)

    def step(self, weight: Float[Tensor, "n_y n_x"]) -> Float[Tensor, "n_y n_x"]:
        """W − η ∇L(W), the gradient by autograd."""
        leaf = weight.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(squared_loss(leaf, self.x, self.y), leaf)
        return weight - self.rate * gradient

    @property
    def answer(self) -> Float[Tensor, "n_y query"]:
        """(W₀ + ΔW) x_q."""
        return self.step(self.weight0) @ self.x_query


def regression_task(draws: Draws) -> RegressionTask:
    """Any data at all: targets need not be linear in the inputs."""
    n_x, n_y, n = draws.size(), draws.size(1, 4), draws.size(2, 12)
    return RegressionTask(
        x=draws.normal(n_x, n),
        y=draws.normal(n_y, n),
        x_query=draws.normal(n_x, 3),
        weight0=draws.normal(n_y, n_x),
        rate=draws.number(0.05, 0.5),
    )


@identity("ΔW = −(η/N) Σ_i (W₀x_i − y_i) x_iᵀ = −η ∇L(W₀)", VON_OSWALD, given=regression_task)
def _gd_formula(task: RegressionTask) -> Sides:
    weight = task.weight0
    return gd_step(weight, task.x, task.y, task.rate) - weight, task.step(weight) - weight


@identity("−LSA(x_q, −W₀x_q)_y = (W₀ + ΔW) x_q", VON_OSWALD + ", Prop. 1", given=regression_task)
def _query(task: RegressionTask) -> Sides:
    return run_layers(task.tokens, [task.layer]).prediction, task.answer


@_query.misprint("query token (x_q, y_q) with its label", REVIEW, given=None)
def _labelled_query(draws: Draws) -> Sides:
    task = regression_task(draws)
    label = draws.normal(task.y.shape[0], task.x_query.shape[1])
    tokens = replace(task.tokens, query=torch.cat([task.x_query, label]))
    return run_layers(tokens, [task.layer]).prediction, task.answer


@_query.misprint("prediction = +y_q", REVIEW)
def _plus_readout(task: RegressionTask) -> Sides:
    return -run_layers(task.tokens, [task.layer]).prediction, task.answer


@_query.misprint("von Oswald's weights under a softmax", REVIEW)
def _softmax_layer(task: RegressionTask) -> Sides:
    layer, context, query = task.layer, task.tokens.context, task.tokens.query
    moved = query + layer.p @ soft_attn(layer.w_k @ context, layer.w_v @ context, layer.w_q @ query)
    return -moved[task.x.shape[0] :], task.answer


@_query.misprint("the query among keys and values (W₀ ≠ 0)", REVIEW)
def _query_as_key(task: RegressionTask) -> Sides:
    context, query = task.tokens.context, task.tokens.query
    moved = task.layer(query, torch.cat([context, query], dim=1))
    return -moved[task.x.shape[0] :], task.answer


@identity("LSA(x_j, y_j) = (x_j, y_j − ΔW x_j)", VON_OSWALD + ", Prop. 1", given=regression_task)
def _context(task: RegressionTask) -> Sides:
    after = run_layers(task.tokens, [task.layer])
    moved = task.y - (task.step(task.weight0) - task.weight0) @ task.x
    return after.context, torch.cat([task.x, moved])


@identity("k layers = k gradient steps, from any W₀", VON_OSWALD)
def _many_layers(draws: Draws) -> Sides:
    task, depth = regression_task(draws), draws.size(2, 6)
    after = run_layers(task.tokens, [task.layer] * depth)
    weight = task.weight0
    for _ in range(depth):
        weight = task.step(weight)
    return after.prediction, weight @ task.x_query


@identity("GD++ layers = GD on inputs x ← (I − γXXᵀ)x", VON_OSWALD)
def _gd_plus_plus(draws: Draws) -> Sides:
    task, depth = regression_task(draws), draws.size(2, 5)
    gamma = draws.number(0.001, 0.02)
    n_x, n_y = task.x.shape[0], task.y.shape[0]
    layer = gd_plus_plus_layer(n_x, n_y, task.rate, gamma, task.n_demos, task.x)
    found = run_layers(regression_tokens(task.x, task.y, task.x_query), [layer] * depth).prediction
    return found, gd_plus_plus(task.x, task.y, task.x_query, task.rate, gamma, depth)


@_gd_plus_plus.misprint("GD++ with x ← x + γXXᵀx", "von Oswald et al. 2023")
def _gd_plus_plus_sign(draws: Draws) -> Sides:
    task, gamma = regression_task(draws), 0.02
    layer = gd_plus_plus_layer(task.x.shape[0], task.y.shape[0], task.rate, -gamma, task.n_demos, task.x)
    found = run_layers(regression_tokens(task.x, task.y, task.x_query), [layer] * 2).prediction
    return found, gd_plus_plus(task.x, task.y, task.x_query, task.rate, gamma, 2)


@dataclass(frozen=True)
class Separate:
    """A regression whose x and y are tokens of their own, and how many steps to take from W₀ = 0."""

    task: RegressionTask
    depth: int

    def copied(self, shift: int) -> Regression:
        """After a layer that copies the y of the token `shift` places further."""
        task = self.task
        tokens = separate_tokens(task.x, task.y, task.x_query)
        return run_layers(tokens, [copying_layer(task.x.shape[0], self.n_y, task.n_demos, task.x, shift=shift)])

    @property
    def n_y(self) -> int:
        return self.task.y.shape[0]

    def answer(self, tokens: Regression) -> Sides:
        """What layers of gradient descent make of these tokens, and what gradient descent makes of the data."""
        task = self.task
        layer = gd_layer_on_separate(task.x.shape[0], self.n_y, task.rate, task.n_demos, task.x)
        weight = torch.zeros_like(task.weight0)
        for _ in range(self.depth):
            weight = task.step(weight)
        return prediction(run_layers(tokens, [layer] * self.depth), self.n_y), weight @ task.x_query


def separate_task(draws: Draws) -> Separate:
    return Separate(regression_task(draws), draws.size(1, 4))


@identity("copying layer: tokens (x_i), (y_i) → (x_i, y_i)", VON_OSWALD + ", §4", given=separate_task)
def _copying(given: Separate) -> Sides:
    return merged(given.copied(1), given.n_y).context, torch.cat([given.task.x, given.task.y])


@identity("separate tokens: copying, then k layers = k gradient steps", VON_OSWALD + ", §4", given=separate_task)
def _separate(given: Separate) -> Sides:
    return given.answer(given.copied(1))


@_separate.misprint("the copying layer reads the token before", "von Oswald et al. 2023")
def _copies_before(given: Separate) -> Sides:
    return given.answer(given.copied(-1))


@_separate.misprint("separate tokens without the copying layer", "von Oswald et al. 2023")
def _not_copied(given: Separate) -> Sides:
    task = given.task
    return given.answer(separate_tokens(task.x, task.y, task.x_query))


def one_step_risk(inputs: Float[Tensor, "task demo d"], rate: float, draws: Draws) -> float:
    """Monte Carlo risk of one gradient step from 0, as a fraction: mean ‖(I − ηS)w‖² / mean ‖w‖² (x_q isotropic)."""
    n_tasks, n, d = inputs.shape
    truth = draws.normal(n_tasks, d)
    labels = torch.einsum("tnd,td->tn", inputs, truth)
    estimate = rate / n * torch.einsum("tn,tnd->td", labels, inputs)
    return float((estimate - truth).square().sum() / truth.square().sum())


@identity("x ~ U(−½,½), d = N = 10: best single step 6.06, loss .2062", VON_OSWALD + ", derived", 0.03)
def _uniform_known_answer(draws: Draws) -> float:
    best = uniform_optimum(10, 10)
    found = one_step_risk(draws.uniform(20_000, 10, 10) - 0.5, best.rate, draws)
    printed = max(abs(best.rate - 6.06) / 6.06, abs(best.loss - 0.2062) / 0.2062)
    return max(abs(found - best.risk) / best.risk, printed)


@_uniform_known_answer.misprint("the Gaussian optimum for uniform inputs", "Ahn, Zhang et al. 2023", 0.03)
def _gaussian_for_uniform(draws: Draws) -> float:
    d, n = draws.size(8, 12), draws.size(8, 12)
    return abs(gaussian_optimum(d, n, 1 / 12).loss / uniform_optimum(d, n).loss - 1)


@identity("x ~ N(0,I), d = N = 10: risk (d+1)/(N+d+1) = 11/21", "Ahn et al. 2023", 0.03)
def _gaussian_known_answer(draws: Draws) -> float:
    best = gaussian_optimum(10, 10)
    found = one_step_risk(draws.normal(20_000, 10, 10), best.rate, draws)
    return max(abs(found - 11 / 21) / (11 / 21), abs(best.risk - 11 / 21))


@identity(
    "best one-layer LSA: A = Γ⁻¹, Γ = ((n+1)/n)Σ + (tr Σ/n)I, where A E[S²] = E[S]", "Ahn, Zhang et al. 2023", 0.05
)
def _lsa_optimum(draws: Draws) -> float:
    d, n, tasks = draws.size(2, 4), draws.size(4, 10), 40_000
    # eigenvalues between ½ and 2 in a random basis: a wider spread would only need more draws
    scales, basis = torch.diag(0.7 + 0.7 * draws.uniform(d)), draws.normal(d, d)
    root = scales @ torch.matrix_exp(basis - basis.T)
    covariance = root.T @ root
    x = draws.normal(tasks, n, d) @ root
    sample = x.mT @ x / n
    mean, square = sample.mean(dim=0), (sample @ sample).mean(dim=0)
    best = lsa_optimum(covariance, n)
    # the loss ½ tr Σ(AS − I)(AS − I)ᵀ is least where A E[S²] = E[S]
    return norm(best.matrix @ square - mean) / norm(mean)


@identity("kernel attention layers y ← y − r Σ_i K(x_i,·) y_i = functional GD, f(x_q) = −y_q", "Cheng et al. 2024")
def _kernel_descent(draws: Draws) -> Sides:
    task, depth = regression_task(draws), draws.size(1, 5)
    kernels: tuple[Kernel, ...] = (linear_kernel, exponential_kernel, gaussian_kernel)
    kernel = kernels[draws.size(0, 2)]
    x, x_query = 0.5 * task.x, 0.5 * task.x_query
    rate = task.rate / norm(kernel(x, x))  # any rate keeps the identity; a stable one keeps the numbers small
    found = kernel_attention(kernel, x, task.y, x_query, rate, depth)
    return found, functional_descent(kernel, x, task.y, x_query, rate, depth)


@_kernel_descent.misprint("kernel attention read out as +y_q", "Cheng et al. 2024", given=regression_task)
def _kernel_readout(task: RegressionTask) -> Sides:
    arguments = (exponential_kernel, 0.3 * task.x, task.y, 0.3 * task.x_query, 0.01, 3)
    return -kernel_attention(*arguments), functional_descent(*arguments)


@identity("(gated) DeltaNet αS(I − βkkᵀ) + βvkᵀ = SGD on ½‖Sk − v‖²", "Schlag 2021, Yang 2024")
def _delta_rule(draws: Draws) -> Sides:
    d_k, d_v, n = draws.size(), draws.size(), draws.size(2, 12)
    keys, values, rates, decays = draws.matrix(n, d_k).T, draws.normal(d_v, n), draws.uniform(n), draws.uniform(n)
    state = draws.normal(d_v, d_k)
    found = delta_rule(keys, values, rates, decays, state)
    for t in range(n):
        leaf = (decays[t] * state).requires_grad_()
        (gradient,) = torch.autograd.grad(0.5 * (leaf @ keys[:, t] - values[:, t]).square().sum(), leaf)
        state = leaf.detach() - rates[t] * gradient
    return found, state


@_delta_rule.misprint("DeltaNet as Σ β v kᵀ  [nothing erased]", "Yang et al. 2024")
def _no_erasing(draws: Draws) -> Sides:
    keys, values, rates = draws.normal(4, 6), draws.normal(3, 6), draws.uniform(6)
    return (values * rates) @ keys.T, delta_rule(keys, values, rates)


@dataclass(frozen=True)
class Memory:
    """Keys and values to be stored by ridge regression of strength λ."""

    keys: Float[Tensor, "d_k token"]
    values: Float[Tensor, "d_v token"]
    strength: float


def memory(draws: Draws) -> Memory:
    """λ stays away from 1, where λ and 1/λ cannot be distinguished."""
    d_k, d_v, n = draws.size(), draws.size(), draws.size(2, 12)
    return Memory(draws.normal(d_k, n), draws.normal(d_v, n), draws.number(2.0, 5.0))


def ridge_gradient(problem: Memory, weight: Float[Tensor, "d_v d_k"]) -> float:
    """‖∇‖ of ½‖S K − V‖² + ‖S‖²/(2λ) at `weight`, relative to ‖V Kᵀ‖: zero at the ridge solution."""
    gradient = (weight @ problem.keys - problem.values) @ problem.keys.T + weight / problem.strength
    return norm(gradient) / norm(problem.values @ problem.keys.T)


@identity(
    "mesa layer VKᵀ(KKᵀ + I/λ)⁻¹ = ridge solution = Sherman–Morrison recursion",
    "von Oswald et al. 2023b",
    1e-11,
    given=memory,
)
def _mesa(problem: Memory) -> float:
    closed = mesa(problem.keys, problem.values, problem.strength)
    recursive = mesa_recursion(problem.keys, problem.values, problem.strength)
    return max(ridge_gradient(problem, closed), relative_error(recursive, closed))


@_mesa.misprint("mesa layer VKᵀ(KKᵀ + λI)⁻¹ for strength λ", "von Oswald et al. 2023b")
def _mesa_strength(problem: Memory) -> float:
    gram = problem.keys @ problem.keys.T + problem.strength * torch.eye(problem.keys.shape[0]).to(problem.keys)
    return ridge_gradient(problem, solve_right(problem.values @ problem.keys.T, gram))
