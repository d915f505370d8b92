"""Identities of softmax attention as a kernel step (Ren & Liu) (T4), with its misprints."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.features import random_features, taylor_exp, taylor_features, taylor_remainder
from dualview.duality.theory.kernel import (
    Fold,
    Head,
    KernelModel,
    augmented,
    kernel_model,
    lowest_attention,
    negative,
    negative_loss,
    parallel_adapter,
    regularised_attention,
    regularised_slide,
    relu_fold,
    slide_alpha,
    softmax_head,
)
from dualview.duality.theory.linalg import column_norms
from dualview.duality.theory.toy_attention import relative_error, soft_attn
from dualview.duality.verify.check import REN_LIU, SLIDES, Draws, Sides, identity


@dataclass(frozen=True)
class SoftmaxLayer:
    """A random layer with demonstrations X_D, own tokens X_T (the query last) and the query x."""

    w_k: Float[Tensor, "d_o d"]
    w_q: Float[Tensor, "d_o d"]
    w_v: Float[Tensor, "d_v d"]
    demos: Float[Tensor, "d demo"]
    own: Float[Tensor, "d own"]

    @property
    def x(self) -> Float[Tensor, " d"]:
        """The query token."""
        return self.own[:, -1]

    @property
    def head(self) -> Head:
        """Scaled keys, values and query."""
        return softmax_head(self.w_k, self.w_q, self.w_v, self.demos, self.own, self.x)

    def output(self) -> Float[Tensor, " d_v"]:
        """h' as a layer computes it: W_V X softmax((W_K X)ᵀ W_Q x / √d_o)."""
        both = torch.cat([self.demos, self.own], dim=1)
        return soft_attn(self.w_k @ both, self.w_v @ both, self.w_q @ self.x)


def softmax_layer(draws: Draws, own: int | None = None) -> SoftmaxLayer:
    """Random sizes; scaled keys and queries of norm at most 2, where Gram features keep their digits."""
    d, d_o, d_v = draws.size(3, 8), draws.size(3, 8), draws.size()
    layer = SoftmaxLayer(
        w_k=draws.matrix(d_o, d),
        w_q=draws.matrix(d_o, d),
        w_v=draws.matrix(d_v, d),
        demos=draws.normal(d, draws.size(3, 10)),
        own=draws.normal(d, draws.size(1, 5) if own is None else own),
    )
    points = torch.cat([layer.head.keys, layer.head.query.unsqueeze(1)], dim=1)
    shrink = draws.number(1.0, 2.0) / float(column_norms(points).max())
    return replace(layer, w_k=shrink * layer.w_k, w_q=shrink * layer.w_q)


def stepped(model: KernelModel, rate: float, loss: Callable[[Tensor], Tensor]) -> Float[Tensor, " d_v"]:
    """W₀ − rate · ∇loss(W₀), the gradient by autograd, read out at the query."""
    leaf = model.initial().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    return model.predict(model.initial() - rate * gradient)


@identity("one GD step on L = −(1/ηD) Σ_i v_iᵀWφ(k_i) from W₀:  W₁φ(q) = SoftAttn", REN_LIU + ", Thm 3.1", 1e-10)
def _theorem(draws: Draws) -> float:
    layer, rate = softmax_layer(draws), draws.number(0.01, 10.0)
    model = kernel_model(layer.head)
    by_autograd = stepped(model, rate, lambda weight: model.loss(weight, rate))
    expected = layer.output()
    return max(relative_error(found, expected) for found in (by_autograd, model.predict(model.step(rate))))


@_theorem.misprint("φ(Wx) without d^(−¼)", SLIDES, given=softmax_layer)
def _no_scale(layer: SoftmaxLayer) -> Sides:
    both = torch.cat([layer.demos, layer.own], dim=1)
    found = soft_attn(layer.w_k @ both, layer.w_v @ both, layer.w_q @ layer.x, scale=1.0)
    return found, layer.output()


@_theorem.misprint("D a constant  [another query's]", SLIDES)
def _constant_normaliser(draws: Draws) -> Sides:
    layer = softmax_layer(draws)
    head = layer.head
    other = torch.exp(head.keys.T @ draws.normal(head.query.shape[0])).sum()
    return head.values @ torch.exp(head.keys.T @ head.query) / other, layer.output()


@_theorem.misprint("W₀ = 0 although X_T is attended to", SLIDES, given=softmax_layer)
def _no_start(layer: SoftmaxLayer) -> Sides:
    model = kernel_model(layer.head)
    return model.predict(model.step(1.0) - model.initial()), layer.output()


@identity("N steps token by token = one batch step, for any η", REN_LIU)
def _token_by_token(draws: Draws) -> Sides:
    layer, rate = softmax_layer(draws), draws.number(0.01, 10.0)
    model = kernel_model(layer.head)
    return model.token_steps(rate)[-1], model.step(rate)


