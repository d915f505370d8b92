"""What a setting changes outside the span of the heads' own outputs, beyond what it changes in all queries of a class.

Demonstrations take a mass λ_h of head h's attention, so they shrink its zero-shot output y_h whatever they say:

    Δh = Σ_h λ_h O_h (y_demos,h − y_h) = … − Σ_h λ_h o_h,      o_h = O_h y_h

Fine-tuning shrinks heads, too. With a λ_h of its own for every head this is no multiple of h_zsl = Σ_h o_h + bias, but
it lies in the span of the o_h. And most of Δh is a direction m that all queries of a class share (whoever learns the
task writes the class's answer), more of it in some than in others. A test for more than both removes both from the
updates, query by query and layer by layer:

    off_span = (1 − P_q)(Δh_q − M z_q), less its part along (1 − P_q) m

P_q projects on span{o_1, …, o_H, h_zsl} of the query (h_zsl may lie outside because of the bias). z_q are its
covariates (`metrics.floors.covariates`: 1, the strength of its change, and what is known of the query), orthonormal
over the queries, and m is the part of M z_q that belongs to the 1. M is the least of
Σ_q ‖(1 − P_q)(Δh_q − M z_q)‖² + ρ ‖M‖². One after the other would not do: what is left of the first, (1 − P_q) m,
differs from query to query, alike in every setting that has m, and would pass for a similarity that is each query's
own.

The null compares off-span parts of different queries, each outside a span of its own, so it needs them as vectors, and
the records keep them for what is judged: as much again as those settings' h. The o_h themselves, heads times as much,
exist for one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.metrics.floors.covariates import covariates
from dualview.models import staying
from dualview.models.language_model import LanguageModel
from dualview.records.setting import MEAN_RIDGE, is_away

_ELEMENTS = 1 << 26
"""The largest array of head outputs, in numbers of 8 bytes."""
_RIDGE = 1e-5**2
"""ε, added to the squares of directions made of unit vectors: one that is shorter than 1e-5 is rounding.

Without a bias h_zsl is the sum of the o_h, and what rounding leaves of h_zsl − Σ o_h points anywhere: another machine's
points elsewhere, and a span that had it would remove something else from every update."""
_STEPS, _CLOSE = 100, 1e-8
"""The most steps towards the mean, and how near is near enough."""


def off_span(
    h: Float[Tensor, "setting query d_model"], span: Float[Tensor, "query vector d_model"]
) -> Float[Tensor, "setting query d_model"]:
    """Each query's vectors less their projection on its own span: h − cᵀG⁺s, c = ⟨s, h⟩, G = ⟨s, s⟩ for unit s."""
    return _Spans.of(span).outside(h)


def off_span_and_shared(
    h: Float[Tensor, "setting query d_model"],
    span: Float[Tensor, "query vector d_model"],
    known: Float[Tensor, "number query"] | None = None,
) -> Float[Tensor, "setting query d_model"]:
    """Each query's vectors beyond its span and what queries share (above); M is found by conjugate gradients.

    Queries that are not finite stay so, and have no part in M.
    """
    return _off_spans_and_shared(h, _Spans.of(span), known)


def _off_spans_and_shared(
    h: Float[Tensor, "setting query d_model"],
    spans: _Spans,
    known: Float[Tensor, "number query"] | None,
) -> Float[Tensor, "setting query d_model"]:
    if h.shape[1] == 1:
        return spans.outside(h)  # one query shares nothing with others
    finite = h.isfinite().all(-1)
    numbers: Any = covariates(cast(Any, h), cast(Any, finite), cast(Any, known))
    of_query = numbers.mT
    change = torch.zeros_like(numbers @ torch.zeros_like(h))
    left = numbers @ spans.outside(torch.where(finite[..., None], h, 0.0))
    towards, size = left, left.square().sum((-2, -1), keepdim=True)
    least = _CLOSE**2 * size
    for _ in range(_STEPS):
        if bool((size <= least).all()):
            break
        pulled = numbers @ spans.outside(of_query @ towards) + MEAN_RIDGE * towards
        step = (size / (towards * pulled).sum((-2, -1), keepdim=True)).nan_to_num(0.0, 0.0, 0.0)
        change, left = change + step * towards, left - step * pulled
        before, size = size, left.square().sum((-2, -1), keepdim=True)
        towards = left + (size / before).nan_to_num(0.0, 0.0, 0.0) * towards
    own, shared = spans.outside(h - of_query @ change), spans.outside(of_query[..., :1] @ change[..., :1, :])
    along = (own * shared).sum(-1, keepdim=True) / shared.square().sum(-1, keepdim=True)
    return own - along.nan_to_num(0.0, 0.0, 0.0) * shared


