"""Identities of softmax attention as a kernel step (Ren & Liu) and of signed values: T4 and T12."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.features import random_features, taylor_exp, taylor_features, taylor_remainder
from dualview.duality.theory.kernel import (
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
from dualview.duality.theory.sign import (
    batch_sign,
    consistent_scale,
    l1_loss,
    sign_risks,
    sign_sign,
    signed_values,
)
from dualview.duality.theory.toy_attention import relative_error, soft_attn
from dualview.duality.verify.check import Draws, Identity

REN_LIU = "Ren & Liu 2024"
SIGN = "exercise, answered"


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


def autograd_minus(start: Tensor, rate: float, loss: Tensor, leaf: Tensor) -> Tensor:
    """start − rate · ∇loss at `leaf`."""
    (gradient,) = torch.autograd.grad(loss, leaf)
    return start - rate * gradient


def _theorem(draws: Draws) -> float:
    layer, rate = softmax_layer(draws), draws.number(0.01, 10.0)
    model = kernel_model(layer.head)
    leaf = model.initial().requires_grad_()
    stepped = autograd_minus(model.initial(), rate, model.loss(leaf, rate), leaf)
    expected = layer.output()
    return max(
        relative_error(model.predict(stepped), expected), relative_error(model.predict(model.step(rate)), expected)
    )


def _token_by_token(draws: Draws) -> float:
    layer, rate = softmax_layer(draws), draws.number(0.01, 10.0)
    model = kernel_model(layer.head)
    return relative_error(model.token_steps(rate)[-1], model.step(rate))


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


def _random_features(draws: Draws) -> float:
    return abs(prf_slope(draws) + 0.5)


@dataclass(frozen=True)
class FeedForward:
    """A random ReLU feed-forward layer over d_v."""

    w_1: Float[Tensor, "d_ff d_v"]
    b_1: Float[Tensor, " d_ff"]
    w_2: Float[Tensor, "d_out d_ff"]
    b_2: Float[Tensor, " d_out"]


def feed_forward(draws: Draws, d_v: int, width: int | None = None) -> FeedForward:
    """Random sizes (or the given width), biases included."""
    d_ff, d_out = draws.size(6, 16) if width is None else width, draws.size(3, 8)
    return FeedForward(draws.matrix(d_ff, d_v), draws.normal(d_ff), draws.matrix(d_out, d_ff), draws.normal(d_out))


def _relu(draws: Draws) -> float:
    layer = softmax_layer(draws)
    ffn = feed_forward(draws, layer.w_v.shape[0])
    fold = relu_fold(ffn.w_1, ffn.b_1, ffn.w_2, ffn.b_2, layer.output())
    folded = kernel_model(augmented(layer.head, on_values=lambda v: fold.matrix @ v))
    expected = ffn.w_2 @ torch.relu(ffn.w_1 @ layer.output() + ffn.b_1) + ffn.b_2
    return relative_error(folded.predict(folded.step(1.0)) + fold.offset, expected)


def regularised_step(model: KernelModel, rate: float, decay: float) -> Float[Tensor, " d_v"]:
    """One autograd step on L + (α/2)‖W‖², read out at the query."""
    leaf = model.initial().requires_grad_()
    loss = model.loss(leaf, rate) + 0.5 * decay * leaf.square().sum()
    return model.predict(autograd_minus(model.initial(), rate, loss, leaf))


def _regularised(draws: Draws) -> float:
    layer, rate, decay = softmax_layer(draws), draws.number(0.1, 1.0), draws.number(0.1, 1.0)
    return relative_error(
        regularised_attention(layer.head, rate, decay), regularised_step(kernel_model(layer.head), rate, decay)
    )


def _regularised_slide(draws: Draws) -> float:
    layer, rate, decay = softmax_layer(draws, own=1), draws.number(0.1, 1.0), draws.number(0.1, 1.0)
    alpha = slide_alpha(layer.head, rate, decay)
    return relative_error(
        regularised_slide(layer.head, alpha, layer.w_v @ layer.x),
        regularised_step(kernel_model(layer.head), rate, decay),
    )


def _augmented(draws: Draws) -> float:
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
    return relative_error(model.predict(model.step(1.0)), soft_attn(keys, values, layer.w_q @ layer.x))


def negative_step(layer: SoftmaxLayer, rate: float, count: int, beta: float) -> Float[Tensor, " d_v"]:
    """One autograd step on the negative loss, read out at the query."""
    model = kernel_model(layer.head)
    leaf = model.initial().requires_grad_()
    loss = negative_loss(model, leaf, rate, negatives_of(layer, count), beta)
    return model.predict(autograd_minus(model.initial(), rate, loss, leaf))


def negatives_of(layer: SoftmaxLayer, count: int) -> Tensor:
    """N(i): the demonstrations that demonstration i attends to least."""
    return lowest_attention((layer.w_k @ layer.demos).T @ (layer.w_q @ layer.demos), count)


def _negative(draws: Draws) -> float:
    layer, rate, beta = softmax_layer(draws), draws.number(0.1, 1.0), draws.number(0.1, 1.0)
    found = negative(layer.head, negatives_of(layer, 2), beta).output()
    return relative_error(found, negative_step(layer, rate, 2, beta))


@dataclass(frozen=True)
class SignProblem:
    """Keys, targets, a weight, the residuals as values, and a query."""

    keys: Float[Tensor, "d_k token"]
    targets: Float[Tensor, "d_v token"]
    weight: Float[Tensor, "d_v d_k"]
    query: Float[Tensor, " d_k"]
    alpha: float

    @property
    def values(self) -> Float[Tensor, "d_v token"]:
        """v_i = y_i − W k_i."""
        return self.targets - self.weight @ self.keys


def sign_problem(draws: Draws) -> SignProblem:
    """Random sizes; at least three tokens, so that the sign of a sum is not a sum of signs."""
    d_k, d_v, n = draws.size(3, 9), draws.size(3, 9), draws.size(3, 12)
    return SignProblem(
        draws.normal(d_k, n), draws.normal(d_v, n), draws.normal(d_v, d_k), draws.normal(d_k), draws.number(0.01, 1.0)
    )


def _l1(draws: Draws) -> float:
    p = sign_problem(draws)
    leaf = p.weight.clone().requires_grad_()
    stepped = autograd_minus(p.weight, p.alpha, l1_loss(leaf, p.keys, p.targets), leaf)
    return relative_error(signed_values(p.keys, p.values, p.query, p.alpha), (stepped - p.weight) @ p.query)


def _per_sample(draws: Draws) -> float:
    p = sign_problem(draws)
    steps = [torch.sign(torch.outer(p.values[:, t], p.keys[:, t])) for t in range(p.keys.shape[1])]
    return relative_error(
        sign_sign(p.keys, p.values, p.query, p.alpha), p.alpha * torch.stack(steps).sum(dim=0) @ p.query
    )


def _batch(draws: Draws) -> float:
    p = sign_problem(draws)
    leaf = p.weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(0.5 * (leaf @ p.keys - p.targets).square().sum(), leaf)
    return relative_error(batch_sign(p.keys, p.values, p.query, p.alpha), -p.alpha * torch.sign(gradient) @ p.query)


def _scale(draws: Draws) -> float:
    d, n = draws.size(2, 6), 200_000
    weight, keys = draws.normal(1, d), draws.normal(d, n)
    values = weight @ keys
    estimates = [float(consistent_scale(values, kind)) * torch.sign(values) @ keys.T for kind in ("mean", "median")]
    return max(relative_error(estimate, weight) for estimate in estimates)


def _gd_risk(draws: Draws) -> float:
    n, d, noise = draws.size(5, 30), draws.size(5, 15), draws.number(0.0, 2.0)
    risk = next(
        r.risk for r in sign_risks(n, "gaussian", d, 10_000, draws.size(0, 10**6), noise) if r.estimator == "gd"
    )
    known = (d + 1 + noise**2) / (n + d + 1 + noise**2)
    return abs(risk - known)


IDENTITIES = (
    Identity(
        "one GD step on L = −(1/ηD) Σ_i v_iᵀWφ(k_i) from W₀:  W₁φ(q) = SoftAttn", REN_LIU + ", Thm 3.1", _theorem, 1e-10
    ),
    Identity("N steps token by token = one batch step, for any η", REN_LIU, _token_by_token),
    Identity("Taylor features: φ(a)ᵀφ(b) = Σ_{n≤p}(aᵀb)ⁿ/n!, off exp(aᵀb) by ≤ Σ_{n>p}|aᵀb|ⁿ/n!", REN_LIU, _taylor),
    Identity(
        "positive random features: error ∝ m^(−½) (log–log slope − (−½))",
        "Choromanski et al. 2021",
        _random_features,
        0.2,
    ),
    Identity(
        "U₂relu(U₁h′+c₁)+c₂ = dual model with labels U₂SU₁v_i, plus U₂Sc₁+c₂,  S = diag(1[U₁h′+c₁ > 0])",
        REN_LIU,
        _relu,
        1e-10,
    ),
    Identity("step on L + (α/2)‖W‖² = h′ − ηα Σ_{j∈X_T} a_j v_j", REN_LIU + ", strict", _regularised, 1e-10),
    Identity(
        "slides' h′ − αW_Vx_q = strict form if X_T = {q} and α = ηα′a_self",
        REN_LIU + ", slides",
        _regularised_slide,
        1e-10,
    ),
    Identity("g₁(V) softmax(g₂(K)ᵀq): dual model with g₁(v_i), φ(g₂(k_i))", REN_LIU, _augmented, 1e-10),
    Identity(
        "step on the negative loss = V(x̃) softmax(Kᵀq),  x̃_i = x_i − (β/k) Σ_{j∈N(i)} x_j", REN_LIU, _negative, 1e-10
    ),
    Identity("α sign(V)Kᵀq = −α ∂(Σ_i‖Wk_i − y_i‖₁) q", SIGN, _l1),
    Identity("α sign(V)sign(K)ᵀq = Σ_i α sign(v_ik_iᵀ) q  (signSGD per sample)", SIGN, _per_sample),
    Identity("α sign(VKᵀ)q = −α sign(∇L) q  (signSGD on the batch)", SIGN, _batch),
    Identity("α = (π/2) mean|v|/N (or by the median):  α sign(V)Kᵀ → W", SIGN, _scale, 0.03),
    Identity("GD's one-step risk under noise σ² = (d+1+σ²)/(N+d+1+σ²)", SIGN, _gd_risk, 0.02),
)
