"""Attention in parts that merge exactly.

Softmax attention over [demonstrations, query tokens] is the mass-weighted mean of attention over each half,

    y = λ · y_demos + (1 − λ) · y_query,      λ = Z_demos / (Z_demos + Z_query),   Z = Σ exp(logit)

(the exact form of Dai et al. 2022, section 3.2, for softmax). Every function here therefore returns an output together
with the log-sum-exp of its logits, so that a prefix shared by all queries is attended to once, densely, and the
queries' own tokens separately. No function builds a full query × key map of logits for more than a bounded slice of
queries; of layers with a window, or chunks, the mask is built whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd import forward_ad

# Rows of logits that the portable kernel computes at once: limits its memory, not its result.
_LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Rule:
    """What one layer does to q·k: its scale, and what comes between the logit and the softmax."""

    scale: float
    window: int | None = None
    """A key is seen only if it is fewer than `window` positions back."""
    chunk: int | None = None
    """A key is seen only if it is in the same chunk of this many positions."""
    softcap: float | None = None
    """logit ← softcap · tanh(logit / softcap) (Gemma 2)."""
    sinks: Float[Tensor, " head"] | None = None
    """A learnt logit per head that takes part in the softmax and carries no value (GPT-OSS)."""
    alibi: Callable[[Int[Tensor, "*rows key"]], Float[Tensor, "head *rows key"]] | None = None
    """An additive bias that depends on the key's position alone, up to the softmax's shift."""

    def visible(self, query_at: Int[Tensor, " query"], key_at: Int[Tensor, " key"]) -> Bool[Tensor, "query key"] | None:
        """Which keys a window or chunk leaves in sight; None when all of them. Causality is handled elsewhere."""
        if self.window is None and self.chunk is None:
            return None
        if not query_at.numel() or not key_at.numel():
            return None
        # None wherever nothing is hidden: a mask rules out the faster kernels.
        nearest, furthest = int(query_at.min()), int(query_at.max())
        first = int(key_at.min())
        seen = None
        if self.window is not None and furthest - first >= self.window:
            seen = query_at[:, None] - key_at[None, :] < self.window
        if self.chunk is not None and (furthest // self.chunk != first // self.chunk or nearest < first):
            same = query_at[:, None] // self.chunk == key_at[None, :] // self.chunk
            seen = same if seen is None else seen & same
        return seen


@dataclass(frozen=True)
class AttentionPart:
    """Attention over some of the keys: the output over them alone, and the log of their softmax mass."""

    out: Float[Tensor, "batch head query d_value"]
    lse: Float[Tensor, "batch head query"]


def attend(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_value"],
    rule: Rule,
    *,
    causal: bool = False,
    allowed: Bool[Tensor, "*batch_or_1 query key"] | None = None,
    key_at: Int[Tensor, "*batch_or_1 key"] | None = None,
    sees_itself: bool = False,
) -> AttentionPart:
    """Softmax attention and its log-sum-exp; heads of a group share their key and value head.

    A query that sees no key gets a zero output and a log-sum-exp of −∞, so that merging leaves it out; `sees_itself`
    says that there is none, so that nobody needs to look. Sinks are not applied here: they belong to the merged
    softmax, once.
    """
    if k.shape[0] != q.shape[0]:
        # A shared prefix has one row; expanding it copies nothing.
        k, v = k.expand(q.shape[0], *k.shape[1:]), v.expand(q.shape[0], *v.shape[1:])
    bias = _bias(q, rule, allowed, key_at)
    # The compiled kernels support neither soft-cap nor tangents, and their log-sum-exp, which sinks need, has no
    # gradient.
    portable = rule.softcap is not None or (rule.sinks is not None and torch.is_grad_enabled())
    portable = portable or any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v))
    kernel = _portable if portable else _kernel_for(q, k, v, bias)
    part = kernel(q, k, v, rule, bias, causal)
    if allowed is None or sees_itself:
        return part
    blind = ~allowed.any(-1)  # [*batch_or_1, query]
    if not bool(blind.any()):
        return part
    blind = blind.view(-1, 1, blind.shape[-1])
    return AttentionPart(
        part.out.masked_fill(blind[..., None], 0.0),
        part.lse.masked_fill(blind, -torch.inf),
    )


def attends_in_place(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> bool:
    """Whether `attend_in_place` can be used for these."""
    plain = rule.window is None and rule.chunk is None and rule.softcap is None and rule.alibi is None
    tangents = any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v))
    return plain and not torch.is_grad_enabled() and not tangents and _kernel_for(q, k, v, None) is _cuda_flash


def attend_in_place(
    q: Float[Tensor, "batch head token d_head"],
    k: Float[Tensor, "batch kv_head token d_head"],
    v: Float[Tensor, "batch kv_head token d_value"],
    rule: Rule,
    starts: Int[Tensor, " sequence"],
    longest: int,
) -> AttentionPart:
    """Causal attention of sequences that lie one after another in a row, each over itself; nothing is copied or padded.

    starts    where each begins in the row
    longest   the most tokens of any
    """
    batch, heads, tokens, _ = q.shape
    rows = torch.arange(batch + 1, device=q.device) * tokens
    bounds = torch.cat([(rows[:-1, None] + starts).flatten(), rows[-1:]]).to(torch.int32)
    one, other, third = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out, lse = _flash_of_sequences(one, other, third, bounds, longest, rule.scale)
    return AttentionPart(
        out.view(batch, tokens, heads, -1).transpose(1, 2), lse.view(heads, batch, tokens).transpose(0, 1)
    )


def _flash_of_sequences(
    q: Float[Tensor, "token head d_head"],
    k: Float[Tensor, "token kv_head d_head"],
    v: Float[Tensor, "token kv_head d_value"],
    bounds: Int[Tensor, " sequence_and_end"],
    longest: int,
    scale: float,
) -> tuple[Float[Tensor, "token head d_value"], Float[Tensor, "head token"]]:
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )
    return found[0], found[1]


def merge(first: AttentionPart, second: AttentionPart) -> AttentionPart:
    """The two parts' softmaxes as one: each output weighted by its share of the mass."""
    # Not NaN: a query always sees itself, so its own part has mass. `lerp` is exact at both ends, so a part without
    # mass leaves the other as it is.
    lse = torch.logaddexp(first.lse, second.lse)
    weight = torch.exp(first.lse - lse).to(first.out.dtype)[..., None]
    return AttentionPart(torch.lerp(second.out, first.out, weight), lse)


