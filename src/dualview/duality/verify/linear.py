"""Identities of trained layers (Irie et al.) and of linear and softmax attention (Dai et al.): T1 to T2c."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dualview.duality.theory.coefficients import constant_rate
from dualview.duality.theory.icl_as_update import (
    SoftmaxSplit,
    four_terms,
    linear_split,
    linear_weights,
    outer_products,
    softmax_split,
    state_weights,
)
from dualview.duality.theory.linear import DualForm
from dualview.duality.theory.recorder import DualRecorder
from dualview.duality.theory.toy_attention import lin_attn, relative_error, soft_attn
from dualview.duality.verify.check import DAI, IRIE, NOTE, REVIEW, Draws, Sides, identity


@dataclass(frozen=True)
class TrainedLayer:
    """A hidden linear layer of a small network before and after training, and its dual form."""

    before: Float[Tensor, "d_out d_in"]
    after: Float[Tensor, "d_out d_in"]
    bias_change: Float[Tensor, " d_out"]
    form: DualForm
    x: Float[Tensor, "d_in query"]
    steps: int
    lr: float

    @property
    def output_change(self) -> Float[Tensor, "d_out query"]:
        """(W_T − W_0) x, as the trained layer has it."""
        return (self.after - self.before) @ self.x

    @property
    def plain_errors(self) -> Float[Tensor, "d_out token"]:
        """e_t = −η ∂L/∂(W x_t)."""
        return -self.lr * self.form.grads

    def attention(self, errors: Float[Tensor, "d_out token"]) -> Float[Tensor, "d_out query"]:
        """LinAttn(X, E, x)."""
        return lin_attn(self.form.keys, errors, self.x)

    def decayed(self, momentum: float, decay: float) -> Float[Tensor, "d_out query"]:
        """(1−ηλ)^T W₀x + Σ_s c_s G_s X_sᵀ x with the coefficients of momentum and decoupled decay."""
        known = constant_rate(self.steps, self.lr, momentum, decay)
        errors = self.form.grads * torch.tensor(known.steps, dtype=torch.float64)[self.form.index.step]
        return known.initial * self.before @ self.x + self.attention(errors)


def train(draws: Draws, *, decay: float = 0.0, clip: float | None = None, **sgd: float | bool) -> TrainedLayer:
    """Train tanh → linear → tanh → readout on random data by torch.optim.SGD, recording the linear layer."""
    d_in, d_out, batch, steps = draws.size(), draws.size(), draws.size(2, 6), draws.size(3, 8)
    layer = nn.Linear(d_in, d_out, dtype=torch.float64)
    below, above = draws.normal(d_in, d_in).requires_grad_(), draws.normal(1, d_out).requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(draws.normal(d_out, d_in))
        layer.bias.copy_(draws.normal(d_out))
    before, bias_before = layer.weight.detach().clone(), layer.bias.detach().clone()
    lr = draws.number(0.02, 0.1)
    everything = [layer.weight, layer.bias, below, above]
    optimizer = torch.optim.SGD(everything, lr=lr, **sgd)  # pyright: ignore[reportArgumentType]
    with DualRecorder(layer, optimizer, decoupled_decay=decay) as recorder:
        for _ in range(steps):
            hidden = torch.tanh(layer(torch.tanh(draws.normal(batch, d_in) @ below.T)))
            F.mse_loss(hidden @ above.T, draws.normal(batch, 1)).backward()  # pyright: ignore[reportUnknownMemberType]
            if clip is not None:
                nn.utils.clip_grad_norm_(everything, clip)
            with torch.no_grad():  # torch's SGD has no decoupled decay, so the loop applies it
                layer.weight.mul_(1 - lr * decay)
                layer.bias.mul_(1 - lr * decay)
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            optimizer.zero_grad()
    after, bias_change = layer.weight.detach(), layer.bias.detach() - bias_before
    return TrainedLayer(before, after, bias_change, recorder.dual(), draws.normal(d_in, 3), steps, lr)


@identity("W_T x = W₀x + LinAttn(X, E, x),  e_t = −η ∂L/∂(W x_t) at step t", IRIE, 1e-11, given=train)
def _sgd(run: TrainedLayer) -> Sides:
    return run.attention(run.plain_errors), run.output_change


@_sgd.misprint("Wx = W₀x + Attn(X, L′(X), x)  [no −η]", NOTE)
def _no_rate(run: TrainedLayer) -> Sides:
    return run.attention(run.form.grads), run.output_change


@dataclass(frozen=True)
class Sequential:
    """A square layer trained by SGD on ½‖Wx_t − y_t‖², one sample a step, with its error signals and those of W_0."""

    keys: Float[Tensor, "d token"]
    errors: Float[Tensor, "d token"]
    errors_at_start: Float[Tensor, "d token"]
    change: Float[Tensor, " d"]
    """(W_T − W_0) x."""
    x: Float[Tensor, " d"]


def sequential(draws: Draws, adam: bool = False) -> Sequential:
    """Five to nine steps of rate .1; with `adam`, the same error signals as Adam met them."""
    d, n, lr = draws.size(3, 8), draws.size(5, 9), 0.1
    keys, targets, start, x = draws.normal(d, n), draws.normal(d, n), draws.matrix(d, d), draws.normal(d)
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=lr) if adam else torch.optim.SGD([weight], lr=lr)
    errors: list[Tensor] = []
    for t in range(n):
        residual = weight @ keys[:, t] - targets[:, t]
        errors.append(-lr * residual.detach())
        weight.grad = torch.outer(residual.detach(), keys[:, t])
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    at_start = -lr * (start @ keys - targets)
    return Sequential(keys, torch.stack(errors, dim=1), at_start, (weight.detach() - start) @ x, x)


@_sgd.misprint("W_T x = W₀x + LinAttn(X, +η ∂L/∂(Wx_t), x)  [no minus]", NOTE, given=sequential)
def _no_minus(run: Sequential) -> Sides:
    return lin_attn(run.keys, -run.errors, run.x), run.change


@_sgd.misprint("W_T x = W₀x + LinAttn(X, E, x) with every e_t at W₀  [not at W_{t−1}]", NOTE, given=sequential)
def _errors_of_start(run: Sequential) -> Sides:
    return lin_attn(run.keys, run.errors_at_start, run.x), run.change


@_sgd.misprint("W_T x = W₀x + LinAttn(E, X, x)  [keys and values swapped]", REVIEW, given=sequential)
def _swapped(run: Sequential) -> Sides:
    return lin_attn(run.errors, run.keys, run.x), run.change


@_sgd.misprint("W_T x = W₀x + LinAttn(X, E, x) after Adam", IRIE + ", code", given=None)
def _adam(draws: Draws) -> Sides:
    run = sequential(draws, adam=True)
    return lin_attn(run.keys, run.errors, run.x), run.change


@identity("b_T = b₀ + Σ_t e_t", IRIE, 1e-11, given=train)
def _bias(run: TrainedLayer) -> Sides:
    return run.plain_errors.sum(dim=1), run.bias_change


@identity(
    "momentum μ, decoupled decay λ:  W_T x = (1−ηλ)^T W₀x + Σ_s c_s G_s X_sᵀ x,  "
    "c_s = −η Σ_{t≥s} (1−ηλ)^(T−1−t) μ^(t−s)",
    IRIE + ", extended",
)
def _momentum_decay(draws: Draws) -> Sides:
    momentum, decay = draws.number(0.1, 0.95), draws.number(0.1, 1.0)
    run = train(draws, decay=decay, momentum=momentum)
    return run.decayed(momentum, decay), run.after @ run.x


@_momentum_decay.misprint("e_t = −η ∂L/∂(Wx_t) with momentum  [no c_s]", IRIE)
def _momentum_forgotten(draws: Draws) -> Sides:
    run = train(draws, momentum=0.9)
    return run.attention(run.plain_errors), run.output_change


@_momentum_decay.misprint("torch's weight_decay treated as decoupled", IRIE)
def _coupled_as_decoupled(draws: Draws) -> Sides:
    decay, momentum = 0.5, 0.9
    run = train(draws, momentum=momentum, weight_decay=decay)
    return run.decayed(momentum, decay), run.after @ run.x


@identity(
    "Nesterov or dampening, torch's coupled decay, clipping:  W_T = a W₀ + Σ_s c_s G_s X_sᵀ", IRIE + ", extended", 1e-11
)
def _every_option(draws: Draws) -> Sides:
    nesterov = bool(draws.size(0, 1))
    options = {"momentum": draws.number(0.1, 0.9), "weight_decay": draws.number(0.01, 0.5), "nesterov": nesterov}
    run = train(draws, clip=0.3, dampening=0.0 if nesterov else draws.number(0.1, 0.9), **options)
    return run.form.weight() - run.before, run.after - run.before


@identity("⟨u, (W_T − W₀)x⟩ = Σ_t ⟨u, e_t⟩ (x_tᵀ x)", IRIE, 1e-11)
def _contributions(draws: Draws) -> Sides:
    run = train(draws, momentum=draws.number(0.1, 0.9))
    direction = draws.normal(run.before.shape[0])
    return run.form.contributions(run.x, direction).sum(dim=0), direction @ run.output_change


@dataclass(frozen=True)
class LinearHead:
    """A random head with demonstrations and a query; square projections, so that a lost transpose has a shape."""

    w_k: Float[Tensor, "d d"]
    w_v: Float[Tensor, "d d"]
    demos: Float[Tensor, "d demo"]
    own: Float[Tensor, "d token"]
    query: Float[Tensor, " d"]
    delta_k: Float[Tensor, "d d"]
    delta_v: Float[Tensor, "d d"]

    @property
    def both(self) -> Float[Tensor, "d both"]:
        """[X', X]."""
        return torch.cat([self.demos, self.own], dim=1)

    def in_context(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor] = lin_attn) -> Float[Tensor, " d"]:
        """Attention over [X', X], as a layer computes it."""
        return attention(self.w_k @ self.both, self.w_v @ self.both, self.query)

    def fine_tuned(self) -> Float[Tensor, " d"]:
        """Linear attention over X with tuned projections, as a layer computes it."""
        return lin_attn((self.w_k + self.delta_k) @ self.own, (self.w_v + self.delta_v) @ self.own, self.query)

    def split(self) -> SoftmaxSplit:
        """Softmax attention over [X', X], split by mass."""
        demos, own = self.demos, self.own
        return softmax_split(self.w_k @ demos, self.w_v @ demos, self.w_k @ own, self.w_v @ own, self.query)


