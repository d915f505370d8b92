"""Regularised attention (Ren & Liu 2024, arXiv 2310.13220; the talk's "regularised model").

Adding (α/2) ‖W‖²_F to their dual loss, in two forms:

    slides   attention matrix A − αI:   y_t = V softmax(Kᵀ q_t / √d) − α v_t
    strict   what one step of gradient descent on that loss gives, W_1 = (1 − ηα) W_0 + ΔW:
             y_t = V softmax(Kᵀ q_t / √d) − ηα Σ_{j∈X_T, j≤t} a_tj v_j,      a_t the softmax weights

X_T are the query tokens, those behind W_0, as opposed to the demonstrations, which make ΔW. The learning rate η cancels
from everything else, so `alpha` stands for ηα in the strict form. The two forms agree only where X_T = {t} and
α_slides = α · a_tt, hence for no constant α. α = 0 is softmax attention in both, to the bit that of `sdpa`.

Which tokens are X_T: by default the token t alone, the setting of in-context regression, where the query is one token.
For prompts, `with demonstrations(model, n):` declares the first n real tokens (padding not counted; a number, or one
per row of the batch) demonstrations and all later ones, generated ones included, query tokens; rows inside the
demonstrations are then plain attention.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dualview.io.errors import UserError
from dualview.variants.base import Coefficient, Equipment, Variant, over_heads, to_query_heads
from dualview.variants.softmax import Call, attention_weights, softmax_attention, take_rows


class _Declared(Equipment):
    """A layer's state with the number of demonstrations, where `demonstrations` has declared it."""

    variant: Regularised
    demo_length: int | Int[Tensor, " batch"] | None = None
    """How many real tokens, from the start, are demonstrations."""


@dataclass(frozen=True)
class Regularised(Variant):
    """Softmax attention less α times the token's own value, or α times what the query tokens contribute."""

    alpha: float = 0.1
    form: Literal["slides", "strict"] = "slides"

    name: ClassVar[str] = "regularised"
    symbol: ClassVar[str] = "alpha"
    equipment: ClassVar[type[Equipment]] = _Declared

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        alpha = over_heads(coefficient)
        equipment = getattr(call.module, "dualview", None)
        length = equipment.demo_length if isinstance(equipment, _Declared) else None
        if self.form == "strict" and length is not None:
            # Σ a_j v_j − α Σ_{j∈X_T} a_j v_j is attention on values of which those in X_T are scaled by 1 − α.
            in_query = _after_demonstrations(call, length)[:, None, :, None].to(call.value.dtype)
            scaled = call.value * (1 - alpha * in_query)
            return softmax_attention(call.with_value(scaled.to(call.value.dtype)))
        own = to_query_heads(take_rows(call.value, call.layout.own) * alpha, call.heads)
        if self.form == "strict":
            own = own * _weight_on_itself(call)
        return (softmax_attention(call) - own).to(call.value.dtype)


def _weight_on_itself(call: Call) -> Float[Tensor, "batch query head 1"]:
    """a_tt."""
    own = call.layout.own[:, None, :, None].expand(call.query.shape[0], call.heads, -1, 1)
    return attention_weights(call).gather(-1, own).transpose(1, 2)


def _after_demonstrations(call: Call, length: int | Int[Tensor, " batch"]) -> Bool[Tensor, "#batch key"]:
    """Which keys are query tokens."""
    if call.hides_past:
        raise UserError(
            "regularised (strict): in this sliding-window cache the demonstrations can no longer be separated "
            "from the query tokens; pass use_cache=False."
        )
    limit = torch.as_tensor(length, device=call.value.device).reshape(-1, 1)
    if limit.shape[0] not in (1, call.value.shape[0]):
        raise UserError(
            f"demonstrations: {limit.shape[0]} lengths were declared for a batch of {call.value.shape[0]} rows; "
            "give one number, or one per row."
        )
    return call.layout.before >= limit


@contextmanager
def demonstrations(model: nn.Module, length: int | Int[Tensor, " batch"]) -> Generator[None]:
    """Within this block, the first `length` real tokens are demonstrations and all later ones are query tokens."""
    _check_length(length)
    equipped = [m for m in model.modules() if isinstance(m, _Declared)]
    if not any(m.variant.form == "strict" for m in equipped):
        raise UserError("demonstrations: attach Regularised(form='strict') to the model first.")
    before = [m.demo_length for m in equipped]
    for m in equipped:
        m.demo_length = length
    try:
        yield
    finally:
        for m, was in zip(equipped, before, strict=True):
            m.demo_length = was


def _check_length(length: object) -> None:
    if isinstance(length, Tensor):
        whole = not (length.is_floating_point() or length.is_complex() or length.dtype == torch.bool)
        good = whole and length.ndim <= 1 and bool((length >= 0).all())
    else:
        good = isinstance(length, int) and not isinstance(length, bool) and length >= 0
    if not good:
        raise UserError(
            "demonstrations: the length must be a whole number of tokens from 0 on, or a tensor with one per row of "
            f"the batch, not {length!r}."
        )