def with_sinks(part: AttentionPart, sinks: Float[Tensor, " head"] | None) -> AttentionPart:
    """Let each head's sink take its share of the mass; it adds nothing to the output."""
    if sinks is None:
        return part
    lse = torch.logaddexp(part.lse, sinks.to(part.lse.dtype)[None, :, None])
    return AttentionPart(part.out * torch.exp(part.lse - lse).to(part.out.dtype)[..., None], lse)


def by_token(part: AttentionPart) -> Float[Tensor, "batch query head d_value"]:
    """The output as architectures expect it, contiguous: some of them view it in another shape."""
    return part.out.transpose(1, 2).contiguous()


def final_logits(
    logits: Float[Tensor, "batch head query key"], rule: Rule, key_at: Int[Tensor, " key"]
) -> Float[Tensor, "batch head query key"]:
    """Scaled q·k as the softmax sees it: soft-capped and biased, without windows and causality."""
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    if rule.alibi is not None:
        logits = logits + rule.alibi(key_at)[None, :, None, :]
    return logits


def _bias(
    q: Tensor, rule: Rule, allowed: Tensor | None, key_at: Tensor | None
) -> Float[Tensor, "batch_or_1 head_or_1 query_or_1 key"] | None:
    bias = None
    if rule.alibi is not None:
        assert key_at is not None, "a positional bias needs the keys' positions"
        bias = rule.alibi(key_at.view(-1, key_at.shape[-1])).to(q.dtype).transpose(0, 1)[:, :, None, :]
    if allowed is not None:
        mask = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill_(~allowed, -torch.inf)
        mask = mask.view(-1, 1, *mask.shape[-2:])
        bias = mask if bias is None else bias + mask
    return bias


# Kernels: (q, k, v, rule, bias, causal) -> AttentionPart. The compiled ones are torch's own but private: the public
# function does not return the log-sum-exp; `_portable` needs only matmul; it is their fallback and their reference.
Kernel = Callable[[Tensor, Tensor, Tensor, Rule, Tensor | None, bool], AttentionPart]


