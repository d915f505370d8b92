"""Attention on signed values with one token spared, and measurements of the attention sink.

A trained model attends strongly to its first token and takes little from it: an attention sink (Xiao et al. 2023, arXiv
2309.17453), with a small value. sign(v) makes every value equally large, so a constant scale should damage the sink
most; a scale per token keeps it small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.anatomy.dispatch import AttentionCall, run_forward
from dualview.anatomy.kernels import attend, final_logits
from dualview.models.language_model import LanguageModel
from dualview.tasks.prompts import resolve_bos
from dualview.variants.base import Coefficient, over_heads, to_query_heads
from dualview.variants.sign import Sign, running_mean, straight_through_sign
from dualview.variants.softmax import Call, softmax_attention

SINK = 0
"""The first token."""


@dataclass(frozen=True)
class SparingSign(Sign):
    """Sign attention that leaves one token's value as it is (or, `muted`, makes it zero), at every layer.

    The scale of the other tokens is what it would be if none were spared.
    """

    spared: int = SINK
    muted: bool = False

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        size = call.value.abs().mean(-1, keepdim=True)
        one = _only(call, self.spared)
        signed = over_heads(coefficient) * straight_through_sign(call.value) * (1 - one)
        own = call.value * (0 if self.muted else one)
        if self.scale == "token":
            signed = signed * size
        if self.scale != "sequence":
            return softmax_attention(call.with_value((signed + own).to(call.value.dtype)))
        scale = to_query_heads(running_mean(size, call.layout), call.heads)
        return softmax_attention(call.with_value(signed)) * scale + softmax_attention(call.with_value(own))


@dataclass(frozen=True)
class Muted(Sign):
    """Plain softmax attention with one token's value set to zero: what the model loses without its sink's value."""

    spared: int = SINK

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        return softmax_attention(call.with_value(call.value * (1 - _only(call, self.spared))))


def _only(call: Call, token: int) -> Float[Tensor, "key 1"]:
    """1 at one key, 0 elsewhere."""
    at = torch.arange(call.value.shape[2], device=call.value.device)
    return (at == token).to(call.value.dtype)[:, None]


def text_rows(lm: LanguageModel, documents: Sequence[str], count: int, length: int) -> Int[Tensor, "row token"]:
    """Rows of `length` + 1 tokens, BOS first where the tokenizer puts one; fewer than `count` if the text is too short.

    The first piece of every document comes before any second one, documents in the order of a hash: so the rows come
    from as many documents as possible, from all of the text.
    """
    head = [] if (bos := resolve_bos(lm.tokenizer, "auto")) is None else [bos]
    size = length + 1 - len(head)
    pieces: list[tuple[int, list[int]]] = []
    for document in sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest()):
        ids: list[int] = lm.tokenizer(document, add_special_tokens=False)["input_ids"]
        pieces += [(n, head + ids[n * size : (n + 1) * size]) for n in range(len(ids) // size)]
        if sum(n == 0 for n, _ in pieces) == count:
            break
    pieces.sort(key=lambda piece: piece[0])
    rows = [row for _, row in pieces[:count]]
    return torch.tensor(rows, dtype=torch.long, device=lm.device).view(-1, length + 1)


@dataclass(frozen=True)
class SinkReport:
    """The first token, layer by layer, averaged over rows, heads and the tokens after it."""

    mass: Float[np.ndarray, " layer"]
    """How much of the attention it gets."""
    even: float
    """What it would get if all tokens got the same."""
    value: Float[np.ndarray, " layer"]
    """The norm of its value over the median norm of the others'."""
    share: Float[np.ndarray, " layer"]
    """Its share a_0 ‖v_0‖ / Σ_i a_i ‖v_i‖ of the attention's sum. With all values of one size this would be
    `mass`."""
    size: Float[np.ndarray, "layer kv_head"]
    """mean |v| over the other tokens and d: the constant that keeps a head's mean magnitude."""

    def to_json(self) -> dict[str, Any]:
        per_layer = {name: getattr(self, name).tolist() for name in ("mass", "value", "share", "size")}
        return {**per_layer, "even": self.even}


class _Observe:
    """Runs the model's own attention and keeps the numbers of `SinkReport`, row by row."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []

    def attend(self, layer: int, call: AttentionCall) -> Float[Tensor, "batch query head d_value"]:
        norm = call.v.norm(dim=-1)
        groups = call.q.shape[1] // call.k.shape[1]
        weights = _weights(call)[:, :, 1:]
        added = weights * norm.repeat_interleave(groups, 1)[:, :, None]
        self.layers.append(
            {
                "mass": weights[..., SINK].mean(),
                "value": (norm[..., SINK] / norm[..., 1:].median(-1).values).mean(),
                "share": (added[..., SINK] / added.sum(-1)).mean(),
                "size": call.v[:, :, 1:].abs().mean((0, 2, 3)),
            }
        )
        if call.native is not None:
            return call.native()
        at = torch.arange(call.k.shape[2], device=call.k.device)
        return attend(call.q, call.k, call.v, call.rule, causal=True, key_at=at).out.transpose(1, 2)


def _weights(call: AttentionCall) -> Float[Tensor, "batch head query key"]:
    """The softmax, as a matrix."""
    groups = call.q.shape[1] // call.k.shape[1]
    at = torch.arange(call.k.shape[2], device=call.k.device)
    logits = call.q @ call.k.repeat_interleave(groups, 1).mT * call.rule.scale
    logits = final_logits(logits, call.rule, at)
    seen = call.rule.visible(at, at)
    causal = at[:, None] >= at
    return logits.masked_fill(~(causal if seen is None else causal & seen), -torch.inf).softmax(-1)


@torch.no_grad()
def observe_sink(lm: LanguageModel, rows: Int[Tensor, "row token"]) -> SinkReport:
    """Measure the first token of every row, in the model without variants."""
    passes: list[list[dict[str, Tensor]]] = []
    at = torch.arange(rows.shape[1] - 1, device=lm.device)
    for row in rows[:, :-1]:
        watch = _Observe()
        run_forward(lm.model, watch, row[None], at[None], at[-1:], native=True)
        passes.append(watch.layers)

    def averaged(name: str) -> np.ndarray:
        every = torch.stack([torch.stack([layer[name] for layer in one]) for one in passes])
        return every.double().mean(0).cpu().numpy()

    even = float(np.mean([1 / (t + 1) for t in range(1, len(at))]))
    return SinkReport(averaged("mass"), even, averaged("value"), averaged("share"), averaged("size"))
