"""Sign attention: attention on the signs of the values, y = V' softmax(Kᵀq / √d), v'_i = α s sign(v_i).

The exercise "sign gradient descent should be Attn(K, α sign(V), q)" has a negative answer (signSGD takes the sign of
the summed matrix): with linear attention it is a subgradient step on the L1 loss Σ ‖W k_i − y_i‖₁. This file makes it
usable with the model's own softmax, with three scales s:

    constant   s = 1: the scale of the values is lost, and tokens with near-zero values (attention sinks) are inflated
    sequence   s_t = mean of |v| over the tokens that the query t reads and over d: one scale per sequence and head
    token      s_i = mean over d of |v_i|: the L2-optimal binarisation of each value (XNOR-Net, arXiv 1603.05279)

The per-sequence scale is the running mean up to the query, not that of the whole sequence: the future stays unseen, and
decoding with a cache gives what the full pass gives. In a sliding window it is the mean over the window.

No value of α gives softmax attention; α = 1 keeps the mean magnitude for `sequence` and `token`. sign has derivative 0
almost everywhere, so it gets the straight-through one, ∂sign(v)/∂v := 1; the scales are differentiated as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.variants.base import Coefficient, Variant, over_heads, to_query_heads
from dualview.variants.softmax import Call, softmax_attention
from dualview.variants.sums.layout import Layout


@dataclass(frozen=True)
class Sign(Variant):
    """Attention on α · scale · sign(V)."""

    alpha: float = 1.0
    scale: Literal["constant", "sequence", "token"] = "token"

    name: ClassVar[str] = "sign"
    symbol: ClassVar[str] = "alpha"

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        value = over_heads(coefficient) * straight_through_sign(call.value)
        if self.scale == "token":
            value = value * call.value.abs().mean(-1, keepdim=True)
        out = softmax_attention(call.with_value(value.to(call.value.dtype)))
        if self.scale == "sequence":
            out = out * to_query_heads(running_mean(call.value.abs().mean(-1, keepdim=True), call.layout), call.heads)
        return out


def straight_through_sign(v: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """sign(v), with the gradient of v."""
    # Not v + (sign(v) − v).detach(): that rounds, and a sign should be exactly ±1.
    return torch.sign(v).detach() + (v - v.detach())


def running_mean(x: Float[Tensor, "batch kv_head key 1"], layout: Layout) -> Float[Tensor, "batch kv_head query 1"]:
    """The mean of x over the keys that each row reads, its own included."""
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = (x[..., 0].to(wide) * layout.real[:, None]).cumsum(-1)
    batch, heads, _ = sums.shape
    own = layout.own[:, None].expand(batch, heads, -1)
    total = sums.gather(-1, own)
    if not layout.plain:
        first = layout.first[:, None].expand(batch, heads, -1)
        total = total - torch.where(first > 0, sums.gather(-1, (first - 1).clamp(min=0)), 0.0)
    return (total / layout.count()[:, None])[..., None].to(x.dtype)
