"""The tokens before every query, computed once: their keys and values at every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.anatomy.dispatch import AttentionCall, Unsupported
from dualview.anatomy.kernels import attend, by_token, with_sinks


@dataclass(frozen=True)
class Prefix:
    """Keys and values as attention sees them (rotated, normed), per layer; `length` 0 means no prefix."""

    length: int
    keys: tuple[Float[Tensor, "batch kv_head key d_head"], ...] = ()
    values: tuple[Float[Tensor, "batch kv_head key d_value"], ...] = ()
    special: int = 0
    """How many of its first tokens are not demonstrations (the BOS token)."""


class Causal:
    """Plain causal attention over whole rows of equal length; keeps keys and values if asked to."""

    def __init__(self, positions: Int[Tensor, " token"], *, keep: bool = False):
        self.positions = positions
        self.keep = keep
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: int, call: AttentionCall) -> Float[Tensor, "batch query head d_value"]:
        if call.unknown:
            raise Unsupported(f"its attention takes {', '.join(call.unknown)}")
        if self.keep:
            # Architectures pass views of a fused projection; kept as they are, they would hold on to all of it.
            self.keys.append(call.k.contiguous())
            self.values.append(call.v.contiguous())
        self.positions = self.positions.to(call.q.device)
        allowed = call.rule.visible(self.positions, self.positions)
        part = attend(call.q, call.k, call.v, call.rule, causal=True, allowed=allowed, key_at=self.positions)
        return by_token(with_sinks(part, call.rule.sinks))


def as_row(ids: Sequence[int], device: torch.device, batch: int = 1) -> Int[Tensor, "batch token"]:
    return torch.tensor([list(ids)], device=device).expand(batch, -1)