@identity("Taylor features: φ(a)ᵀφ(b) = Σ_{n≤p}(aᵀb)ⁿ/n!, off exp(aᵀb) by ≤ Σ_{n>p}|aᵀb|ⁿ/n!", REN_LIU)
def _taylor(draws: Draws) -> float:
    points = 0.6 * draws.normal(draws.size(2, 3), 6)
    order = draws.size(2, 6)
    phi = taylor_features(points, order)
    products = points.T @ points
    error = relative_error(phi.T @ phi, taylor_exp(products, order))
    excess = (torch.exp(products) - taylor_exp(products, order)).abs() - taylor_remainder(products, order)
    return max(error, float((excess / torch.exp(products)).max()))


def prf_slope(draws: Draws, orthogonal: bool = False) -> float:
    """d log(error) / d log(m) of positive random features' attention output, over 40 draws at m = 128 and m = 8192."""
    head = softmax_layer(draws).head
    # the variance grows like exp(‖k + q‖²): points within the unit ball show the rate, longer ones only need larger m
    shrink = 0.7 / float(column_norms(torch.cat([head.keys, head.query.unsqueeze(1)], dim=1)).max())
    head = replace(head, demo_keys=shrink * head.demo_keys, own_keys=shrink * head.own_keys, query=shrink * head.query)

    def mean_square(m: int) -> float:
        errors: list[float] = []
        for _ in range(40):
            model = kernel_model(head, random_features(m, draws.size(0, 10**9), orthogonal))
            errors.append(relative_error(model.predict(model.step(1.0)), head.output()) ** 2)
        return sum(errors) / len(errors)

    ratio = torch.tensor(mean_square(8192) / mean_square(128), dtype=torch.float64)
    return float(0.5 * torch.log(ratio) / torch.log(torch.tensor(64.0, dtype=torch.float64)))


@identity("positive random features: error ∝ m^(−½) (log–log slope − (−½))", "Choromanski et al. 2021", 0.2)
def _random_features(draws: Draws) -> float:
    return abs(prf_slope(draws) + 0.5)


@dataclass(frozen=True)
class ReluLayer:
    """A random feed-forward layer over d_v: W_2 relu(W_1 h + b_1) + b_2."""

    w_1: Float[Tensor, "d_ff d_v"]
    b_1: Float[Tensor, " d_ff"]
    w_2: Float[Tensor, "d_out d_ff"]
    b_2: Float[Tensor, " d_out"]

    def __call__(self, h: Float[Tensor, " d_v"], act: Callable[[Tensor], Tensor] = torch.relu) -> Tensor:
        """The layer's output at h (with another activation, if given)."""
        return self.w_2 @ act(self.w_1 @ h + self.b_1) + self.b_2

    def fold(self, h: Float[Tensor, " d_v"]) -> Fold:
        """The matrix and offset that the layer is at h."""
        return relu_fold(self.w_1, self.b_1, self.w_2, self.b_2, h)


def relu_layer(draws: Draws, d_v: int, width: int | None = None) -> ReluLayer:
    """Random sizes (or the given width), biases included."""
    d_ff, d_out = draws.size(6, 16) if width is None else width, draws.size(3, 8)
    return ReluLayer(draws.matrix(d_ff, d_v), draws.normal(d_ff), draws.matrix(d_out, d_ff), draws.normal(d_out))


@identity(
    "U₂relu(U₁h′+c₁)+c₂ = dual model with labels U₂SU₁v_i, plus U₂Sc₁+c₂,  S = diag(1[U₁h′+c₁ > 0])", REN_LIU, 1e-10
)
def _relu(draws: Draws) -> Sides:
    layer = softmax_layer(draws)
    ffn = relu_layer(draws, layer.w_v.shape[0])
    fold = ffn.fold(layer.output())
    folded = kernel_model(augmented(layer.head, on_values=lambda v: fold.matrix @ v))
    return folded.predict(folded.step(1.0)) + fold.offset, ffn(layer.output())


@_relu.misprint("ReLU fold with S of the zero-shot h", SLIDES)
def _fold_without_context(draws: Draws) -> Sides:
    layer = softmax_layer(draws)
    ffn = relu_layer(draws, layer.w_v.shape[0], 400)  # wide, so that some unit surely switches
    alone = soft_attn(layer.w_k @ layer.own, layer.w_v @ layer.own, layer.w_q @ layer.x)
    fold = ffn.fold(alone)
    return fold.matrix @ layer.output() + fold.offset, ffn(layer.output())


@_relu.misprint("ReLU fold for a GELU layer", SLIDES)
def _fold_gelu(draws: Draws) -> Sides:
    layer = softmax_layer(draws)
    ffn = relu_layer(draws, layer.w_v.shape[0])
    fold = ffn.fold(layer.output())
    return fold.matrix @ layer.output() + fold.offset, ffn(layer.output(), F.gelu)


def regularised_step(model: KernelModel, rate: float, decay: float) -> Float[Tensor, " d_v"]:
    """One autograd step on L + (α/2)‖W‖², read out at the query."""
    return stepped(model, rate, lambda weight: model.loss(weight, rate) + 0.5 * decay * weight.square().sum())