@dataclass(frozen=True)
class _Spans:
    """Each query's span, by vectors V = L⁻¹U: U are unit vectors, LLᵀ = UUᵀ + ε.

    h − VᵀVh leaves of a direction of size s the share ε/(s² + ε), and the same once more its square: nothing of one
    that stands out from rounding, all of one that is rounding.
    """

    vectors: Float[Tensor, "query vector d_model"]
    twice: Float[Tensor, "query vector vector"]
    """2 − VVᵀ: both rounds in one, (1 − VᵀV)² = 1 − Vᵀ(2 − VVᵀ)V."""

    @classmethod
    def of(cls, span: Float[Tensor, "query vector d_model"]) -> _Spans:
        return cls.within(span.clone())

    @classmethod
    def within(cls, span: Float[Tensor, "query vector d_model"]) -> _Spans:
        """The spans of vectors that are overwritten: nothing else here is as large."""
        length = span.norm(dim=-1, keepdim=True)
        unit = span.div_(length).masked_fill_(~(length > 0), 0.0)
        gram = unit @ unit.mT
        one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        root = torch.linalg.cholesky(gram + _RIDGE * one)
        # The inverse of a small matrix and a product: solving for vectors this long takes several times as long.
        vectors = torch.linalg.solve_triangular(root, one.expand_as(root), upper=False) @ unit
        return cls(vectors, 2 * one - vectors @ vectors.mT)

    def outside(self, h: Float[Tensor, "setting query d_model"]) -> Float[Tensor, "setting query d_model"]:
        rows = h.transpose(0, 1)
        weights = rows @ self.vectors.mT @ self.twice
        return torch.baddbmm(rows, weights, self.vectors, alpha=-1.0).transpose(0, 1)


Change = tuple[Float[np.ndarray, "query layer d_model"], Float[np.ndarray, "query layer d_model"]]
"""The outputs after and before."""


