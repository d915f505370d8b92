"""What the heads of a real model hold at one token, and the exact split of their softmax (Dai et al. 2023, T2c).

    y = λ y_demos + (1 − λ) y_own,      λ = Z'/(Z' + Z),   Z = Σ exp(logit)

recomputed for every layer and head from the model's own q, k and v (rotated, normed, grouped, soft-capped, windowed),
and compared with what its attention really gave. λ is 0 where the demonstrations are not read and 1 where nothing
else is. "Own" is everything that is no demonstration: BOS, the query's tokens, and a learnt sink where a model has one,
which takes mass and gives nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dualview.anatomy.dispatch import AttentionCall, Strategy
from dualview.anatomy.kernels import Rule, final_logits
from dualview.duality.on_model.single_prompt import forward_row, whole_row
from dualview.duality.theory.icl_as_update import SoftmaxSplit, merge, softmax_part
from dualview.duality.theory.linalg import norm
from dualview.duality.theory.toy_attention import relative_error
from dualview.io.errors import UserError
from dualview.models.language_model import LanguageModel


@dataclass(frozen=True)
class Heads:
    """One layer's attention as seen from the last token of a row."""

    q: Float[Tensor, "head d_head"]
    k: Float[Tensor, "kv_head key d_head"]
    v: Float[Tensor, "kv_head key d_value"]
    out: Float[Tensor, "head d_value"]
    """The output of the model's own attention."""
    rule: Rule
    at: Int[Tensor, " key"]

    @property
    def values(self) -> Float[Tensor, "head key d_value"]:
        """Each head's values: those of its group."""
        return self.v.repeat_interleave(self.q.shape[0] // self.v.shape[0], 0)

    def logits(self) -> Float[Tensor, "head key"]:
        """As the softmax sees them: scaled, soft-capped, biased, −∞ where a window hides the key."""
        keys = self.k.repeat_interleave(self.q.shape[0] // self.k.shape[0], 0)
        scaled = torch.einsum("hd,hkd->hk", self.q, keys) * self.rule.scale
        found = final_logits(scaled[None, :, None, :], self.rule, self.at)[0, :, 0]
        visible = self.rule.visible(self.at[-1:], self.at)
        return found if visible is None else found.masked_fill(~visible, -torch.inf)

    def weights(self) -> Float[Tensor, "head key"]:
        """The softmax mass on each key (they sum to 1, less what a sink takes)."""
        return torch.softmax(self._with_sink(self.logits()), -1)[:, : self.k.shape[1]]

    def split(self, demos: range) -> SoftmaxSplit:
        """y = λ y_demos + (1 − λ) y_own over every head; `demos` are the demonstrations' places in the row."""
        logits, values = self.logits(), self.values
        inside = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        inside[demos.start : demos.stop] = True
        own_logits, own_values = self._with_sink(logits[:, ~inside]), values[:, ~inside]
        if own_logits.shape[1] > own_values.shape[1]:
            # A sink takes mass and gives nothing: it is one more own token with a value of 0.
            own_values = torch.cat([own_values, torch.zeros_like(own_values[:, :1])], 1)
        return merge(softmax_part(logits[:, inside], values[:, inside]), softmax_part(own_logits, own_values))

    def conditioning(self) -> float:
        """How far relative changes of q, k and v can change the output, relative to it.

        A weight changes by at most 2 max|δ logit| of itself, and a logit by what ‖q‖‖k‖ (or its bias) is changed by;
        the values are then averaged, and may cancel: (1 + 2 max logit) ‖Σ_t w_t |v_t|‖ / ‖y‖.
        """
        logits, wide = self.logits().double(), self.k.double().norm(dim=-1)
        keys = wide.repeat_interleave(self.q.shape[0] // self.k.shape[0], 0)
        products = keys * self.q.double().norm(dim=-1, keepdim=True) * self.rule.scale
        seen = torch.where(torch.isfinite(logits), torch.maximum(products.abs(), logits.abs()), 0.0)
        summed = (self.weights().double().unsqueeze(-2) @ self.values.double().abs()).squeeze(-2)
        size = norm(self.out)
        return (1 + 2 * float(seen.max())) * norm(summed) / (size or 1.0)

    def _with_sink(self, logits: Float[Tensor, "head key"]) -> Float[Tensor, "head key_or_more"]:
        sinks = self.rule.sinks
        return logits if sinks is None else torch.cat([logits, sinks.to(logits)[:, None]], -1)


class Watching:
    """Attention as `inner` does it, keeping every layer's heads at the row's last token."""

    def __init__(self, inner: Strategy, at: Int[Tensor, " token"]):
        self.inner, self.at = inner, at
        self.layers: list[Heads] = []

    def attend(self, layer: int, call: AttentionCall) -> Float[Tensor, "batch query head d_value"]:
        out = self.inner.attend(layer, call)
        self.layers.append(Heads(call.q[0, :, -1], call.k[0], call.v[0], out[0, -1], call.rule, self.at))
        return out


def record_heads(lm: LanguageModel, ids: Sequence[int], positions: Sequence[int] | None = None) -> tuple[Heads, ...]:
    """Run one prompt and keep every layer's heads at its last token."""
    at = torch.tensor(list(range(len(ids)) if positions is None else positions), device=lm.device)
    watching = Watching(whole_row(lm, at), at)
    with torch.no_grad():
        forward_row(lm, ids, strategy=watching, positions=at.tolist())
    return tuple(watching.layers)


@dataclass(frozen=True)
class HeadSplits:
    """The split on every layer: how much of the attention is the demonstrations', and how exactly it adds up."""

    mass: Float[Tensor, "layer head"]
    """λ."""
    error: tuple[float, ...]
    """Per layer, ‖λ y_demos + (1 − λ) y_own − y‖ / ‖y‖ over all heads; rounding if all is well."""

    def to_json(self) -> dict[str, Any]:
        return {
            "mass_per_layer": [float(mass) for mass in self.mass.nanmean(1)],
            "mass": [[float(x) for x in layer] for layer in self.mass],
            "error_per_layer": list(self.error),
        }


def by_layer(heads: Sequence[Float[Tensor, "head ..."]]) -> Float[Tensor, "layer head ..."]:
    """One tensor of all layers; NaN where a layer has fewer heads than the widest one."""
    return pad_sequence([each.double().cpu() for each in heads], batch_first=True, padding_value=torch.nan)


def split_heads(layers: Sequence[Heads], demos: range) -> HeadSplits:
    """Split every layer's softmax at the demonstrations and put it together again."""
    if not layers or not 0 <= demos.start < demos.stop < layers[0].k.shape[1]:
        raise UserError("The softmax is split between demonstrations and query: give the places of both in the prompt.")
    splits = [layer.split(demos) for layer in layers]
    mass = by_layer([split.mass for split in splits])
    errors = [relative_error(s.output.cpu(), layer.out.cpu()) for s, layer in zip(splits, layers, strict=True)]
    return HeadSplits(mass, tuple(errors))