@identity("step on L + (α/2)‖W‖² = h′ − ηα Σ_{j∈X_T} a_j v_j", REN_LIU + ", strict", 1e-10)
def _regularised(draws: Draws) -> Sides:
    layer, rate, decay = softmax_layer(draws), draws.number(0.1, 1.0), draws.number(0.1, 1.0)
    return regularised_attention(layer.head, rate, decay), regularised_step(kernel_model(layer.head), rate, decay)


@_regularised.misprint("regularised: h′ − αW_Vx_q with constant α", SLIDES)
def _slide_regularised(draws: Draws) -> Sides:
    layer, rate, alpha = softmax_layer(draws), 1.0, 0.3
    return regularised_slide(layer.head, alpha, layer.w_v @ layer.x), regularised_step(
        kernel_model(layer.head), rate, alpha
    )


@identity("slides' h′ − αW_Vx_q = strict form if X_T = {q} and α = ηα′a_self", REN_LIU + ", slides", 1e-10)
def _regularised_slide(draws: Draws) -> Sides:
    layer, rate, decay = softmax_layer(draws, own=1), draws.number(0.1, 1.0), draws.number(0.1, 1.0)
    alpha = slide_alpha(layer.head, rate, decay)
    return regularised_slide(layer.head, alpha, layer.w_v @ layer.x), regularised_step(
        kernel_model(layer.head), rate, decay
    )


@identity("g₁(V) softmax(g₂(K)ᵀq): dual model with g₁(v_i), φ(g₂(k_i))", REN_LIU, 1e-10)
def _augmented(draws: Draws) -> Sides:
    layer = softmax_layer(draws)
    d, r = layer.demos.shape[0], draws.size()
    scale = layer.w_k.shape[0] ** -0.25
    on_values = (draws.matrix(r, d), draws.matrix(layer.w_v.shape[0], r), draws.number(0.1, 0.5))
    on_keys = (draws.matrix(r, d), draws.matrix(layer.w_k.shape[0], r), draws.number(0.1, 0.5))
    both = torch.cat([layer.demos, layer.own], dim=1)
    keys, values = parallel_adapter(layer.w_k, *on_keys, both), parallel_adapter(layer.w_v, *on_values, both)
    n = layer.demos.shape[1]
    head = Head(keys[:, :n] * scale, values[:, :n], keys[:, n:] * scale, values[:, n:], layer.head.query)
    model = kernel_model(head)
    return model.predict(model.step(1.0)), soft_attn(keys, values, layer.w_q @ layer.x)


def negative_step(layer: SoftmaxLayer, rate: float, count: int, beta: float) -> Float[Tensor, " d_v"]:
    """One autograd step on the negative loss, read out at the query."""
    model, negatives = kernel_model(layer.head), negatives_of(layer, count)
    return stepped(model, rate, lambda weight: negative_loss(model, weight, rate, negatives, beta))


def negatives_of(layer: SoftmaxLayer, count: int) -> Tensor:
    """N(i): the demonstrations that demonstration i attends to least."""
    return lowest_attention((layer.w_k @ layer.demos).T @ (layer.w_q @ layer.demos), count)


@identity("step on the negative loss = V(x̃) softmax(Kᵀq),  x̃_i = x_i − (β/k) Σ_{j∈N(i)} x_j", REN_LIU, 1e-10)
def _negative(draws: Draws) -> Sides:
    layer, rate, beta = softmax_layer(draws), draws.number(0.1, 1.0), draws.number(0.1, 1.0)
    found = negative(layer.head, negatives_of(layer, 2), beta).output()
    return found, negative_step(layer, rate, 2, beta)


@_negative.misprint("negative model with −αI", SLIDES)
def _slide_negative(draws: Draws) -> Sides:
    layer, beta, alpha = softmax_layer(draws), 0.5, 0.3
    printed = negative(layer.head, negatives_of(layer, 1), beta).output() - alpha * layer.w_v @ layer.x
    return printed, negative_step(layer, 1.0, 1, beta)


@_negative.misprint("negative loss with v_iᵀWφ(k_j)  [negatives as keys]", SLIDES)
def _negatives_as_keys(draws: Draws) -> Sides:
    layer, beta = softmax_layer(draws), 0.5
    model = kernel_model(layer.head)
    # each token's negative is the next one: were negatives mutual, both sides would give the same sum
    negatives = torch.arange(layer.demos.shape[1]).roll(-1).unsqueeze(0)
    against = model.demo_features[:, negatives].mean(dim=1)  # the negatives' keys with i's value: the wrong side

    def loss(weight: Tensor) -> Tensor:
        return -(model.demo_values * (weight @ (model.demo_features - beta * against))).sum() / model.normaliser

    return stepped(model, 1.0, loss), negative(layer.head, negatives, beta).output()


IDENTITIES = (
    _theorem,
    _token_by_token,
    _taylor,
    _random_features,
    _relu,
    _regularised,
    _regularised_slide,
    _augmented,
    _negative,
)
