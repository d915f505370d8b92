"""Recurrent and kernel attentions as learners: each takes a step on, or solves, a small regression of its own.

| layer            | inner loss on token (k, v)      | what the layer does                               | identity |
|------------------|---------------------------------|---------------------------------------------------|----------|
| linear attention | −vᵀ S k                         | one step per token: S ← S + v kᵀ                  |          |
| DeltaNet         | ½ ‖S k − v‖²                    | one step per token: S ← S (I − β k kᵀ) + β v kᵀ   | T8       |
| gated DeltaNet   | the same                        | S ← α S first (decay), then the step              | T8       |
| mesa layer       | Σ ½ ‖S k − v‖² + ‖S‖²/(2λ)      | the exact solution V Kᵀ (K Kᵀ + I/λ)⁻¹            | T9       |
| kernel attention | ½ Σ (f(x_i) − y_i)² in an RKHS  | one step of functional gradient descent per layer | T7       |

DeltaNet: Schlag et al. 2021, Yang et al. 2024; mesa: von Oswald et al. 2309.05858; kernel: Cheng et al. 2312.06528; the
common view: Wang et al. 2501.12352.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.linalg import solve_right
from dualview.duality.theory.regression import Answers, Asked, Inputs, Targets
from dualview.duality.theory.toy_attention import Keys, Values
from dualview.io.errors import UserError

Kernel = Callable[[Float[Tensor, "d n"], Float[Tensor, "d m"]], Float[Tensor, "n m"]]
"""K(A, B)[i, j] = K(a_i, b_j), over columns."""


State = Float[Tensor, "d_v d_k"]
"""S: what the layer has learnt of its tokens."""


def delta_rule(
    keys: Keys,
    values: Values,
    rates: Float[Tensor, " token"],
    decays: Float[Tensor, " token"] | None = None,
    initial: State | None = None,
) -> State:
    """DeltaNet's state after all tokens: sequential SGD on ½ ‖S k_t − v_t‖², token t with rate β_t (T8).

    S ← α S (I − β k kᵀ) + β v kᵀ writes v at k, erasing what S had there; decays α < 1 make it the gated one.
    """
    state = values.new_zeros(values.shape[0], keys.shape[0]) if initial is None else initial
    for t, (key, value, rate) in enumerate(zip(keys.T, values.T, rates, strict=True)):
        kept = state if decays is None else decays[t] * state
        state = kept - rate * torch.outer(kept @ key, key) + rate * torch.outer(value, key)
    return state


def mesa(keys: Keys, values: Values, strength: float) -> State:
    """V Kᵀ (K Kᵀ + I/λ)⁻¹: ridge regression of values on keys, λ = `strength` (large: least squares, small: λ V Kᵀ)."""
    if strength <= 0:
        raise UserError("The mesa layer's strength λ must be positive.")
    gram = keys @ keys.T + torch.eye(keys.shape[0]).to(keys) / strength
    return solve_right(values @ keys.T, gram)


def mesa_recursion(keys: Keys, values: Values, strength: float) -> State:
    """The same solution B R token by token, from R = λ I and B = 0 (T9), without any inversion.

    Sherman & Morrison: R = (K Kᵀ + I/λ)⁻¹ ← R − R k kᵀ R / (1 + kᵀ R k), B = V Kᵀ ← B + v kᵀ. At every token B R is the
    solution of the tokens so far.
    """
    if strength <= 0:
        raise UserError("The mesa layer's strength λ must be positive.")
    inverse, moment = strength * torch.eye(keys.shape[0]).to(keys), values.new_zeros(values.shape[0], keys.shape[0])
    for key, value in zip(keys.T, values.T, strict=True):
        seen = inverse @ key
        inverse = inverse - torch.outer(seen, seen) / (1 + key @ seen)
        moment = moment + torch.outer(value, key)
    return moment @ inverse


def linear_kernel(a: Float[Tensor, "d n"], b: Float[Tensor, "d m"]) -> Float[Tensor, "n m"]:
    """aᵀ b."""
    return a.T @ b


def exponential_kernel(a: Float[Tensor, "d n"], b: Float[Tensor, "d m"]) -> Float[Tensor, "n m"]:
    """exp(aᵀ b): unnormalised softmax attention's."""
    return torch.exp(a.T @ b)


def gaussian_kernel(a: Float[Tensor, "d n"], b: Float[Tensor, "d m"]) -> Float[Tensor, "n m"]:
    """exp(−‖a − b‖²/2)."""
    return torch.exp(-0.5 * torch.cdist(a.T, b.T, compute_mode="donot_use_mm_for_euclid_dist").square())


def kernel_attention(kernel: Kernel, x: Inputs, y: Targets, x_query: Asked, rate: float, layers: int) -> Answers:
    """k layers of kernel attention: y_j ← y_j − r Σ_i K(x_i, x_j) y_i for context and query; prediction −y_q (T7).

    The query starts at y_q = 0 and is no key; the context's y_i turn into residuals layer by layer.
    """
    y_query = y.new_zeros(y.shape[0], x_query.shape[1])
    among, to_query = kernel(x, x), kernel(x, x_query)
    for _ in range(layers):
        y, y_query = y - rate * y @ among, y_query - rate * y @ to_query
    return -y_query


def functional_descent(kernel: Kernel, x: Inputs, y: Targets, x_query: Asked, rate: float, steps: int) -> Answers:
    """Functional gradient descent in the kernel's space: f ← f + r Σ_i (y_i − f(x_i)) K(·, x_i) from f = 0, at x_query.

    f = Σ_i a_i K(·, x_i) throughout, so only the coefficients a_i move: a ← a + r (y − f(x)).
    """
    among = kernel(x, x)
    coefficients = torch.zeros_like(y)
    for _ in range(steps):
        coefficients = coefficients + rate * (y - coefficients @ among)
    return coefficients @ kernel(x, x_query)
