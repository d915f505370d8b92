"""Token shift with momentum attention's moving sum: the control that Dai et al.'s experiment lacks.

Momentum attention adds m_t = Σ_{i<t} η^{t−i} v_i to the output of the softmax, and reads it as a momentum term.
A token shift (RWKV, arXiv 2305.13048) mixes each token with those just before it ahead of the attention,
with no such reading. Here the same sum, with the same η, is mixed into the values, and attention does the rest:

    v'_i = v_i + Σ_{j<i} η^{i−j} v_j,        y_t = V' softmax(Kᵀ q_t / √d)

Values are linear in the layer's input x, so this is W_V applied to a shifted input x_i + Σ_{j<i} η^{i−j} x_j (a bias
apart), read by V alone: queries and keys stay unshifted, as in momentum attention. It has the parameters and the cost
of momentum attention. If momentum gains no more than this does, a local smoothing of the values explains the gain.
η = 0 is softmax attention, to the bit that of `sdpa`.

Adding the sum at the output instead would be no control: since W_V is linear, that is momentum attention itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dualview.variants.base import Coefficient
from dualview.variants.softmax import Call, softmax_attention
from dualview.variants.sums.context import CarryingVariant, sums_of_every_key
from dualview.variants.sums.scan import moving_sum


@dataclass(frozen=True)
class TokenShift(CarryingVariant):
    """Softmax attention on values smoothed by momentum attention's own moving sum."""

    eta: float = 0.5

    name: ClassVar[str] = "token_shift"
    symbol: ClassVar[str] = "eta"
    bounded: ClassVar[bool] = True

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        shift = sums_of_every_key(call, lambda rows: moving_sum(call.value, coefficient, rows))
        return softmax_attention(call.with_value(call.value + shift))