def linear_head(draws: Draws) -> LinearHead:
    """Random sizes; d is at least 3, where no two random matrices are nearly symmetric."""
    d = draws.size(3, 9)
    return LinearHead(
        w_k=draws.matrix(d, d),
        w_v=draws.matrix(d, d),
        demos=draws.normal(d, draws.size()),
        own=draws.normal(d, draws.size()),
        query=draws.normal(d),
        delta_k=draws.matrix(d, d),
        delta_v=draws.matrix(d, d),
    )


@identity("LinAttn(W_K[X′,X], W_V[X′,X], q) = (w(X) + w(X′)) q,  w(D) = W_V D Dᵀ W_Kᵀ", DAI, given=linear_head)
def _linear_split(head: LinearHead) -> Sides:
    return linear_split(head.w_v, head.w_k, head.demos, head.own)(head.query), head.in_context()


@_linear_split.misprint("w(D) = W_V D Dᵀ W_K  [no transpose]", NOTE)
def _w_without_transpose(h: LinearHead) -> Sides:
    printed = h.w_v @ h.own @ h.own.T @ h.w_k + h.w_v @ h.demos @ h.demos.T @ h.w_k
    return printed @ h.query, h.in_context()


@_linear_split.misprint("LinAttn over [X′; X]  [stacked, not side by side]", NOTE)
def _stacked(h: LinearHead) -> Sides:
    n = min(h.demos.shape[1], h.own.shape[1])  # a vertical stack exists only for equal lengths
    h = replace(h, demos=h.demos[:, :n], own=h.own[:, :n])
    keys, values = (torch.cat([w, w], dim=1) @ torch.cat([h.demos, h.own]) for w in (h.w_k, h.w_v))
    return lin_attn(keys, values, h.query), h.in_context()


