"""Identities of trained layers (Irie et al.) and of linear and softmax attention (Dai et al.): T1 to T2c."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dualview.duality.theory.coefficients import constant_rate
from dualview.duality.theory.icl_as_update import (
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
from dualview.duality.verify.check import Draws, Identity

IRIE = "Irie et al. 2022"
DAI = "Dai et al. 2023"


@dataclass(frozen=True)
class Trained:
    """A hidden linear layer of a small network before and after training, and its dual form."""

    before: Float[Tensor, "d_out d_in"]
    after: Float[Tensor, "d_out d_in"]
    bias_before: Float[Tensor, " d_out"]
    bias_after: Float[Tensor, " d_out"]
    form: DualForm
    x: Float[Tensor, "d_in query"]
    steps: int
    lr: float

    @property
    def output_change(self) -> Float[Tensor, "d_out query"]:
        """(W_T − W_0) x, as the trained layer has it."""
        return (self.after - self.before) @ self.x


def train(draws: Draws, *, decay: float = 0.0, clip: float | None = None, **sgd: float | bool) -> Trained:
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
    return Trained(
        before=before,
        after=layer.weight.detach(),
        bias_before=bias_before,
        bias_after=layer.bias.detach(),
        form=recorder.dual(),
        x=draws.normal(d_in, 3),
        steps=steps,
        lr=lr,
    )


def _sgd(draws: Draws) -> float:
    run = train(draws)
    errors = -run.lr * run.form.grads
    return relative_error(lin_attn(run.form.keys, errors, run.x), run.output_change)


def _bias(draws: Draws) -> float:
    run = train(draws)
    return relative_error((-run.lr * run.form.grads).sum(dim=1), run.bias_after - run.bias_before)


def _momentum_decay(draws: Draws) -> float:
    momentum, decay = draws.number(0.1, 0.95), draws.number(0.1, 1.0)
    run = train(draws, decay=decay, momentum=momentum)
    known = constant_rate(run.steps, run.lr, momentum, decay)
    errors = run.form.grads * torch.tensor(known.steps, dtype=torch.float64)[run.form.index.step]
    found = known.initial * run.before @ run.x + lin_attn(run.form.keys, errors, run.x)
    return relative_error(found, run.after @ run.x)


def _every_option(draws: Draws) -> float:
    nesterov = bool(draws.size(0, 1))
    options = {"momentum": draws.number(0.1, 0.9), "weight_decay": draws.number(0.01, 0.5), "nesterov": nesterov}
    run = train(draws, clip=0.3, dampening=0.0 if nesterov else draws.number(0.1, 0.9), **options)
    return relative_error(run.form.weight() - run.before, run.after - run.before)


def _contributions(draws: Draws) -> float:
    run = train(draws, momentum=draws.number(0.1, 0.9))
    direction = draws.normal(run.before.shape[0])
    return relative_error(run.form.contributions(run.x, direction).sum(dim=0), direction @ run.output_change)


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


def in_context(head: LinearHead) -> Float[Tensor, " d"]:
    """Linear attention over [X', X], as a layer computes it."""
    both = torch.cat([head.demos, head.own], dim=1)
    return lin_attn(head.w_k @ both, head.w_v @ both, head.query)


def fine_tuned(head: LinearHead) -> Float[Tensor, " d"]:
    """Linear attention over X with tuned projections, as a layer computes it."""
    return lin_attn((head.w_k + head.delta_k) @ head.own, (head.w_v + head.delta_v) @ head.own, head.query)


def softmax_in_context(head: LinearHead) -> Float[Tensor, " d"]:
    """Softmax attention over [X', X]."""
    both = torch.cat([head.demos, head.own], dim=1)
    return soft_attn(head.w_k @ both, head.w_v @ both, head.query)


def _linear_split(draws: Draws) -> float:
    head = linear_head(draws)
    return relative_error(linear_split(head.w_v, head.w_k, head.demos, head.own)(head.query), in_context(head))


def _outer_products(draws: Draws) -> float:
    head = linear_head(draws)
    keys, values = head.w_k @ head.demos, head.w_v @ head.demos
    slow = torch.zeros_like(head.w_v)
    for i in range(head.demos.shape[1]):  # element by element, with no matrix product
        for a in range(slow.shape[0]):
            for b in range(slow.shape[1]):
                slow[a, b] += values[a, i] * keys[b, i]
    # And as the change of what the head says: with the demonstrations less without them, for every unit query.
    both, units = torch.cat([head.demos, head.own], dim=1), torch.eye(head.w_k.shape[0], dtype=head.w_k.dtype)
    said = lin_attn(head.w_k @ both, head.w_v @ both, units) - lin_attn(head.w_k @ head.own, head.w_v @ head.own, units)
    found = (
        outer_products(keys, values).sum(dim=0),
        state_weights(keys, values),
        linear_weights(head.w_v, head.w_k, head.demos),
    )
    return max(relative_error(update, aim) for update in found for aim in (slow, said))


def _four_terms(draws: Draws) -> float:
    head = linear_head(draws)
    terms = four_terms(head.w_v, head.w_k, head.delta_v, head.delta_k, head.own)
    return relative_error(terms.total @ head.query, fine_tuned(head))


def _softmax_split(draws: Draws) -> float:
    head = linear_head(draws)
    split = softmax_split(
        head.w_k @ head.demos, head.w_v @ head.demos, head.w_k @ head.own, head.w_v @ head.own, head.query
    )
    return relative_error(split.output, softmax_in_context(head))


IDENTITIES = (
    Identity("W_T x = W₀x + LinAttn(X, E, x),  e_t = −η ∂L/∂(W x_t) at step t", IRIE, _sgd, 1e-11),
    Identity("b_T = b₀ + Σ_t e_t", IRIE, _bias, 1e-11),
    Identity(
        "momentum μ, decoupled decay λ:  W_T x = (1−ηλ)^T W₀x + Σ_s c_s G_s X_sᵀ x,  "
        "c_s = −η Σ_{t≥s} (1−ηλ)^(T−1−t) μ^(t−s)",
        IRIE + ", extended",
        _momentum_decay,
    ),
    Identity(
        "Nesterov or dampening, torch's coupled decay, clipping:  W_T = a W₀ + Σ_s c_s G_s X_sᵀ",
        IRIE + ", extended",
        _every_option,
        1e-11,
    ),
    Identity("⟨u, (W_T − W₀)x⟩ = Σ_t ⟨u, e_t⟩ (x_tᵀ x)", IRIE, _contributions, 1e-11),
    Identity("LinAttn(W_K[X′,X], W_V[X′,X], q) = (w(X) + w(X′)) q,  w(D) = W_V D Dᵀ W_Kᵀ", DAI, _linear_split),
    Identity("ΔW_ICL = w(X′) = Σ_i (W_V x′_i)(W_K x′_i)ᵀ", DAI, _outer_products),
    Identity("(W_V+ΔV)X((W_K+ΔK)X)ᵀq = [W_V G W_Kᵀ + W_V G ΔKᵀ + ΔV G W_Kᵀ + ΔV G ΔKᵀ] q,  G = XXᵀ", DAI, _four_terms),
    Identity("SoftAttn over [X′,X] = λ y_X′ + (1−λ) y_X,  λ = Z′/(Z′+Z)", DAI + ", exact for softmax", _softmax_split),
)
