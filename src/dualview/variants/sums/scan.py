"""The moving sum of momentum attention, m_t = Σ_{i<t} η^{t−i} v_i, for all t at once in O(T).

As a recurrence it is m_t = η (m_{t−1} + v_{t−1}), m_1 = 0: T dependent steps. Here the tokens are cut into chunks; each
chunk is one small matrix product, and what a chunk hands to the next is again such a sum over T / CHUNK summaries, so
the same function does it. All powers of η are non-negative ones, so nothing overflows and η = 0 is an ordinary value.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.variants.base import Coefficient
from dualview.variants.softmax import take_rows
from dualview.variants.sums.layout import Layout

CHUNK = 64
"""Tokens whose powers of η are written out as a matrix: T · CHUNK · d operations in all, for any T."""


def in_chunks(x: Float[Tensor, "batch head token d"], size: int) -> Float[Tensor, "batch head chunk size d"]:
    """Tokens cut into chunks, the last one filled up with zeros."""
    fill = -x.shape[2] % size
    return torch.nn.functional.pad(x, (0, 0, 0, fill)).reshape(x.shape[0], x.shape[1], -1, size, x.shape[3])


def moving_sum(
    values: Float[Tensor, "batch kv_head key d_value"], eta: Coefficient, layout: Layout
) -> Float[Tensor, "batch kv_head query d_value"]:
    """Σ η^{distance} v_i over the keys that each row reads, its own excluded; distance in real tokens.

    Half-precision values are summed in float32. A window [first, own) costs one subtraction,
    m_own − η^{own − first} m_first, because every term before `first` has decayed by that much since.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    # Filled on the device: a number copied there would make it wait.
    base = eta.to(wide) if isinstance(eta, Tensor) else torch.full((1,), eta, dtype=wide, device=values.device)
    base = base.reshape(1, -1, 1, 1)
    with torch.autocast(values.device.type, enabled=False):
        v = values.to(wide) if layout.plain else values.to(wide) * layout.real[:, None, :, None]
        if layout.own.shape[1] <= CHUNK:
            return _few_rows(v, base, layout).to(values.dtype)
        sums = _decayed(v, base, layout.before, layout.before)
        if layout.plain and layout.own.shape[1] == v.shape[2]:
            return sums.to(values.dtype)  # every key has its row: no gather, whose gradient would be a slow scatter
        out = take_rows(sums, layout.own)
        if not layout.plain:
            age = layout.before.gather(1, layout.own) - layout.before.gather(1, layout.first)
            out = out - base ** age[:, None, :, None].clamp(min=0).to(wide) * take_rows(sums, layout.first)
        return out.to(values.dtype)


def _few_rows(
    values: Float[Tensor, "batch kv_head key d_value"], base: Float[Tensor, "1 kv_head 1 1"], layout: Layout
) -> Float[Tensor, "batch kv_head query d_value"]:
    """The sum written out, for decoding: no more work than the attention itself."""
    powers = base ** layout.distance()[:, None].to(values.dtype) * layout.earlier(slice(None))[:, None]
    return torch.einsum("bhti,bhid->bhtd", powers, values)


def _decayed(
    values: Float[Tensor, "batch kv_head key d_value"],
    base: Float[Tensor, "1 kv_head 1 1"],
    start: Int[Tensor, "#batch key"],
    end: Int[Tensor, "#batch key"],
) -> Float[Tensor, "batch kv_head key d_value"]:
    """out_t = Σ_{i<t} η^{start_t − end_i} v_i, where start and end never decrease and end_i ≤ start_t for i < t."""
    length = values.shape[2]
    size = min(CHUNK, length)
    v = in_chunks(values, size)
    opens, closes = _counts_in_chunks(start, size), _counts_in_chunks(end, size)
    within = (opens[..., :, None] - closes[..., None, :]).clamp(min=0)
    powers = base[..., None] ** within[:, None].to(v.dtype) * torch.ones_like(within, dtype=v.dtype).tril(-1)[:, None]
    out = torch.einsum("bhnti,bhnid->bhntd", powers, v)
    if v.shape[2] > 1:
        # What each chunk leaves behind, decayed to the first token of the next one, is itself summed over chunks.
        first = opens[..., 0]
        last = torch.cat([first[:, 1:], opens[:, -1:, -1]], 1)
        leaves = base[..., None] ** (last[..., None] - closes).clamp(min=0)[:, None, :, None].to(v.dtype)
        summary = torch.einsum("bhnti,bhnid->bhntd", leaves, v)[..., 0, :]
        carried = _decayed(summary, base, first, last)
        since = base[..., None] ** (opens - first[..., None])[:, None, ..., None].to(v.dtype)
        out = out + since * carried[..., None, :]
    return out.flatten(2, 3)[:, :, :length]


def _counts_in_chunks(counts: Int[Tensor, "batch token"], size: int) -> Int[Tensor, "batch chunk size"]:
    """Filled up with the last count, so that it still never decreases."""
    fill = counts[:, -1:].expand(-1, -counts.shape[1] % size)
    return torch.cat([counts, fill], 1).reshape(counts.shape[0], -1, size)
