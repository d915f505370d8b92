"""One attention call as Hugging Face makes it, and plain softmax attention on it.

The softmax goes through transformers' own `sdpa` function, so that a variant whose coefficient is 0 agrees with
`attn_implementation="sdpa"` to the bit. Only a soft-cap (Gemma 2) or sinks (GPT-OSS), which that function does not
know, are computed explicitly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.integrations import sdpa_attention

from dualview.anatomy.dispatch import FOREIGN, stated_reach
from dualview.io.errors import UserError
from dualview.variants.sums.layout import Layout, layout_of, visible


@dataclass(frozen=True)
class Call:
    """The arguments of one attention, after rotation and after the cache was updated."""

    query: Float[Tensor, "batch head query d_head"]
    key: Float[Tensor, "batch kv_head key d_head"]
    value: Float[Tensor, "batch kv_head key d_value"]
    mask: Tensor | None = None
    """[batch, 1, query, key], booleans (True: read) or numbers to add; None is plainly causal."""
    scaling: float | None = None
    dropout: float = 0.0
    module: nn.Module | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None
    bias: Float[Tensor, "batch head query key"] | None = None
    """A learnt position bias the model adds to its logits."""
    window: int | None = None
    """How far back the layer reads: its mask, or a truncated cache, may hide older keys."""

    @property
    def layout(self) -> Layout:
        return layout_of(self.mask, self.query.shape[2], self.key.shape[2], self.query.device)

    @property
    def scale(self) -> float:
        """What q·k is multiplied by: the module's own scale, or 1/√d where it states none."""
        return self.scaling if self.scaling is not None else self.query.shape[-1] ** -0.5

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def past(self) -> int:
        """Keys that come from a cache."""
        return self.key.shape[2] - self.query.shape[2]

    @property
    def hides_past(self) -> bool:
        """Some earlier keys may have left the window, so that the call does not show what they read."""
        return self.window is not None and self.past > 0 and self.key.shape[2] >= self.window

    def with_value(self, value: Tensor) -> Call:
        return replace(self, value=value)


def receive(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> Call:
    """A `Call` from the arguments every Hugging Face attention module passes."""
    foreign = [name for name in (*FOREIGN, "cache") if options.get(name) is not None]
    causal = options.get("is_causal")
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise UserError(f"{type(module).__name__} is not causal; the attention variants are for causal self-attention.")
    if foreign:
        raise UserError(
            f"{type(module).__name__} passes {', '.join(foreign)}, which the attention variants do not handle."
        )
    queries = query.shape[2]
    bias = options.get("position_bias")
    if attention_mask is None and 1 < queries < key.shape[2]:
        # A static cache being filled from empty: the keys after the queries are blank, and there is no mask to say so.
        key, value = key[:, :, :queries], value[:, :, :queries]
        bias = bias[..., :queries] if bias is not None else None
    window, chunk = stated_reach(module, options)
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    return Call(
        query, key, value, attention_mask, scaling, dropout, module, softcap, sinks, bias, window=window or chunk
    )


@dataclass(frozen=True)
class _Heads:
    """All that `sdpa` asks of an attention module."""

    num_key_value_groups: int
    is_causal: bool = True


def softmax_attention(
    call: Call, bias: Float[Tensor, "#batch head query key"] | None = None
) -> Float[Tensor, "batch query head d_value"]:
    """V softmax(Kᵀq · scaling + bias), the plain attention of the model, by the fastest kernel that can do it."""
    if call.softcap is not None or call.sinks is not None:
        weights = attention_weights(call, bias)
        weights = nn.functional.dropout(weights, call.dropout, training=call.dropout > 0)
        groups = call.heads // call.value.shape[1]
        return (weights @ call.value.repeat_interleave(groups, dim=1)).transpose(1, 2).contiguous()
    bias = _sum(call.bias, bias)
    # Without a mask, `sdpa` would take several queries for the first of the keys, not the last.
    mask = readable(call) if call.mask is None and call.past > 0 and call.query.shape[2] > 1 else call.mask
    sdpa = cast(Any, sdpa_attention).sdpa_attention_forward
    return sdpa(
        _Heads(call.heads // call.key.shape[1]),
        call.query,
        call.key,
        call.value,
        mask,
        dropout=call.dropout,
        scaling=call.scaling,
        position_bias=bias,
    )[0]


def attention_weights(
    call: Call, bias: Float[Tensor, "#batch head query key"] | None = None
) -> Float[Tensor, "batch head query key"]:
    """softmax(Kᵀq · scaling) as a matrix, with soft-cap, sinks, bias and mask; for what no fused kernel returns."""
    groups = call.heads // call.key.shape[1]
    scores = logits(call) if groups == 1 else logits(replace(call, key=call.key.repeat_interleave(groups, dim=1)))
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    bias = _sum(call.bias, bias)
    if bias is not None:
        scores = scores + bias
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores = scores + call.mask
    scores = scores.masked_fill(~readable(call), torch.finfo(scores.dtype).min)
    wide = torch.promote_types(scores.dtype, torch.float32)
    if call.sinks is None:
        return scores.softmax(-1, dtype=wide).to(scores.dtype)
    sinks = call.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1, dtype=wide)[..., :-1].to(scores.dtype)


def logits(call: Call) -> Float[Tensor, "batch head query key"]:
    """q·k times the module's own scale; heads of query and key must agree."""
    return call.query @ call.key.mT * call.scale


def readable(call: Call) -> Bool[Tensor, "#batch 1 query key"]:
    """Which keys each query reads."""
    if call.mask is not None:
        return visible(call.mask)
    queries, keys = call.query.shape[2], call.key.shape[2]
    return torch.ones(queries, keys, dtype=torch.bool, device=call.query.device).tril(keys - queries)[None, None]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def take_rows(
    x: Float[Tensor, "batch kv_head key d_value"], rows: Int[Tensor, "#batch query"]
) -> Float[Tensor, "batch kv_head query d_value"]:
    """x at one key index per query."""
    index = rows[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3])
    return x.gather(2, index)
