"""The arms of the retrofit: what is added to a pretrained model's attention before its training continues.

    plain            nothing: the control
    momentum         + Σ_{i<t} η^{t−i} v_i, η = tanh(r) of each head learnt from 0
    momentum_0.1     the same with η fixed (any number in (0, 1))
    token_shift      the same sum mixed into the values, η learnt from 0
    alibi            − σ slope_h (t − i) on the logits, σ of each head learnt from 0
    sign             α sign(v), α of each head learnt from its mean |v|
    sign_token       α mean|v_i| sign(v_i), α of each head learnt from 1

Those learnt from 0 start as the pretrained model. The others cannot: their first loss says what they change.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualview.variants import Alibi, Momentum, Sign, TokenShift, Variant, attach
from dualview.variants.alibi import alibi_slopes
from dualview.variants.base import Coefficient, Equipment, over_heads
from dualview.variants.softmax import Call, softmax_attention

ARMS = ("plain", "momentum", "momentum_0.1", "momentum_0.5", "token_shift", "alibi", "sign", "sign_token")
_BLOCK = 64
_WIDER = 8
"""Dimensions added to queries and keys: two are used, and fused kernels want multiples of eight."""


def _bounded(raw: Coefficient) -> Tensor:
    """η = tanh(r): in (−1, 1) as the sum needs, 0 at 0, where its derivative is 1 (a logit never reaches 0)."""
    return torch.tanh(torch.as_tensor(raw))


@dataclass(frozen=True)
class MomentumFromZero(Momentum):
    eta: float = 0.0
    bounded: ClassVar[bool] = False

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        return super().attend(call, _bounded(coefficient))


@dataclass(frozen=True)
class TokenShiftFromZero(TokenShift):
    eta: float = 0.0
    bounded: ClassVar[bool] = False

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        return super().attend(call, _bounded(coefficient))


@dataclass(frozen=True)
class FlashAlibi(Alibi):
    """ALiBi as plain attention on two more dimensions, so that a fused kernel does it.

    A softmax does not see what is added to a whole row, so −c (t − i) is c · i: (q, c, c) · (k, 64 ⌊i/64⌋, i mod 64).
    The position is split in two because bfloat16 holds whole numbers only up to 256.
    """

    strength: float = 0.0

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        if call.softcap is not None or call.sinks is not None:  # these do see it
            return super().attend(call, coefficient)
        strength = over_heads(coefficient)
        if isinstance(strength, Tensor):
            strength = strength.repeat_interleave(call.heads // strength.shape[1], dim=1)
        slopes = alibi_slopes(call.heads, torch.promote_types(call.query.dtype, torch.float32), call.query.device)
        slope = (strength * slopes[None, :, None, None] / call.scale).to(call.query.dtype)
        place = call.layout.before[:, None, :, None]
        query = torch.cat([call.query, *[slope.expand(*call.query.shape[:3], 1)] * 2], -1)
        parts = [(place - place % _BLOCK).to(call.key.dtype), (place % _BLOCK).to(call.key.dtype)]
        key = torch.cat([call.key, *(part.expand(*call.key.shape[:3], 1) for part in parts)], -1)
        query, key = (nn.functional.pad(x, (0, _WIDER - 2)) for x in (query, key))
        value, width = nn.functional.pad(call.value, (0, _WIDER)), call.value.shape[-1]
        return softmax_attention(replace(call, query=query, key=key, value=value, scaling=call.scale))[..., :width]


def variant_of(arm: str) -> Variant | None:
    """What an arm adds; None for the control. ValueError for an arm that there is not."""
    learnt: Any = {"learnable": True, "per": "head"}
    known: dict[str, Variant | None] = {
        "plain": None,
        "momentum": MomentumFromZero(**learnt),
        "token_shift": TokenShiftFromZero(**learnt),
        "alibi": FlashAlibi(**learnt),
        "sign": Sign(scale="constant", **learnt),
        "sign_token": Sign(scale="token", **learnt),
    }
    if arm in known:
        return known[arm]
    kind, _, number = arm.partition("_")
    try:
        eta = float(number)
    except ValueError:
        eta = 0.0
    if kind != "momentum" or not 0 < eta < 1:
        raise ValueError(f"there is no arm {arm}; choose from {', '.join(known)} and momentum_<η> with 0 < η < 1")
    return Momentum(eta=eta)


def title_of(arm: str) -> str:
    """How tables name an arm.

    >>> title_of("momentum_0.1"), title_of("token_shift")
    ('momentum, η = 0.1', 'token shift, η learnt')
    """
    titles = {
        "plain": "nothing (control)",
        "momentum": "momentum, η learnt",
        "token_shift": "token shift, η learnt",
        "alibi": "ALiBi, σ learnt",
        "sign": "sign, α learnt",
        "sign_token": "sign, α · token's mean",
    }
    return titles.get(arm) or f"momentum, η = {arm.partition('_')[2]}"


def starts_as_pretrained(arm: str) -> bool:
    return arm in ("plain", "momentum", "token_shift", "alibi")


def fitted(pretrained: PreTrainedModel, arm: str, sizes: Float[Tensor, "layer kv_head"]) -> PreTrainedModel:
    """A copy of the pretrained model with the arm's attention, ready to train; `sizes`: mean |v| of each head."""
    model = copy.deepcopy(pretrained).requires_grad_(True)
    variant = variant_of(arm)
    if variant is not None:
        attach(model, variant)
    if arm == "sign":
        with torch.no_grad():
            for equipment, size in zip(_equipment(model), sizes, strict=True):
                equipment.get_parameter("alpha").copy_(size)
    return model


def coefficients(model: nn.Module) -> list[list[float]] | None:
    """The coefficient of each head, layer by layer; None where nothing is learnt."""
    found: list[list[float]] = []
    for equipment in _equipment(model):
        raw = torch.as_tensor(equipment.coefficient()).detach()
        from_zero = isinstance(equipment.variant, MomentumFromZero | TokenShiftFromZero)
        found.append((_bounded(raw) if from_zero else raw).reshape(-1).tolist())
    return found or None


def _equipment(model: nn.Module) -> Sequence[Equipment]:
    return [each for each in model.modules() if isinstance(each, Equipment) and each.variant.learnable]
