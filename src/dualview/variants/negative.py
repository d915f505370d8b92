"""Attention with negative samples (Ren & Liu 2024, arXiv 2310.13220; the talk's "negative model").

Their dual loss aligns W φ(k_i) with v_i and has no negatives. Adding some,

    L = −(1/ηD) Σ_i [ v_iᵀ W φ(k_i) − (β/k) Σ_{j∈N(i)} v_jᵀ W φ(k_i) ],

a step of gradient descent gives softmax attention with each value moved away from those of its negatives:

    ṽ_i = v_i − (β/k) Σ_{j∈N(i)} v_j,        y_t = Ṽ softmax(Kᵀ q_t / √d)

j is on the value side and i on the key side; keys and logits stay as they are. β = 0 is softmax attention, to the bit
that of `sdpa`.

N(i), here: the min(k, i−1) earlier tokens that i may read with the lowest k_i·k_j, per key/value head and after
rotation. Only earlier ones, so that decoding with a cache is possible; β is divided by k even where fewer than k exist.
Ties go to the earliest token. The choice carries no gradient. With a bias on the value projection, v_j includes it, as
the loss has it (the paper's x̃_i = x_i − (β/k) Σ x_j would leave it out). Choosing costs a key × key product, in slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.variants.base import AtLeastOne, Coefficient, over_heads
from dualview.variants.softmax import Call, softmax_attention, take_rows
from dualview.variants.sums.context import CarryingVariant, sums_of_every_key
from dualview.variants.sums.layout import Layout

# Rows whose key products are in memory at once; it does not change the result.
_ROWS = 256


@dataclass(frozen=True)
class Negative(CarryingVariant):
    """Softmax attention on values moved away, by β/k each, from the k earlier tokens least similar to them."""

    beta: float = 0.1
    k: AtLeastOne = 1

    name: ClassVar[str] = "negative"
    symbol: ClassVar[str] = "beta"

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        negatives = sums_of_every_key(call, lambda rows: sum_of_negatives(call.key, call.value, self.k, rows))
        share = over_heads(coefficient) / self.k
        return softmax_attention(call.with_value((call.value - share * negatives).to(call.value.dtype)))


def sum_of_negatives(
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_value"],
    k: int,
    layout: Layout,
) -> Float[Tensor, "batch kv_head row d_value"]:
    """Σ_{j∈N(i)} v_j for the rows of the layout."""
    rows = layout.own.shape[1]
    parts = [_slice_of_negatives(key, value, k, layout, slice(at, at + _ROWS)) for at in range(0, rows, _ROWS)]
    return torch.cat(parts, 2)


def _slice_of_negatives(key: Tensor, value: Tensor, k: int, layout: Layout, rows: slice) -> Tensor:
    with torch.no_grad():
        products = take_rows(key, layout.own[:, rows]) @ key.mT
        products = products.masked_fill(~layout.earlier(rows)[:, None], torch.inf)
    total = torch.zeros_like(value[:, :, :1]).expand(-1, -1, products.shape[2], -1)
    for _ in range(min(k, key.shape[2])):
        # One at a time, because argmin breaks ties (a zero key ties with everything) by the earliest token and topk by
        # no rule: cached decoding must choose as the full pass does.
        lowest = products.argmin(-1, keepdim=True)
        found = products.gather(-1, lowest).isfinite()
        total = total + value.gather(2, lowest.expand(-1, -1, -1, value.shape[3])) * found
        products.scatter_(-1, lowest, torch.inf)
    return total
