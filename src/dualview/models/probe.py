"""The attention of one pass over queries, and what it records of each layer at one token of each query.

The attention function already has q, k and the log-sum-exps, so a record costs one row of q·k per query and layer; the
attention's output after its projection comes from a hook on that projection. No attention map is built.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd import forward_ad

from dualview.anatomy.dispatch import AttentionCall, Unsupported
from dualview.anatomy.hooks import hooked
from dualview.anatomy.kernels import (
    AttentionPart,
    Rule,
    attend,
    attend_in_place,
    attends_in_place,
    by_token,
    final_logits,
    merge,
    with_sinks,
)
from dualview.anatomy.layers import Anatomy, Projection
from dualview.models.packing.rows import Pack
from dualview.models.prefix import Prefix


@dataclass(frozen=True)
class Tap:
    """A projection's input and its rows of the output."""

    projection: Projection
    x: Float[Tensor, "batch token d_in"]
    y: Float[Tensor, "batch token row"]


class Layers:
    """One array for all layers, allocated before the pass and filled layer by layer; smaller layers leave zeros.

    Separate pieces would fragment the memory between the pass's own large buffers, which could then not be reused.
    A layer that computes in a wider type of number makes it wider.
    """

    def __init__(self, layers: int, *shape: int, like: Tensor):
        self.array: Float[Tensor, "layer batch query *rest"] = like.new_zeros(layers, *shape)
        self._filled = 0

    def append(self, x: Float[Tensor, "batch query *rest"]) -> None:
        self.array = self.array.to(torch.promote_types(self.array.dtype, x.dtype))
        self.array[(self._filled, *(slice(size) for size in x.shape))] = first_order(x)
        self._filled += 1


@dataclass
class Trace:
    """What one pass recorded, layer by layer, at the recorded tokens."""

    h: Layers
    """[batch, query, d_model] each."""
    m: Layers
    """[batch, query, head, column] each."""
    demo_mass: Layers
    """[batch, query, head] each."""
    demo_logits: Layers | None = None
    """Σ over heads of the scaled logits against the prefix's tokens, [batch, query, key] each, if requested."""
    own: Layers | None = None
    """What enters each output projection, the heads' outputs side by side, [batch, query, d_in] each, if requested."""
    taps: list[Tap] = field(default_factory=list[Tap])
    """What went into and came out of the projections that were tapped, in the order in which they ran."""


def first_order(x: Tensor) -> Tensor:
    """A value and its tangent added, where a pass carries one (a linearised patch); else the value."""
    both = forward_ad.unpack_dual(x)
    return both.primal if both.tangent is None else both.primal + both.tangent


