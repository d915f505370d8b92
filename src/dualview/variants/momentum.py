"""Momentum attention (MoAttn; Dai et al. 2022, arXiv 2212.10559).

If in-context learning is gradient descent whose error signals are the values, then gradient descent with momentum,
Θ_t = Θ_{t−1} − γ Σ_{i<t} η^{t−i} ∇f, suggests adding a moving sum of the values to the attention output:

    MoAttn(V, K, q_t) = V softmax(Kᵀ q_t / √d) + Σ_{i=1}^{t−1} η^{t−i} v_i,        0 ≤ η < 1

per head and not divided by 1 − η. η = 0 is softmax attention, to the bit that of `sdpa`; at η = ½ the added weights sum
to 1, like those of the softmax. The paper gives no value of η and released no code.

Where this file has to choose: the sum runs over the tokens that t may read, so a sliding window cuts it (which is also
what a cache that drops older values can still compute); t − i counts real tokens, so padding is not seen; attention
dropout does not touch the sum; in a group of query heads that share their values, they share the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dualview.variants.base import Coefficient, Variant, to_query_heads
from dualview.variants.softmax import Call, softmax_attention
from dualview.variants.sums.scan import moving_sum


@dataclass(frozen=True)
class Momentum(Variant):
    """Softmax attention plus Σ_{i<t} η^{t−i} v_i. A learnable η is kept as its logit, `eta_logit`."""

    eta: float = 0.5

    name: ClassVar[str] = "momentum"
    symbol: ClassVar[str] = "eta"
    bounded: ClassVar[bool] = True

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        momentum = moving_sum(call.value, coefficient, call.layout)
        return softmax_attention(call) + to_query_heads(momentum, call.heads)