@_linear_split.misprint("LinAttn(K, V, q) = K Vᵀ q", REVIEW)
def _transposed_attention(h: LinearHead) -> Sides:
    return (h.w_k @ h.both) @ (h.w_v @ h.both).T @ h.query, h.in_context()


@identity("ΔW_ICL = w(X′) = Σ_i (W_V x′_i)(W_K x′_i)ᵀ", DAI, given=linear_head)
def _outer_products(head: LinearHead) -> float:
    keys, values = head.w_k @ head.demos, head.w_v @ head.demos
    slow = torch.zeros_like(head.w_v)
    for i in range(head.demos.shape[1]):  # element by element, with no matrix product
        for a in range(slow.shape[0]):
            for b in range(slow.shape[1]):
                slow[a, b] += values[a, i] * keys[b, i]
    # And as the change of the head's output: with the demonstrations less without them, for every unit query.
    units = torch.eye(head.w_k.shape[0], dtype=head.w_k.dtype)
    without = lin_attn(head.w_k @ head.own, head.w_v @ head.own, units)
    change = lin_attn(head.w_k @ head.both, head.w_v @ head.both, units) - without
    found = (
        outer_products(keys, values).sum(dim=0),
        state_weights(keys, values),
        linear_weights(head.w_v, head.w_k, head.demos),
    )
    return max(relative_error(update, expected) for update in found for expected in (slow, change))


