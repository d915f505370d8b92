"""What a setting changes outside the span of the heads' own outputs, beyond what it changes in all queries of a class.

Demonstrations take a mass λ_h of head h's attention, so they shrink its zero-shot output y_h whatever they say:

    Δh = Σ_h λ_h O_h (y_demos,h − y_h) = … − Σ_h λ_h o_h,      o_h = O_h y_h

Fine-tuning shrinks heads, too. With a λ_h of its own for every head this is no multiple of h_zsl = Σ_h o_h + bias, but
it lies in the span of the o_h. And most of Δh is a direction m that all queries of a class share (whoever learns the
task writes the class's answer), more of it in some than in others. A test for more than both removes both from the
updates, query by query and layer by layer:

    off_span = (1 − P_q)(Δh_q − m), less its part along (1 − P_q) m

P_q projects on span{o_1, …, o_H, h_zsl} of the query (h_zsl may lie outside because of the bias), and m is the least of
Σ_q ‖(1 − P_q)(Δh_q − m)‖² + ρ n ‖m‖². One after the other would not do: what is left of the first, (1 − P_q) m, differs
from query to query, alike in every setting that has m, and would pass for a similarity that is each query's own.

The null compares off-span parts of different queries, each outside a span of its own, so it needs them as vectors, and
the records keep them for what is judged: as much again as those settings' h. The o_h themselves, heads times as much,
exist for one layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.models.language_model import LanguageModel
from dualview.records.setting import MEAN_RIDGE

_ELEMENTS = 1 << 26
"""The largest array of head outputs, in numbers of 8 bytes."""
_RIDGE = 1e-5**2
"""Added to the diagonal of G, the products of unit vectors: where they are shorter than 1e-5, a direction is rounding.

Without a bias h_zsl is the sum of the o_h, and what rounding leaves of h_zsl − Σ o_h points anywhere: another machine's
points elsewhere, and a span that had it would remove something else from every update."""
_STEPS, _CLOSE = 100, 1e-8
"""The most steps towards the mean, and how near is near enough."""


def off_span(
    h: Float[Tensor, "setting query d_model"], span: Float[Tensor, "query vector d_model"]
) -> Float[Tensor, "setting query d_model"]:
    """Each query's vectors less their projection on its own span: h − cᵀG⁺s, c = ⟨s, h⟩, G = ⟨s, s⟩ for unit s."""
    return _Spans.of(span).outside(h)


