"""Attention in parts against one plain softmax, written pair by pair, over shapes hypothesis makes up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dualview.anatomy import kernels
from dualview.anatomy.kernels import (
    AttentionPart,
    Rule,
    attend,
    attend_in_place,
    attends_in_place,
    final_logits,
    merge,
    with_sinks,
)

FAST = settings(max_examples=60, deadline=None)


@dataclass(frozen=True)
class Case:
    """One attention problem; keys may be shared by the batch (`k` and `v` of batch 1, as a prefix is)."""

    q: Tensor
    k: Tensor
    v: Tensor
    rule: Rule
    allowed: Tensor | None
    key_at: Tensor
    causal: bool

    def __repr__(self) -> str:
        mask = None if self.allowed is None else tuple(self.allowed.shape)
        shapes = [tuple(x.shape) for x in (self.q, self.k, self.v)]
        return f"Case({shapes}, softcap={self.rule.softcap}, alibi={self.rule.alibi}, {mask=}, causal={self.causal})"

    def attend(self) -> AttentionPart:
        return attend(self.q, self.k, self.v, self.rule, causal=self.causal, allowed=self.allowed, key_at=self.key_at)


class Slopes:
    """A positional bias per head and key position, as a look-up function."""

    def __init__(self, heads: int):
        self.slopes = torch.tensor([2.0 ** -(head + 1) for head in range(heads)], dtype=torch.float64)

    def __call__(self, at: Tensor) -> Tensor:
        return self.slopes.view(-1, *(1 for _ in at.shape)) * at

    def __repr__(self) -> str:
        return "slopes"


@st.composite
def problems(draw: st.DrawFn) -> Case:
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    d = draw(st.sampled_from([1, 3, 8, 16]))
    d_value = draw(st.sampled_from([d, d, 5]))
    shared = draw(st.booleans())
    random = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    k_batch = 1 if shared else batch
    rule = Rule(
        scale=draw(st.sampled_from([1.0, d**-0.5, 0.3])),
        softcap=draw(st.sampled_from([None, None, 2.0])),
        alibi=Slopes(kv_heads * group) if draw(st.booleans()) else None,
    )
    causal = draw(st.booleans())
    allowed = None
    if draw(st.booleans()):
        lead = draw(st.sampled_from([(), (1,), (batch,)]))
        allowed = torch.rand(*lead, queries, keys, generator=random) < 0.6
        if causal:  # in a causal row a token always sees the first key, as it always sees itself
            allowed[..., 0] = True
    start = draw(st.integers(0, 9))
    return Case(
        normal(batch, kv_heads * group, queries, d),
        normal(k_batch, kv_heads, keys, d),
        normal(k_batch, kv_heads, keys, d_value),
        rule,
        allowed,
        torch.arange(start, start + keys),
        causal,
    )


def plain(case: Case) -> AttentionPart:
    """The definition, pair by pair."""
    batch, heads, queries, _ = case.q.shape
    keys, group = case.k.shape[2], heads // case.k.shape[1]
    out = torch.zeros(batch, heads, queries, case.v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    for b in range(batch):
        own = 0 if case.k.shape[0] == 1 else b
        for head in range(heads):
            for i in range(queries):
                mass, total = torch.zeros(case.v.shape[-1], dtype=torch.float64), 0.0
                for j in range(keys):
                    if (case.causal and j > i) or not _may(case.allowed, b, i, j):
                        continue
                    logit = float(case.q[b, head, i] @ case.k[own, head // group, j]) * case.rule.scale
                    if case.rule.softcap is not None:
                        logit = case.rule.softcap * math.tanh(logit / case.rule.softcap)
                    if case.rule.alibi is not None:
                        logit += 2.0 ** -(head + 1) * int(case.key_at[j])
                    mass += math.exp(logit) * case.v[own, head // group, j]
                    total += math.exp(logit)
                if total:
                    out[b, head, i], lse[b, head, i] = mass / total, math.log(total)
    return AttentionPart(out, lse)


def _may(allowed: Tensor | None, batch: int, i: int, j: int) -> bool:
    if allowed is None:
        return True
    if allowed.dim() == 2:
        return bool(allowed[i, j])
    return bool(allowed[batch if allowed.shape[0] > 1 else 0, i, j])


def close(a: AttentionPart, b: AttentionPart) -> None:
    assert a.out.shape == b.out.shape and a.lse.shape == b.lse.shape
    torch.testing.assert_close(a.out, b.out, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(a.lse, b.lse, atol=1e-11, rtol=1e-11)


@FAST
@given(problems())
def test_attention_is_the_plain_softmax(case: Case) -> None:
    close(case.attend(), plain(case))


@FAST
@given(problems(), st.integers(1, 6))
def test_two_parts_merge_into_the_whole(case: Case, cut: int) -> None:
    """Any split of the keys; a query may be blind to one part, and is left out where blind to both."""
    cut = min(cut, case.k.shape[2])
    case = replace(case, causal=False)
    parts = []
    for piece in (slice(0, cut), slice(cut, None)):
        allowed = None if case.allowed is None else case.allowed[..., piece]
        part = replace(case, k=case.k[:, :, piece], v=case.v[:, :, piece], allowed=allowed, key_at=case.key_at[piece])
        parts.append(part.attend() if part.k.shape[2] else plain(part))
    whole, sees = plain(case), torch.isfinite(plain(case).lse)
    merged = merge(*parts)
    back = merge(*parts[::-1])
    for found in (merged, back):
        torch.testing.assert_close(found.lse[sees], whole.lse[sees], atol=1e-11, rtol=1e-11)
        torch.testing.assert_close(found.out[sees], whole.out[sees], atol=1e-11, rtol=1e-11)


@FAST
@given(problems(), st.integers(0, 1000))
def test_a_sink_is_one_more_key_without_a_value(case: Case, seed: int) -> None:
    heads = case.q.shape[1]
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole = plain(case)
    found = with_sinks(case.attend(), sinks)
    total = torch.exp(whole.lse) + torch.exp(sinks)[None, :, None]
    torch.testing.assert_close(found.lse, torch.log(total), atol=1e-11, rtol=1e-11)
    share = (torch.exp(whole.lse) / total)[..., None]
    torch.testing.assert_close(found.out, whole.out * share, atol=1e-11, rtol=1e-11)


@FAST
@given(problems())
def test_gradients_are_the_plain_softmaxs(case: Case) -> None:
    """Training goes through the compiled kernel too: its gradients, groups of heads included."""
    if case.allowed is not None:
        allowed = case.allowed.clone()
        allowed[..., 0] = True
        case = replace(case, allowed=allowed)
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    q, k, v = leaves
    mine = torch.autograd.grad(torch.sin(replace(case, q=q, k=k, v=v).attend().out).sum(), leaves)
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).mT * case.rule.scale
    logits = final_logits(logits, case.rule, case.key_at)
    seen = torch.ones(q.shape[0], q.shape[2], k.shape[2], dtype=torch.bool)
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            for j in range(k.shape[2]):
                seen[b, i, j] = (not case.causal or j <= i) and _may(case.allowed, b, i, j)
    weights = torch.softmax(logits.masked_fill(~seen[:, None], -math.inf), -1)
    right = torch.autograd.grad(torch.sin(weights @ v.repeat_interleave(group, 1)).sum(), leaves)
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_no_key_in_sight() -> None:
    q, k = torch.randn(1, 2, 3, 4, dtype=torch.float64), torch.randn(1, 1, 5, 4, dtype=torch.float64)
    part = attend(q, k, k, Rule(1.0), allowed=torch.zeros(3, 5, dtype=torch.bool))
    assert not part.out.any() and torch.all(part.lse == -math.inf)
    other = attend(q, k, k, Rule(1.0))
    close(merge(part, other), other)
    close(merge(other, part), other)


def test_a_sink_may_be_all_there_is() -> None:
    blind = AttentionPart(torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3), -math.inf))
    found = with_sinks(blind, torch.tensor([0.5, -1.0]))
    assert not found.out.any()
    assert torch.equal(found.lse[0, :, 0], torch.tensor([0.5, -1.0]))


def test_half_precision_keeps_its_log_sum_exp_in_single() -> None:
    q, k = torch.randn(1, 2, 3, 8).bfloat16(), torch.randn(1, 2, 6, 8).bfloat16()
    for rule in (Rule(0.3), Rule(0.3, softcap=2.0)):
        part = attend(q, k, k, rule)
        assert part.out.dtype == torch.bfloat16 and part.lse.dtype == torch.float32
        whole = plain(Case(q.double(), k.double(), k.double(), rule, None, torch.arange(6), causal=False))
        torch.testing.assert_close(part.lse.double(), whole.lse, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(part.out.double(), whole.out, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_long_row_is_worked_through_in_slices(monkeypatch: pytest.MonkeyPatch, softcap: float | None) -> None:
    from dualview.anatomy import kernels as attention

    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 5)
    allowed = torch.rand(2, 9, 7) < 0.7
    rule = Rule(0.4, softcap=softcap, alibi=Slopes(4))
    whole = attend(q, k, v, rule, allowed=allowed, key_at=torch.arange(7))
    monkeypatch.setattr(attention, "_LOGITS_AT_ONCE", 2 * 4 * 7 * 2)  # two rows of queries at a time
    sliced = attend(q, k, v, rule, allowed=allowed, key_at=torch.arange(7))
    torch.testing.assert_close(whole.out, sliced.out)
    torch.testing.assert_close(whole.lse, sliced.lse)


@FAST
@given(
    st.lists(st.integers(0, 30), min_size=0, max_size=6),
    st.lists(st.integers(0, 30), min_size=0, max_size=8),
    st.sampled_from([None, 1, 4, 11]),
    st.sampled_from([None, 1, 5, 16]),
)
def test_windows_and_chunks(queries: list[int], keys: list[int], window: int | None, chunk: int | None) -> None:
    """None stands for all in sight; of the future nothing is promised, since causality hides it anyway."""
    seen = Rule(1.0, window=window, chunk=chunk).visible(torch.tensor(queries), torch.tensor(keys))
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            if key <= query:
                right = (window is None or query - key < window) and (chunk is None or query // chunk == key // chunk)
                assert (True if seen is None else bool(seen[i, j])) == right


def one_by_one(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    """What flash attention gives for sequences in a row, each on its own."""
    outs, lses = list[Tensor](), list[Tensor]()
    for start, end in pairwise(bounds.tolist()):
        assert end - start <= longest
        part = attend(*(x[start:end].transpose(0, 1)[None] for x in (q, k, v)), Rule(scale), causal=True)
        outs.append(part.out[0].transpose(0, 1))
        lses.append(part.lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("batch", [1, 3])
def test_sequences_are_attended_to_where_they_are(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_flash_of_sequences", one_by_one)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, heads, 12, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    rule, starts = Rule(0.3), torch.tensor([0, 5, 6])
    found = attend_in_place(q, k, v, rule, starts, 6)
    at = torch.arange(12)
    sequence = (at[:, None] >= starts).sum(1)
    allowed = (sequence[:, None] == sequence) & (at[:, None] >= at)
    wanted = attend(q, k, v, rule, allowed=allowed, key_at=at)
    assert torch.allclose(found.out, wanted.out) and torch.allclose(found.lse, wanted.lse)


def test_only_plain_half_precision_passes_on_a_gpu_are_attended_in_place() -> None:
    q = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        assert not attends_in_place(q, q, q, Rule(1.0))  # not on a GPU
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        half, single = (torch.zeros(1, 2, 3, 8, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        assert attends_in_place(half, half, half, Rule(1.0))
        assert not attends_in_place(single, single, single, Rule(1.0))
        for rule in (Rule(1.0, window=2), Rule(1.0, chunk=2), Rule(1.0, softcap=1.0), Rule(1.0, alibi=Slopes(2))):
            assert not attends_in_place(half, half, half, rule)
        with torch.enable_grad():
            assert not attends_in_place(half, half, half, Rule(1.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flash_attention_equals_the_definition() -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, heads, 90, 64, generator=draw, device="cuda").bfloat16() for heads in (8, 2, 2))
    rule, starts = Rule(0.125), torch.tensor([0, 40, 41], device="cuda")
    wide = tuple(x.double() for x in (q, k, v))
    at = torch.arange(90, device="cuda")
    sequence = (at[:, None] >= starts).sum(1)
    allowed = (sequence[:, None] == sequence) & (at[:, None] >= at)
    with torch.no_grad():
        assert attends_in_place(q, k, v, rule)
        pairs = [
            (attend_in_place(q, k, v, rule, starts, 49), attend(*wide, rule, allowed=allowed, key_at=at)),
            (attend(q, k, v, rule, causal=True), attend(*wide, rule, causal=True)),
            (attend(q, k[:1], v[:1], rule), attend(wide[0], wide[1][:1], wide[2][:1], rule)),
        ]
    for found, wanted in pairs:
        assert found.out.shape == wanted.out.shape and found.lse.shape == wanted.lse.shape
        assert torch.allclose(found.out.double(), wanted.out, rtol=0, atol=2e-2)
        assert torch.allclose(found.lse.double(), wanted.lse, rtol=0, atol=1e-3)