@identity(
    "(W_V+ΔV)X((W_K+ΔK)X)ᵀq = [W_V G W_Kᵀ + W_V G ΔKᵀ + ΔV G W_Kᵀ + ΔV G ΔKᵀ] q,  G = XXᵀ", DAI, given=linear_head
)
def _four_terms(h: LinearHead) -> Sides:
    return four_terms(h.w_v, h.w_k, h.delta_v, h.delta_k, h.own).total @ h.query, h.fine_tuned()


@_four_terms.misprint("(W_V+ΔV) X Xᵀ (W_K+ΔK) q  [no transpose]", NOTE)
def _tuned_without_transpose(h: LinearHead) -> Sides:
    printed = (h.w_v + h.delta_v) @ h.own @ h.own.T @ (h.w_k + h.delta_k)
    return printed @ h.query, h.fine_tuned()


@_four_terms.misprint("w(X) + W_V G ΔK + ΔV G W_K + ΔV G ΔK  [no transposes]", NOTE)
def _terms_without_transpose(h: LinearHead) -> Sides:
    gram = h.own @ h.own.T
    base = h.w_v @ gram @ h.w_k.T
    printed = base + h.w_v @ gram @ h.delta_k + h.delta_v @ gram @ h.w_k + h.delta_v @ gram @ h.delta_k
    return printed @ h.query, h.fine_tuned()


@identity("SoftAttn over [X′,X] = λ y_X′ + (1−λ) y_X,  λ = Z′/(Z′+Z)", DAI + ", exact for softmax", given=linear_head)
def _softmax_split(head: LinearHead) -> Sides:
    return head.split().output, head.in_context(soft_attn)


@_softmax_split.misprint("softmax: y = y_X′ + y_X  [no masses]", NOTE)
def _softmax_as_sum(head: LinearHead) -> Sides:
    return head.split().demos + head.split().own, head.in_context(soft_attn)


@_softmax_split.misprint("softmax: λ = the share of tokens  [not of mass]", NOTE)
def _softmax_by_count(head: LinearHead) -> Sides:
    split, share = head.split(), head.demos.shape[1] / head.both.shape[1]
    return share * split.demos + (1 - share) * split.own, head.in_context(soft_attn)


@_softmax_split.misprint("softmax: y = (w(X) + w(X′)) q", NOTE)
def _softmax_as_linear(head: LinearHead) -> Sides:
    return head.in_context(), head.in_context(soft_attn)


IDENTITIES = (
    _sgd,
    _bias,
    _momentum_decay,
    _every_option,
    _contributions,
    _linear_split,
    _outer_products,
    _four_terms,
    _softmax_split,
)
