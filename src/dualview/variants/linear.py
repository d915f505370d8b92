"""Linear attention, the relaxed form the papers analyse: softmax and its normaliser dropped.

    LinAttn(V, K, q_t) = s · Σ_{i≤t} v_i (k_iᵀ q_t)

It is the attention of Dai et al. 2022 (arXiv 2212.10559) and of von Oswald et al. 2023 (arXiv 2212.07677,
Proposition 1), where it equals a step of gradient descent exactly. The scale s is `scale` times the module's own
1/√d; the papers drop that too (`bare=True`). `average=True` divides by the number of tokens read, von Oswald's 1/N.

No setting gives softmax attention, and `scale` = 0 gives nothing at all. The weights are signed and unbounded: in a
model trained with softmax this is a diagnosis, not a drop-in. Attention dropout is not applied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.io.errors import UserError
from dualview.variants.base import Coefficient, Variant, over_heads, to_query_heads
from dualview.variants.softmax import Call, logits, readable
from dualview.variants.sums.scan import CHUNK, in_chunks


@dataclass(frozen=True)
class Linear(Variant):
    """Unnormalised causal attention without softmax."""

    scale: float = 1.0
    bare: bool = False
    """Drop the module's 1/√d as the papers do."""
    average: bool = False
    """Divide by the number of tokens the query reads."""

    name: ClassVar[str] = "linear"
    symbol: ClassVar[str] = "scale"

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        if call.softcap is not None or call.sinks is not None or call.bias is not None or _biased(call):
            raise UserError(
                "linear: this model caps its logits, has sinks or adds a position bias, none of which means anything "
                "without the softmax; use a model without them."
            )
        groups = call.heads // call.key.shape[1]
        scaling = 1.0 if self.bare else call.scaling
        key, value = (x.repeat_interleave(groups, dim=1) for x in (call.key, call.value))
        whole = replace(call, key=key, value=value, scaling=scaling)
        chunked = call.mask is None and call.past == 0
        out = _chunked(whole) if chunked else (logits(whole) * readable(whole)) @ value
        factor = over_heads(coefficient)
        if isinstance(factor, Tensor):
            factor = to_query_heads(factor, call.heads)
        out = out.transpose(1, 2) * factor
        return out / call.layout.count()[:, :, None, None] if self.average else out


def _biased(call: Call) -> bool:
    """Whether the mask adds something to keys that are read."""
    if call.mask is None or call.mask.dtype == torch.bool or torch.compiler.is_compiling():
        return False
    return bool(call.mask.masked_fill(~readable(call), 0.0).any())


def _chunked(call: Call) -> Float[Tensor, "batch head query d_value"]:
    """The plainly causal case in O(T): within a chunk as a product, across chunks through Σ k_i v_iᵀ."""
    query, key, value = (in_chunks(x, CHUNK) for x in (call.query * call.scale, call.key, call.value))
    within = (query @ key.mT).tril() @ value
    states = key.mT @ value
    before = states.cumsum(2).roll(1, 2)
    before = torch.cat([torch.zeros_like(before[:, :, :1]), before[:, :, 1:]], 2)
    return (within + query @ before).flatten(2, 3)[:, :, : call.query.shape[2]]
