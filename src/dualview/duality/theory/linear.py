"""A trained layer is attention over its training data (Irie, Csordás & Schmidhuber 2022, arXiv 2202.05798).

A linear layer trained by SGD from W_0 answers a query x as

    W_T x = a W_0 x + LinAttn(X, E, x) = a W_0 x + Σ_t e_t (x_tᵀ x),        b_T = a_b b_0 + Σ_t e_t

keys    x_t : the layer's input at training token t,
values  e_t = c_s ∂L/∂(W x_t) : its error signal at the weights of step s, when token t was seen (not at W_0),
a, c_s      : numbers of the optimiser alone (`coefficients`); plain SGD has a = 1 and c_s = −η.

Exact for every loss and everything downstream, for momentum, decay and clipping; false for Adam, which is refused.

It is a decomposition, not a counterfactual: without token t the later errors and keys would have been others.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.duality.theory.linalg import column_norms, norm
from dualview.duality.theory.toy_attention import lin_attn, relative_error


@dataclass(frozen=True)
class TokenIndex:
    """Where each recorded token came from."""

    step: Int[Tensor, " token"]
    """Optimiser step, from 0."""
    call: Int[Tensor, " token"]
    """Which call of the layer within its step (0 unless gradients are accumulated or the layer is shared)."""
    sequence: Int[Tensor, " token"]
    """Row of the batch within its call."""
    position: Int[Tensor, " token"]
    """Position in its sequence."""


@dataclass(frozen=True)
class DualForm:
    """One trained layer as `a W_0 + attention over its training tokens`."""

    weight0: Float[Tensor, "d_out d_in"]
    bias0: Float[Tensor, " d_out"] | None
    keys: Float[Tensor, "d_in token"]
    """x_t: the layer's inputs."""
    grads: Float[Tensor, "d_out token"]
    """∂L/∂(W x_t), loss reduction included, at the weights of their step."""
    index: TokenIndex
    weight_coef: Float[Tensor, " token"] | float = 1.0
    """c_s of the token's step: e_t = weight_coef[t] · grads[:, t]."""
    bias_coef: Float[Tensor, " token"] | float = 1.0
    """The same for the bias (its own parameter group may have another rate or decay)."""
    weight_shrink: float = 1.0
    """a: what weight decay left of W_0."""
    bias_shrink: float = 1.0

    @property
    def errors(self) -> Float[Tensor, "d_out token"]:
        """E: the attention's values, e_t = c_s ∂L/∂(W x_t)."""
        return self.grads * self.weight_coef

    @property
    def bias_errors(self) -> Float[Tensor, "d_out token"]:
        """The same for the bias: b_T = a_b b_0 + Σ_t of these (zeros if the bias was not trained)."""
        return self.grads * self.bias_coef

    def delta(self) -> Float[Tensor, "d_out d_in"]:
        """Σ_t e_t x_tᵀ: the part of W_T that the training tokens wrote."""
        return self.errors @ self.keys.T

    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """W_T = a W_0 + Σ_t e_t x_tᵀ."""
        return self.weight_shrink * self.weight0 + self.delta()

    def bias(self) -> Float[Tensor, " d_out"] | None:
        """b_T = a_b b_0 + Σ_t e_t; None for a layer without bias."""
        return None if self.bias0 is None else self.bias_shrink * self.bias0 + self.bias_errors.sum(dim=1)

    def __call__(self, x: Float[Tensor, "d_in *query"]) -> Float[Tensor, "d_out *query"]:
        """W_T x + b_T without ever forming W_T: a W_0 x + LinAttn(X, E, x) + b_T."""
        out = self.weight_shrink * (self.weight0 @ x) + lin_attn(self.keys, self.errors, x)
        bias = self.bias()
        return out if bias is None else out + bias.reshape(-1, *[1] * (x.ndim - 1))

    def contributions(
        self, x: Float[Tensor, "d_in *query"], direction: Float[Tensor, " d_out"]
    ) -> Float[Tensor, "token *query"]:
        """What each training token adds to ⟨direction, W_T x⟩: ⟨direction, e_t⟩ (x_tᵀ x), signed.

        Their sum over tokens is ⟨direction, (W_T − a W_0) x⟩. For one output unit take a unit vector, for a logit the
        vector whose product with the layer's output is that logit.
        """
        return (direction @ self.errors).reshape(-1, *[1] * (x.ndim - 1)) * (self.keys.T @ x)


