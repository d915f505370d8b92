"""ALiBi (Press et al. 2022, arXiv 2108.12409), as a control for momentum attention.

    y_t = V softmax(Kᵀq_t / √d − σ · slope_h · (t − i)),        slope_h = 2^{−8h/H}, h = 1…H

Dai et al. put the gain of momentum attention down to a preference for recent tokens; a linear penalty on distance is
the plainest such preference. σ = 0 is softmax attention (equal to `sdpa` up to the rounding of another kernel).

The bias is added to the positions that the model already has (rotary, learnt); ALiBi as published has no others. For a
head count that is not a power of two the same geometric sequence is used, not the paper's interleaving. Distance is
counted in real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.variants.base import Coefficient, Variant, over_heads
from dualview.variants.softmax import Call, softmax_attention


@dataclass(frozen=True)
class Alibi(Variant):
    """Softmax attention with logits lowered in proportion to distance; σ is the strength."""

    strength: float = 1.0

    name: ClassVar[str] = "alibi"
    symbol: ClassVar[str] = "strength"

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        slopes = alibi_slopes(call.heads, torch.promote_types(call.query.dtype, torch.float32), call.query.device)
        strength = over_heads(coefficient)
        if isinstance(strength, Tensor):
            strength = strength.repeat_interleave(call.heads // strength.shape[1], dim=1)
        bias = -strength * slopes[None, :, None, None] * call.layout.distance()[:, None]
        return softmax_attention(call, bias.to(call.query.dtype))


def alibi_slopes(
    heads: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Float[Tensor, " head"]:
    """2^{−8/H}, 2^{−16/H}, …, 2^{−8}.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, dtype=dtype, device=device) / heads)