def off_spans(
    lm: LanguageModel,
    own: Float[np.ndarray, "query layer d_in"],
    zsl: Float[np.ndarray, "query layer d_model"],
    changes: Mapping[str, Change],
    gold: Int[np.ndarray, " query"] | None = None,
    known: Float[np.ndarray, "number query"] | None = None,
) -> dict[str, Float[np.ndarray, "query layer d_model"]]:
    """`off_span` of each change, given what enters the output projections in the zero-shot pass.

    gold    the queries' labels, for an M of each class
    known   what is known of each query (`metrics.floors.covariates`)

    Empty where an architecture's output projections do not read the heads side by side. Not finite changes stay so.
    Where the records are tensors on a GPU, so are these, if they fit.
    """
    layers = lm.anatomy.layers
    if any(layer.output_by_head() is None for layer in layers):
        return {}
    found = _empty(lm, own, zsl, list(changes))
    label = np.zeros(len(zsl)) if gold is None else gold
    classes = [np.flatnonzero(label == each) for each in np.unique(label)]
    widest = max(layer.heads * layer.d_model for layer in layers)

    def fill(number: int) -> None:
        by_head = layers[number].output_by_head()
        assert by_head is not None
        where = by_head.device if by_head.device.type == "cuda" else torch.device("cpu")
        weight = by_head.to(where, torch.float64)
        d_model, heads, _ = weight.shape
        most = max(1, _ELEMENTS // (heads * d_model))
        for rows in (part for each in classes for part in np.array_split(each, -(-each.size // most))):
            at = rows, number
            # Each side once: zsl is the base of several changes.
            sides = {id(side): side for change in (*changes.values(), (zsl,)) for side in change}
            h = {name: _doubles(side, at, where)[:, :d_model] for name, side in sides.items()}
            moved = torch.stack([h[id(after)] - h[id(before)] for after, before in changes.values()])
            spans = _Spans.within(_head_outputs(_doubles(own, at, where), weight, h.pop(id(zsl))))
            h.clear()  # what the changes were made of is not needed beside the spans
            numbers = None if known is None else torch.from_numpy(known[:, rows]).to(where)
            left = _off_spans_and_shared(moved, spans, numbers)
            for into, kept in zip(found.values(), left, strict=True):
                _write(into, (*at, slice(d_model)), kept)

    # Each thread has spans of its own, the largest arrays of a whole run.
    numbers = range(len(layers))
    if lm.device.type == "cuda":
        fill(0)  # alone: torch sets its linear algebra up at first use, which two threads must not do at once
        numbers = numbers[1:]
        # Most of the time goes into copying what is not there, which threads share.
        threads = nullcontext(ThreadPoolExecutor(1 if is_away(own) else 2))
    else:
        most = max((each.size for each in classes), default=1) * widest
        threads = _of_one_each(max(1, min(torch.get_num_threads(), _ELEMENTS // most)))
    with threads as pool, pool:
        list(pool.map(fill, numbers))
    return found


@contextmanager
def _of_one_each(count: int) -> Generator[ThreadPoolExecutor]:
    """So many threads that divide no product among further ones; a single one may.

    Products are small here and there are thousands one after another. Where other programs have the cores, too, torch's
    threads wait longer for each other at the end of each than they take for it.
    """
    before = torch.get_num_threads()
    try:
        yield ThreadPoolExecutor(count, initializer=partial(torch.set_num_threads, 1 if count > 1 else before))
    finally:
        torch.set_num_threads(before)


def _empty(lm: LanguageModel, own: np.ndarray, zsl: np.ndarray, names: list[str]) -> dict[str, np.ndarray]:
    """Arrays like `zsl`, in at least single precision, where `own` is if they fit there."""
    like: Any = own
    shape, wide = tuple(zsl.shape), "float64" if str(zsl.dtype).endswith("float64") else "float32"
    places: dict[str, Any]
    if is_away(own) and staying.fits(lm, len(names) * math.prod(shape) * np.dtype(wide).itemsize):
        places = {name: like.new_zeros(shape, dtype=getattr(torch, wide)) for name in names}
    else:
        # Not `zeros_like`, which writes the zeros: these pages are touched when they are filled.
        places = {name: np.zeros(shape, wide) for name in names}
    return places


def _head_outputs(
    own: Float[Tensor, "query d_in"],
    weight: Float[Tensor, "d_model head d_value"],
    zsl: Float[Tensor, "query d_model"],
) -> Float[Tensor, "query vector d_model"]:
    """Each query's O_h y_h and h_zsl."""
    _, heads, d_value = weight.shape
    y = own[:, : heads * d_value].unflatten(1, (heads, d_value))
    return torch.cat([torch.einsum("qhe,dhe->qhd", y, weight), zsl[:, None]], 1)


def _doubles(x: Any, at: tuple[np.ndarray, int], where: torch.device) -> Float[Tensor, "query width"]:
    """Some queries of one layer; made wide where they are needed, since copying them wide would take longer."""
    part = x[_places(x, at[0]), at[1]]
    return (part if is_away(part) else torch.from_numpy(part)).to(where).to(torch.float64)


def _write(into: Any, at: tuple[np.ndarray, int, slice], kept: Float[Tensor, "query d_model"]) -> None:
    if is_away(into):
        into[_places(into, at[0]), *at[1:]] = kept.to(into.dtype)
    else:
        into[at] = kept.to(torch.from_numpy(into[:0]).dtype).cpu().numpy()


def _places(x: Any, rows: Int[np.ndarray, " row"]) -> Any:
    """Which rows, for an array or for a tensor on its device."""
    return torch.from_numpy(rows).to(x.device) if is_away(x) else rows
