"""Asking a model queries: every candidate's log-probability, and the records, under one prefix and one set of weights.

`ask` is the one way in. It packs the queries and shares the prefix where the architecture allows it, and runs whole
prompts one at a time where it does not; the results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualview.anatomy.dispatch import run_forward
from dualview.anatomy.layers import Projection
from dualview.models.language_model import LanguageModel
from dualview.models.packing.rows import At, Pack, Tree, grow, plan
from dualview.models.prefix import Causal, Prefix, as_row
from dualview.models.probe import Layers, Packed, Trace, Whole, first_order, recording
from dualview.models.staying import Members, Places, host
from dualview.records import Setting
from dualview.tasks.prompts import Query

# What one forward pass may hold: tokens of packed queries, and bytes of logits. Larger packs gain nothing on a CPU,
# whose matrix products are at their peak by then; a GPU needs more to be busy.
_TOKENS = {"cpu": 2048, "cuda": 32768}
_LOGIT_BYTES = 1 << 28
TOP_K = 10


class Patch(Protocol):
    """Weights that replace the model's own during a pass; `rows` of them at once, one a batch row."""

    @property
    def rows(self) -> int: ...

    def applied(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class TappedQueries:
    """One tapped projection at every query's recorded token (of the patch's first row); tensors if they `stay`."""

    x: Float[np.ndarray, "detailed d_in"]
    y: Float[np.ndarray, "detailed row"]


@dataclass(frozen=True)
class Asked:
    """The result of one pass over all queries, one `Setting` for each row of the patch."""

    settings: tuple[Setting, ...]
    columns: np.ndarray
    demo_logits: Float[np.ndarray, "detailed layer key"] | None = None
    tapped: tuple[TappedQueries, ...] = ()
    own: Float[np.ndarray, "query layer d_in"] | None = None
    """What enters each output projection (of the patch's first row); narrower layers leave zeros."""


@dataclass(frozen=True)
class PassPlan:
    """How to ask: the prefix's tokens (the first `special` of them no demonstration), what to record and where."""

    prefix: tuple[int, ...]
    special: int
    at: At = "prompt"
    record: bool = True
    shift: int = 0
    """Shift the queries by this many positions."""
    demo_logits: bool = False
    """Keep the summed logits against every token of the prefix."""
    own: bool = False
    """Keep what enters each output projection: the heads' outputs, side by side."""
    taps: tuple[Projection, ...] = ()
    """Projections whose inputs and outputs to keep at the recorded token."""
    detailed: int = 100
    """How many of the first queries the summed logits and the taps are kept of."""
    batch_size: int | None = None
    stay: bool = False
    """Leave h, m and what `own` and `taps` ask for on a GPU, as tensors, where they fit (`models.staying`)."""


def ask(
    lm: LanguageModel,
    queries: Sequence[Query],
    how: PassPlan,
    patch: Patch | None = None,
    progress: Callable[[int], None] | None = None,
) -> Asked:
    """Score every candidate of every query after the prefix, and record what `how` asks for."""
    trees = [grow(query, how.at) for query in queries]
    sink = _Sink(lm, queries, trees, how, 1 if patch is None else patch.rows)
    with torch.no_grad(), nullcontext() if patch is None else patch.applied():
        if lm.shares_prefix(len(how.prefix), max((len(tree.ids) for tree in trees), default=0), how.shift):
            _ask_packed(lm, trees, how, sink, progress)
        else:
            _ask_whole(lm, queries, how, sink, progress)
    return sink.done()


def _ask_packed(
    lm: LanguageModel, trees: list[Tree], how: PassPlan, sink: _Sink, progress: Callable[[int], None] | None
) -> None:
    rows = sink.rows
    prefix = compute_prefix(lm, how.prefix, how.special, rows)
    # Rows of a patch are further batch rows of the same pass, so they share its budget.
    tokens = max(1, _TOKENS.get(lm.device.type, 2048) // rows)
    reads = max(1, _LOGIT_BYTES // (4 * lm.vocab * rows))
    for host_pack in plan(trees, tokens=tokens, reads=reads, queries=how.batch_size):
        pack = host_pack.to(lm.device)
        trace = sink.trace(*pack.own.shape)
        strategy = Packed(pack, prefix, shift=how.shift, trace=trace)
        with recording(lm.anatomy, pack.record, trace, how.taps):
            ids = pack.ids[None].expand(rows, -1)
            logits = run_forward(lm.model, strategy, ids, strategy.positions[None].expand(rows, -1), pack.read)
        sink.add(pack, logits, trace)
        if progress is not None:
            progress(len(pack.members))


def compute_prefix(lm: LanguageModel, ids: Sequence[int], special: int, rows: int = 1) -> Prefix:
    """Run the prefix once and keep its keys and values."""
    if not ids:
        return Prefix(0)
    at = torch.arange(len(ids), device=lm.device)
    strategy = Causal(at, keep=True)
    # Only the keys and values are wanted; one position is the fewest logits a pass can give.
    last = at[-1:]
    run_forward(lm.model, strategy, as_row(ids, lm.device, rows), at[None].expand(rows, -1), last)
    return Prefix(len(ids), tuple(strategy.keys), tuple(strategy.values), special)


def _ask_whole(
    lm: LanguageModel, queries: Sequence[Query], how: PassPlan, sink: _Sink, progress: Callable[[int], None] | None
) -> None:
    start = len(how.prefix)
    for i, query in enumerate(queries):
        stop = start + len(query.ids)
        for j, candidate in enumerate(query.candidates):
            keep_trace = j == 0 and how.record
            # The last token of a candidate is only predicted, never read, unless it is the one recorded.
            read = candidate if keep_trace and how.at == "label0" else candidate[:-1]
            ids = as_row([*how.prefix, *query.ids, *read], lm.device, sink.rows)
            at = torch.arange(ids.shape[1], device=lm.device)
            at = torch.where(at >= start, at + how.shift, at)
            end = stop + (len(read) if how.at == "label0" else 0)
            trace = sink.trace(1, end - start) if keep_trace else None
            strategy = Whole(at, range(start, end), how.special, trace)
            keep = torch.arange(stop - 1, stop - 1 + len(candidate), device=lm.device)
            with recording(lm.anatomy, torch.tensor([end - 1], device=lm.device), trace, how.taps):
                logits = run_forward(lm.model, strategy, ids, at[None].expand(sink.rows, -1), keep, native=True)
            sink.add_one(i, j, candidate, logits, trace)
        if progress is not None:
            progress(1)


def token_log_probs(
    logits: Float[Tensor, "batch read vocab"], row: Tensor, target: Tensor
) -> Float[Tensor, "batch scored"]:
    """log p of each target token at its row, in at least single precision."""
    logits = first_order(logits if logits.dtype == torch.float64 else logits.float())
    return logits[:, row, target] - torch.logsumexp(logits, -1)[:, row]


def candidate_scores(
    pack: Pack, logits: Float[Tensor, "batch read vocab"], candidates: int
) -> Float[Tensor, "batch query candidate"]:
    """The mean log-probability of each candidate's tokens; −∞ where a query has fewer candidates."""
    found = token_log_probs(logits, pack.read_row, pack.target)
    shape = (found.shape[0], len(pack.members), candidates)
    at = pack.scored_query * candidates + pack.scored_candidate
    total = torch.zeros(shape[0], shape[1] * shape[2], dtype=torch.float64, device=found.device)
    count = torch.zeros(shape[1] * shape[2], dtype=torch.float64, device=found.device)
    total.index_add_(1, at, found.double())
    count.index_add_(0, at, torch.ones_like(at, dtype=torch.float64))
    return torch.where(count > 0, total / count.clamp(min=1.0), -torch.inf).view(shape)


class _Sink:
    """Collects packs of results into arrays in the queries' own order."""

    def __init__(self, lm: LanguageModel, queries: Sequence[Query], trees: Sequence[Tree], how: PassPlan, rows: int):
        self.rows, self.how = rows, how
        n, layers = len(queries), len(lm.anatomy.layers)
        self.columns = np.array([len(tree.path) for tree in trees])
        widest = max((len(query.candidates) for query in queries), default=0)
        self.log_probs = np.full((rows, n, widest), -np.inf)
        # What turns a candidate's mean log-probability into its score: 1, or its length where scores are sums.
        self.scale = np.ones((n, widest))
        for i, query in enumerate(queries):
            if query.summed:
                self.scale[i, : len(query.candidates)] = [len(candidate) for candidate in query.candidates]
        self.h: Any = None
        self.m: Any = None
        self.own: Any = None
        self.mass = self.demo = self.top_ids = self.top_probs = None
        self.tapped: tuple[TappedQueries, ...] = ()
        if how.record:
            heads, few = max(layer.heads for layer in lm.anatomy.layers), min(n, how.detailed)
            widths = [max(getattr(layer, name) for layer in lm.anatomy.layers) for name in ("d_model", "d_in")]
            shapes: dict[str, tuple[int, ...]] = {
                "h": (rows, n, layers, widths[0]),
                "m": (rows, n, layers, heads, int(self.columns.max(initial=0))),
                **({"own": (rows, n, layers, widths[1])} if how.own else {}),
            }
            taps = [((few, p.d_in), (few, p.d_out)) for p in how.taps]
            tapped = [shape for both in taps for shape in both]
            self.places = Places.of(lm, [*shapes.values(), *tapped], stay=how.stay)
            empty, small = self.places.empty, Places.of(lm, (), stay=False)
            self.h, self.m = empty(shapes["h"]), empty(shapes["m"])
            self.own = empty(shapes["own"]) if how.own else None
            self.tapped = tuple(TappedQueries(empty(x), empty(y)) for x, y in taps)
            self.like, self.mass = small.like, small.empty((rows, n, layers, heads))
            self.top_ids, self.top_probs = np.zeros((n, TOP_K), np.int64), np.zeros((n, TOP_K))
            self.demo = small.empty((few, layers, len(how.prefix))) if how.demo_logits else None

    def trace(self, queries: int, columns: int) -> Trace | None:
        """Arrays for what a pass over some of the queries records."""
        if self.h is None or self.mass is None:
            return None
        *_, layers, heads = self.mass.shape

        def room(like: Tensor, *rest: int) -> Layers:
            return Layers(layers, self.rows, queries, *rest, like=like)

        vectors, like = self.places.like, self.like
        demo = room(like, len(self.how.prefix)) if self.demo is not None else None
        own = room(vectors, self.own.shape[-1]) if self.own is not None else None
        return Trace(room(vectors, self.h.shape[-1]), room(vectors, heads, columns), room(like, heads), demo, own)

    def add(self, pack: Pack, logits: Float[Tensor, "batch read vocab"], trace: Trace | None) -> None:
        mean = candidate_scores(pack, logits, self.log_probs.shape[2])
        self.log_probs[:, pack.members] = mean.cpu().numpy() * self.scale[list(pack.members)]
        self._keep(list(pack.members), logits[0, pack.first_read], trace)

    def add_one(
        self,
        query: int,
        index: int,
        candidate: Sequence[int],
        logits: Float[Tensor, "batch token vocab"],
        trace: Trace | None,
    ) -> None:
        row = torch.arange(len(candidate), device=logits.device)
        found = token_log_probs(logits, row, torch.tensor(candidate, device=logits.device))
        self.log_probs[:, query, index] = found.mean(1).double().cpu().numpy() * self.scale[query, index]
        self._keep([query], logits[0, :1], trace)

    def _keep(self, members: list[int], after: Float[Tensor, "query vocab"], trace: Trace | None) -> None:
        if trace is None or self.h is None or self.m is None or self.mass is None:
            return
        assert self.top_ids is not None and self.top_probs is not None
        probs, ids = torch.topk(torch.softmax(first_order(after).float(), -1), min(TOP_K, after.shape[-1]))
        self.top_ids[members, : ids.shape[1]] = ids.cpu().numpy()
        self.top_probs[members, : ids.shape[1]] = probs.cpu().numpy()
        few = [i for i, member in enumerate(members) if member < self.how.detailed]
        every, detailed = (Members.of(each, self.like.device) for each in (members, [members[i] for i in few]))
        ran = {id(tap.projection): tap for tap in trace.taps}  # in the order of the pass, not in that of the asking
        taken = Members.of(few, self.like.device).there

        def first(into: Any, x: Float[Tensor, "batch query d"]) -> Any:
            return detailed.laid(into, x[0].index_select(0, taken.to(x.device)), axis=0)

        taps = zip(self.tapped, (ran[id(projection)] for projection in self.how.taps), strict=True)
        self.tapped = tuple(TappedQueries(first(kept.x, tap.x), first(kept.y, tap.y)) for kept, tap in taps)

        def laid(into: Any, layers: Layers) -> Any:
            return every.laid(into, layers.array.movedim(0, 2))

        self.h, self.m, self.mass = laid(self.h, trace.h), laid(self.m, trace.m), laid(self.mass, trace.demo_mass)
        if self.own is not None and trace.own is not None:
            self.own = laid(self.own, trace.own)
        if self.demo is not None and trace.demo_logits is not None:
            self.demo[detailed.numbers] = host(trace.demo_logits.array[:, 0, few]).swapaxes(0, 1)

    def done(self) -> Asked:
        settings = tuple(
            Setting(
                self.log_probs[row],
                None if self.h is None else self.h[row],
                None if self.m is None else self.m[row],
                None if self.mass is None else self.mass[row],
                *((self.top_ids, self.top_probs) if row == 0 else ()),  # of the patch's first row only
            )
            for row in range(self.rows)
        )
        own = None if self.own is None else self.own[0]
        return Asked(settings, self.columns, self.demo, self.tapped, own)