def aggregate(
    values: Float[Tensor, "token *query"], groups: Int[Tensor, " token"], n_groups: int | None = None
) -> Float[Tensor, "group *query"]:
    """Sum signed contributions by group: demonstration, label, step, whatever `groups` numbers (from 0).

    >>> aggregate(torch.tensor([1.0, -2.0, 5.0]), torch.tensor([0, 1, 0]))
    tensor([ 6., -2.])
    """
    count = n_groups if n_groups is not None else (int(groups.max()) + 1 if groups.numel() else 0)
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, groups.to(values.device), values)


@dataclass(frozen=True)
class Residual:
    """How well the dual form rebuilds a trained layer. All errors are relative Frobenius norms; 0 is exact."""

    layer: str
    steps: int
    tokens: int
    weight: float
    """‖W_T − Ŵ‖ / ‖W_T − W_0‖: the part of the update that the tokens do not explain."""
    weight_total: float
    """‖W_T − Ŵ‖ / ‖W_T‖: the error of the layer itself."""
    bias: float | None
    """‖b_T − b̂‖ / ‖b_T − b_0‖; None without a bias."""
    rounding: float
    """ε √steps ‖W_T‖ / ‖W_T − W_0‖: what rounding the weights after every step alone would leave in `weight`."""
    bias_rounding: float | None
    """The same for `bias`, whose error signals may cancel: a `bias` of this size means that nothing but rounding moved
    it (as the bias of a key, which no softmax sees)."""


def summing_error(errors: Float[Tensor, "d_out token"], change: Float[Tensor, " d_out"], eps: float) -> float:
    """ε Σ_t ‖e_t‖ / ‖Σ_t e_t‖: what rounding leaves of a sum whose terms cancel; ε Σ_t ‖e_t‖ where nothing is left."""
    size, left = eps * float(column_norms(errors.double()).sum()), norm(change)
    return size / left if left else size


def residual(
    name: str,
    form: DualForm,
    change: Float[Tensor, "d_out d_in"],
    bias_change: Float[Tensor, " d_out"] | None,
    steps: int,
    apart: bool = False,
) -> Residual:
    """Compare a dual form with the change that training really made (Irie's identity, dualities T1c).

    `apart`: training summed the change apart from the weights, so it is rounded relative to its own size, not theirs.
    """
    eps = torch.finfo(change.dtype).eps
    each = eps * math.sqrt(max(steps, 1))  # what rounding after every step leaves of a number of size 1
    # (a − 1) W_0 + Σ_t e_t x_tᵀ, so that an update much smaller than W_0 keeps its digits
    rebuilt, moved, size = (
        (form.weight_shrink - 1) * form.weight0 + form.delta(),
        norm(change),
        norm(form.weight0 + change),
    )
    rounding = each if apart else each * size / moved if moved else 0.0
    bias_error = bias_rounding = None
    if bias_change is not None and form.bias0 is not None:
        bias_error = relative_error((form.bias_shrink - 1) * form.bias0 + form.bias_errors.sum(dim=1), bias_change)
        stored = 0.0 if apart else each * norm(form.bias0 + bias_change) / (norm(bias_change) or 1.0)
        bias_rounding = summing_error(form.bias_errors, bias_change, eps) + stored
    return Residual(
        layer=name,
        steps=steps,
        tokens=form.keys.shape[1],
        weight=relative_error(rebuilt, change),
        weight_total=norm(rebuilt - change) / size,
        bias=bias_error,
        rounding=rounding,
        bias_rounding=bias_rounding,
    )