def _kernel_for(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Kernel:
    # The compiled kernels need equal widths and at least one query and key.
    if q.shape[-1] != v.shape[-1] or not q.shape[2] or not k.shape[2]:
        return _portable
    if q.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return _cpu_flash
    if q.device.type != "cuda" or bias is not None or q.shape[-1] % 8:
        return _portable
    if q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256:
        return _cuda_flash
    return _cuda_efficient if q.dtype == torch.float32 else _portable


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, rule: Rule, bias: Tensor | None, causal: bool) -> AttentionPart:
    if bias is not None and causal:
        return _causal_slices(q, k, v, rule, bias)
    if bias is not None:
        bias = bias.expand(-1, -1, q.shape[2], -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # pyright: ignore
        q, k, v, 0.0, causal and bias is None, attn_mask=bias, scale=rule.scale
    )
    return AttentionPart(out, lse)


def _causal_slices(q: Tensor, k: Tensor, v: Tensor, rule: Rule, bias: Tensor) -> AttentionPart:
    """Causal and biased: the two become one mask, made for a slice of queries at a time."""
    rows = max(1, _LOGITS_AT_ONCE // (q.shape[0] * q.shape[1] * k.shape[2]))
    parts: list[AttentionPart] = []
    for start in range(0, q.shape[2], rows):
        some = slice(start, start + rows)
        own = bias if bias.shape[2] == 1 else bias[:, :, some]
        own = own.masked_fill(_later(q[:, :, some], k, start), -torch.inf)
        parts.append(_cpu_flash(q[:, :, some], k, v, rule, own, False))
    return AttentionPart(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))


def _cuda_flash(q: Tensor, k: Tensor, v: Tensor, rule: Rule, bias: Tensor | None, causal: bool) -> AttentionPart:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=rule.scale)[:2]
    return AttentionPart(out, lse[..., : q.shape[2]])  # the kernel may pad its log-sum-exps to whole blocks


def _cuda_efficient(q: Tensor, k: Tensor, v: Tensor, rule: Rule, bias: Tensor | None, causal: bool) -> AttentionPart:
    """For float32, which flash attention does not take."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=rule.scale
        )[:2]

    return _by_groups(kernel, q, k, v, causal)


def _by_groups(
    kernel: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> AttentionPart:
    """A kernel that wants as many heads of k and v as of q."""
    # Without causality the order of queries does not matter, so heads that share a key head become further queries of
    # it and k and v are not copied.
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and causal:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    folded = q if groups == 1 or causal else q.reshape(q.shape[0], k.shape[1], groups * q.shape[2], q.shape[3])
    # The kernels may pad their log-sum-exps to whole blocks.
    out, lse = kernel(folded, k, v)
    return AttentionPart(out.reshape(*q.shape[:3], v.shape[-1]), lse[..., : folded.shape[2]].reshape(q.shape[:3]))


def _portable(q: Tensor, k: Tensor, v: Tensor, rule: Rule, bias: Tensor | None, causal: bool) -> AttentionPart:
    """The definition, a slice of queries at a time."""
    batch, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    rows = max(1, _LOGITS_AT_ONCE // max(1, batch * heads * keys))
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for start in range(0, max(queries, 1), rows):
        piece = q[:, :, start : start + rows]
        grouped = piece.reshape(batch, kv_heads, -1, q.shape[-1])
        logits = (grouped @ k.mT).reshape(batch, heads, piece.shape[2], keys) * rule.scale
        # A sum of many exponentials needs more bits than half precision has; the compiled kernels use float32 here too.
        if q.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        if rule.softcap is not None:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)
        if bias is not None:
            logits = logits + (bias if bias.shape[2] == 1 else bias[:, :, start : start + rows])
        if causal:
            logits = logits.masked_fill(_later(piece, k, start), -torch.inf)
        lse = torch.logsumexp(logits, dim=-1)
        # exp(−∞ − (−∞)) would be NaN where a query sees no key.
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        weights = torch.exp(logits - finite[..., None]).to(v.dtype)
        out = weights.reshape(batch, kv_heads, -1, keys) @ v
        outs.append(out.reshape(batch, heads, piece.shape[2], v.shape[-1]))
        lses.append(lse)
    return AttentionPart(torch.cat(outs, 2), torch.cat(lses, 2))


def _later(q: Tensor, k: Tensor, start: int) -> Bool[Tensor, "query key"]:
    """Which keys come after each query, the first of which is at `start`."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(start + 1)
