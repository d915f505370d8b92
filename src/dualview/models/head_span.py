"""What a setting changes outside the span of the heads' own outputs.

Demonstrations take a mass λ_h of head h's attention, so they shrink its zero-shot output y_h whatever they say:

    Δh = Σ_h λ_h O_h (y_demos,h − y_h) = … − Σ_h λ_h o_h,      o_h = O_h y_h

Fine-tuning shrinks heads, too. With a λ_h of its own for every head this is no multiple of h_zsl = Σ_h o_h + bias, but
it lies in the span of the o_h. So a test for more than shrinkage removes that span from both updates, query by query
and layer by layer (h_zsl with it, which the bias may keep outside; then zsl itself leaves nothing):

    off_span = (1 − P) h = (1 − P) Δh,      P the projection on span{o_1, …, o_H, h_zsl}

The null compares off-span parts of different queries, each outside a span of its own, so it needs them as vectors, and
the records keep them for the settings that are judged: as much again as those settings' h. The o_h themselves, heads
times as much, exist for one layer and a few queries at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualview.models.language_model import LanguageModel

_ELEMENTS = 1 << 25
"""The largest array of head outputs, in numbers of 8 bytes."""
_RIDGE = 1e-13
"""Added to the diagonal of G, which is singular: without a bias h_zsl is the sum of the o_h."""


def off_span(
    h: Float[Tensor, "setting query d_model"], span: Float[Tensor, "query vector d_model"]
) -> Float[Tensor, "setting query d_model"]:
    """Each query's vectors less their projection on its own span: h − cᵀG⁺s, c = ⟨s, h⟩, G = ⟨s, s⟩ for unit s."""
    length = span.norm(dim=-1, keepdim=True)
    unit = torch.where(length > 0, span / length, 0.0)
    gram, vectors = unit @ unit.mT, h.transpose(0, 1)
    # By Cholesky, which is quick in batches. The ridge's error ε/s, for a direction of size s, is squared by the second
    # round; in a direction without size the weights are arbitrary, and so is what they multiply: nothing.
    factor = torch.linalg.cholesky(gram + _RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))
    for _ in range(2):
        weights = torch.cholesky_solve(unit @ vectors.mT, factor)
        vectors = vectors - weights.mT @ unit
    return vectors.transpose(0, 1)


def off_spans(
    lm: LanguageModel,
    own: Float[np.ndarray, "query layer d_in"],
    zsl: Float[np.ndarray, "query layer d_model"],
    settings: Mapping[str, Float[np.ndarray, "query layer d_model"]],
) -> dict[str, Float[np.ndarray, "query layer d_model"]]:
    """`off_span` of each setting, given what enters the output projections in the zero-shot pass.

    Empty where an architecture's output projections do not read the heads side by side. Not finite updates stay so.
    """
    layers = lm.anatomy.layers
    if any(layer.output_by_head() is None for layer in layers):
        return {}
    # Not `zeros_like`, which writes the zeros: these pages are touched when they are filled.
    found = {name: np.zeros(h.shape, h.dtype) for name, h in settings.items()}

    def fill(number: int) -> None:
        by_head = layers[number].output_by_head()
        assert by_head is not None
        where = by_head.device if by_head.device.type == "cuda" else torch.device("cpu")
        weight = by_head.to(where, torch.float64)
        d_model, heads, d_value = weight.shape
        step = max(1, _ELEMENTS // (heads * d_model))
        for start in range(0, len(zsl), step):
            at = slice(start, start + step), number
            y, base, *rest = (_doubles(x, at, where) for x in (own, zsl, *settings.values()))
            y, base = y[:, : heads * d_value].unflatten(1, (heads, d_value)), base[:, :d_model]
            span = torch.cat([torch.einsum("qhe,dhe->qhd", y, weight), base[:, None]], 1)
            updates = torch.stack([h[:, :d_model] - base for h in rest])
            left = off_span(updates, span)
            for into, kept in zip(found.values(), left, strict=True):
                into[(*at, slice(d_model))] = kept.to(torch.from_numpy(into[:0]).dtype).cpu().numpy()

    fill(0)  # alone: torch sets its linear algebra up on a GPU at first use, which two threads must not do at once
    # On a GPU most of the time goes into copying, which threads share; on a processor torch has threads of its own.
    with ThreadPoolExecutor(4 if lm.device.type == "cuda" else 1) as pool:
        list(pool.map(fill, range(1, len(layers))))
    return found


def _doubles(x: np.ndarray, at: tuple[slice, int], where: torch.device) -> Float[Tensor, "query width"]:
    return torch.from_numpy(x[at]).to(where, torch.float64)