class Packed:
    """Packed queries: every token attends densely to the shared prefix and causally to its own query, merged."""

    def __init__(self, pack: Pack, prefix: Prefix, *, shift: int = 0, trace: Trace | None = None):
        self.pack, self.prefix, self.trace = pack, prefix, trace
        self.prefix_at = torch.arange(prefix.length, device=pack.depth.device)
        self.positions = pack.depth + (prefix.length + shift)
        self.shift = shift
        self._in_sight: dict[tuple[int | None, int | None], Tensor | None] = {}
        self._elsewhere: dict[torch.device, Packed] = {}

    def attend(self, layer: int, call: AttentionCall) -> Float[Tensor, "batch query head d_value"]:
        if call.q.device != self.positions.device:
            return self._on(call.q.device).attend(layer, call)
        if call.unknown:
            raise Unsupported(f"its attention takes {', '.join(call.unknown)}")
        rule, part, shared = call.rule, self._own(call), None
        if self.prefix.length:
            keys, values = self.prefix.keys[layer], self.prefix.values[layer]
            shared = attend(call.q, keys, values, rule, allowed=self._visible(rule), key_at=self.prefix_at)
            part = merge(shared, part)
        part = with_sinks(part, rule.sinks)
        if self.trace is not None:
            self._record(self.trace, layer, call, part.lse, None if shared is None else shared.lse)
        return by_token(part)

    def _on(self, device: torch.device) -> Packed:
        """The same for the layers on another device."""
        if device not in self._elsewhere:
            there = Packed(self.pack.to(device), self.prefix, shift=self.shift, trace=self.trace)
            self._elsewhere[device] = there
        return self._elsewhere[device]

    def _visible(self, rule: Rule) -> Bool[Tensor, "token key"] | None:
        kind = (rule.window, rule.chunk)
        # Layers of one kind share their mask, and most models have one or two kinds.
        if kind not in self._in_sight:
            self._in_sight[kind] = rule.visible(self.positions, self.prefix_at)
        return self._in_sight[kind]

    def _own(self, call: AttentionCall) -> AttentionPart:
        """Each query's tokens among themselves: where they are, or as a batch of short rows."""
        pack, batch, rule = self.pack, call.q.shape[0], call.rule
        n, width = pack.slots.shape
        if pack.ancestors is None and attends_in_place(call.q, call.k, call.v, rule):
            return attend_in_place(call.q, call.k, call.v, rule, pack.slots[:, 0], width)
        q, k, v = (_take(x, pack.slots) for x in (call.q, call.k, call.v))
        at = self.positions[pack.slots]
        allowed = self._own_visible(rule, at)
        if batch > 1:
            at = at.repeat(batch, 1)
            allowed = None if allowed is None else allowed.repeat(batch, 1, 1)
        part = attend(q, k, v, rule, causal=allowed is None, allowed=allowed, key_at=at, sees_itself=True)

        def in_row(x: Tensor) -> Tensor:
            tokens = x.transpose(1, 2).reshape(batch, n * width, *x.shape[1:2], *x.shape[3:])
            return tokens.index_select(1, pack.cells).transpose(1, 2)

        return AttentionPart(in_row(part.out), in_row(part.lse))

    def _own_visible(self, rule: Rule, at: Int[Tensor, "query slot"]) -> Bool[Tensor, "query slot slot"] | None:
        # A window wider than every query hides nothing, and without a mask the kernel is faster.
        window = rule.window if rule.window is not None and int(self.pack.depth.max()) >= rule.window else None
        if window is None and rule.chunk is None:
            return self.pack.ancestors
        allowed = self.pack.ancestors
        if allowed is None:
            allowed = torch.ones(at.shape[1], at.shape[1], dtype=torch.bool, device=at.device).tril()[None]
        if window is not None:
            allowed = allowed & (at[:, :, None] - at[:, None, :] < window)
        if rule.chunk is not None:
            allowed = allowed & (at[:, :, None] // rule.chunk == at[:, None, :] // rule.chunk)
        return allowed

    def _record(self, trace: Trace, layer: int, call: AttentionCall, lse: Tensor, shared: Tensor | None) -> None:
        pack = self.pack
        q = call.q[:, :, pack.record]
        m = _row_logits(q, call.k[:, :, pack.own], call.rule.scale)
        # Columns past a query's own are copies of its first token, made to fill the array.
        beyond = torch.arange(m.shape[-1], device=m.device) >= pack.columns[:, None]
        trace.m.append(m.masked_fill(beyond[None, :, None, :], 0.0))
        lse = lse[:, :, pack.record]
        mass = torch.zeros_like(lse)
        if shared is not None and self.prefix.length > self.prefix.special:
            mass = torch.exp(shared[:, :, pack.record] - lse)
            if self.prefix.special:
                # Where demonstrations get almost nothing, the difference may round to below 0.
                mass = (mass - self._special_mass(layer, call.rule, q, lse)).clamp(min=0.0)
        trace.demo_mass.append(mass.transpose(1, 2))
        if trace.demo_logits is not None and self.prefix.length:
            trace.demo_logits.append(_summed_logits(q, self.prefix.keys[layer], call.rule.scale))

    def _special_mass(self, layer: int, rule: Rule, q: Tensor, lse: Tensor) -> Float[Tensor, "batch head query"]:
        """The softmax mass on the prefix's first tokens, which are not demonstrations."""
        at = self.prefix_at[: self.prefix.special]
        keys = self.prefix.keys[layer][:, :, : len(at), None].transpose(2, 3).expand(-1, -1, q.shape[2], -1, -1)
        logits = _row_logits(q, keys.expand(q.shape[0], *keys.shape[1:]), rule.scale).transpose(1, 2)
        logits = final_logits(logits, rule, at)
        visible = rule.visible(self.positions[self.pack.record], at)
        if visible is not None:
            logits = logits.masked_fill(~visible, -torch.inf)
        return torch.exp(logits - lse[..., None]).sum(-1)


class Whole:
    """A whole prompt in one row, attended to as the model itself does, recorded at one token.

    The slow counterpart of `Packed`: for architectures that mix tokens in ways that packing breaks, and to check the
    fast path. `own` are the row's positions that are the columns of m, the last of them the recorded token.
    """

    def __init__(self, positions: Int[Tensor, " token"], own: range, special: int, trace: Trace | None):
        self.positions, self.own, self.special, self.trace = positions, own, special, trace

    def attend(self, layer: int, call: AttentionCall) -> Float[Tensor, "batch query head d_value"]:
        self.positions = self.positions.to(call.q.device)
        if self.trace is not None:
            self._record(self.trace, call)
        if call.native is not None:
            return call.native()
        allowed = call.rule.visible(self.positions, self.positions)
        part = attend(call.q, call.k, call.v, call.rule, causal=True, allowed=allowed, key_at=self.positions)
        return by_token(with_sinks(part, call.rule.sinks))

    def _record(self, trace: Trace, call: AttentionCall) -> None:
        at, rule = self.own[-1], call.rule
        q, seen = call.q[:, :, at : at + 1], call.k[:, :, : at + 1]
        row = _row_logits(q, seen[:, :, None], rule.scale).transpose(1, 2)  # [batch, head, 1, key]
        trace.m.append(row[..., self.own.start : self.own.stop].transpose(1, 2))
        logits = final_logits(row, rule, self.positions[: at + 1])
        logits = self._masked(logits, call, at)
        if rule.sinks is not None:
            sinks = rule.sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
            # The sink takes its share of the softmax and is left out of every sum below.
            logits = torch.cat([logits, sinks], -1)
        weights = torch.softmax(logits, -1)
        trace.demo_mass.append(weights[..., self.special : self.own.start].sum(-1).transpose(1, 2))
        if trace.demo_logits is not None:
            trace.demo_logits.append(_summed_logits(q, seen[:, :, : self.own.start], rule.scale))

    def _masked(self, logits: Float[Tensor, "batch head 1 key"], call: AttentionCall, at: int) -> Tensor:
        """One row of logits as the model's own mask leaves it, or, where it has none, as the rule says."""
        if call.mask is None:
            visible = call.rule.visible(self.positions[at : at + 1], self.positions[: at + 1])
            return logits if visible is None else logits.masked_fill(~visible, -torch.inf)
        row = call.mask[:, :, at : at + 1, : at + 1]
        return logits.masked_fill(~row, -torch.inf) if row.dtype == torch.bool else logits + row.to(logits.dtype)


def _take(
    x: Float[Tensor, "batch head token d"], slots: Int[Tensor, "query slot"]
) -> Float[Tensor, "batch*query head slot d"]:
    """Each query's tokens as a short row of its own; whole tokens are copied, all heads at once."""
    taken = x.transpose(1, 2).index_select(1, slots.flatten())
    return taken.view(-1, slots.shape[1], *taken.shape[2:]).transpose(1, 2)


def _row_logits(
    q: Float[Tensor, "batch head query d_head"], k: Float[Tensor, "batch kv_head query key d_head"], scale: float
) -> Float[Tensor, "batch query head key"]:
    """Scaled q·k of single tokens against keys of their own."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    return torch.einsum("bkgnd,bkncd->bnkgc", grouped, k).flatten(2, 3) * scale


def _summed_logits(
    q: Float[Tensor, "batch head query d_head"], k: Float[Tensor, "batch kv_head key d_head"], scale: float
) -> Float[Tensor, "batch query key"]:
    """Σ over heads of scaled q·k against keys that all queries share."""
    # The heads of a group share their keys, so their queries are added first: one product instead of one for each head.
    summed = q.unflatten(1, (k.shape[1], -1)).sum(2)
    return torch.einsum("bknd,bkcd->bnc", summed, k.expand(q.shape[0], *k.shape[1:])) * scale


def _rows(x: Float[Tensor, "batch token d"], at: Int[Tensor, " query"]) -> Float[Tensor, "batch query d"]:
    """The tokens `at`, on the device of x."""
    return x[:, at.to(x.device)]


@contextmanager
def tapping(
    projections: Sequence[Projection], into: list[Tap], at: Int[Tensor, " query"] | None = None
) -> Generator[None]:
    """Keep what goes into and comes out of projections, at the row's tokens `at` (all of them if None)."""

    def tap(projection: Projection) -> Any:
        def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x, y = inputs[0].detach(), output.detach()
            y = y if projection.rows is None else y[..., projection.rows]
            into.append(Tap(projection, x, y) if at is None else Tap(projection, _rows(x, at), _rows(y, at)))

        return keep

    with hooked(p.module.register_forward_hook(tap(p)) for p in projections):
        yield


@contextmanager
def recording(
    anatomy: Anatomy, at: Int[Tensor, " query"], trace: Trace | None, taps: Sequence[Projection] = ()
) -> Generator[None]:
    """Keep each attention's output after its projection, and what `taps` name, at the row's tokens `at`."""

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert trace is not None
        trace.h.append(_rows(output, at))
        if trace.own is not None:
            trace.own.append(_rows(inputs[0], at))

    # A set: one module that several layers share would otherwise record each of its calls several times.
    modules = {layer.output for layer in anatomy.layers} if trace is not None else ()
    with (
        hooked(module.register_forward_hook(keep) for module in modules),
        nullcontext() if trace is None else tapping(taps, trace.taps, at),
    ):
        yield