def off_span_and_mean(
    h: Float[Tensor, "setting query d_model"], span: Float[Tensor, "query vector d_model"]
) -> Float[Tensor, "setting query d_model"]:
    """Each query's vectors beyond its span and what all queries share (above); m is found by conjugate gradients.

    Queries that are not finite stay so, and have no part in m.
    """
    spans, finite = _Spans.of(span), h.isfinite().all(-1, keepdim=True)
    if h.shape[1] == 1:
        return spans.outside(h)  # one query shares nothing with others
    ridge = MEAN_RIDGE * h.shape[1]
    mean = torch.zeros_like(h[:, :1])
    left = spans.outside(torch.where(finite, h, 0.0)).sum(1, keepdim=True)
    towards, size = left, left.square().sum(-1, keepdim=True)
    least = _CLOSE**2 * size
    for _ in range(_STEPS):
        if bool((size <= least).all()):
            break
        pulled = spans.outside(torch.where(finite, towards, 0.0)).sum(1, keepdim=True) + ridge * towards
        step = (size / (towards * pulled).sum(-1, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)
        mean, left = mean + step * towards, left - step * pulled
        before, size = size, left.square().sum(-1, keepdim=True)
        towards = left + (size / before).nan_to_num(0.0, 0.0, 0.0) * towards
    own, shared = spans.outside(h - mean), spans.outside(mean.expand_as(h))
    along = (own * shared).sum(-1, keepdim=True) / shared.square().sum(-1, keepdim=True)
    return own - along.nan_to_num(0.0, 0.0, 0.0) * shared


@dataclass(frozen=True)
class _Spans:
    """Each query's span: unit vectors, and the Cholesky factor of their inner products."""

    unit: Float[Tensor, "query vector d_model"]
    factor: Float[Tensor, "query vector vector"]

    @classmethod
    def of(cls, span: Float[Tensor, "query vector d_model"]) -> _Spans:
        length = span.norm(dim=-1, keepdim=True)
        unit = torch.where(length > 0, span / length, 0.0)
        gram = unit @ unit.mT
        ridge = _RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return cls(unit, torch.linalg.cholesky(gram + ridge))

    def outside(self, h: Float[Tensor, "setting query d_model"]) -> Float[Tensor, "setting query d_model"]:
        # By Cholesky, which is quick in batches. Of a direction of size s the ridge leaves the share ε/(s² + ε), and
        # the second round its square: nothing of one that stands out from rounding, all of one that is rounding.
        vectors = h.transpose(0, 1)
        for _ in range(2):
            weights = torch.cholesky_solve(self.unit @ vectors.mT, self.factor)
            vectors = vectors - weights.mT @ self.unit
        return vectors.transpose(0, 1)


Change = tuple[Float[np.ndarray, "query layer d_model"], Float[np.ndarray, "query layer d_model"]]
"""The outputs after and before."""


def off_spans(
    lm: LanguageModel,
    own: Float[np.ndarray, "query layer d_in"],
    zsl: Float[np.ndarray, "query layer d_model"],
    changes: Mapping[str, Change],
    gold: Int[np.ndarray, " query"] | None = None,
) -> dict[str, Float[np.ndarray, "query layer d_model"]]:
    """`off_span` of each change, given what enters the output projections in the zero-shot pass.

    gold   the queries' labels, for an m of each class

    Empty where an architecture's output projections do not read the heads side by side. Not finite changes stay so.
    """
    layers = lm.anatomy.layers
    if any(layer.output_by_head() is None for layer in layers):
        return {}
    # Not `zeros_like`, which writes the zeros: these pages are touched when they are filled.
    found = {name: np.zeros(after.shape, after.dtype) for name, (after, _) in changes.items()}
    label = np.zeros(len(zsl)) if gold is None else gold
    classes = [np.flatnonzero(label == each) for each in np.unique(label)]

    def fill(number: int) -> None:
        by_head = layers[number].output_by_head()
        assert by_head is not None
        where = by_head.device if by_head.device.type == "cuda" else torch.device("cpu")
        weight = by_head.to(where, torch.float64)
        d_model, heads, d_value = weight.shape
        most = max(1, _ELEMENTS // (heads * d_model))
        for rows in (part for each in classes for part in np.array_split(each, -(-each.size // most))):
            at = rows, number
            y = _doubles(own, at, where)[:, : heads * d_value].unflatten(1, (heads, d_value))
            base = _doubles(zsl, at, where)[:, :d_model]
            span = torch.cat([torch.einsum("qhe,dhe->qhd", y, weight), base[:, None]], 1)
            sides = ((_doubles(side, at, where)[:, :d_model] for side in change) for change in changes.values())
            left = off_span_and_mean(torch.stack([after - before for after, before in sides]), span)
            for into, kept in zip(found.values(), left, strict=True):
                into[(*at, slice(d_model))] = kept.to(torch.from_numpy(into[:0]).dtype).cpu().numpy()

    fill(0)  # alone: torch sets its linear algebra up on a GPU at first use, which two threads must not do at once
    # On a GPU most of the time goes into copying, which threads share; on a processor torch has threads of its own.
    with ThreadPoolExecutor(4 if lm.device.type == "cuda" else 1) as pool:
        list(pool.map(fill, range(1, len(layers))))
    return found


def _doubles(x: np.ndarray, at: tuple[np.ndarray, int], where: torch.device) -> Float[Tensor, "query width"]:
    return torch.from_numpy(x[at]).to(where, torch.float64)
