"""The slow, independent computation that the package is held against.

Whole prompts, one at a time, in float64, with every T×T map written out. Nothing here comes from dualview. The models'
own code makes embeddings, norms, feed-forwards and logits; attention is made here, because Hugging Face's eager one
softmaxes in float32 and several older architectures compute it inline:

- architectures that look their attention up get `_dispatched`, which softmaxes visibly and checks its own idea of the
  causal triangle and the sliding window against the mask Hugging Face built;
- the inline ones get a forward of their own, written from the module's weights, with rotary and ALiBi spelt out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "slow_reference"


@dataclass
class LayerSeen:
    """One attention of one prompt: `logits` are q·k·scale as they come, `weights` what the softmax made of them."""

    module: nn.Module
    logits: Tensor  # [head, token, token]
    weights: Tensor  # [head, token, token]
    h: Tensor | None = None  # [token, d_model]


@dataclass
class Pass:
    log_probs: Tensor  # [token, vocab]
    layers: list[LayerSeen] = field(default_factory=list)


@cache
def triangle(length: int, window: int | None = None, chunk: int | None = None) -> Tensor:
    """[token, token]: what each token sees of itself and the past, pair by pair."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i + 1):
            seen[i, j] = (window is None or i - j < window) and (chunk is None or i // chunk == j // chunk)
    return seen


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seen: Tensor,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention of [head, token, d] tensors, head by head and with the whole map in view.

    Returns the output [token, head, d], the scaled logits and the weights. `bias` is [head, token, token].
    """
    heads = q.shape[0]
    group = heads // k.shape[0]
    outs, maps, weights = [], [], []
    for head in range(heads):
        keys, values = k[head // group], v[head // group]
        raw = (q[head] @ keys.T) * scale
        logits = raw
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if bias is not None:
            logits = logits + bias[head]
        top = logits.detach().masked_fill(~seen, -torch.inf).amax(1, keepdim=True)
        if sinks is not None:
            top = top.maximum(sinks[head].detach())
        mass = torch.where(seen, torch.exp(torch.where(seen, logits - top, 0.0)), 0.0)
        total = mass.sum(1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks[head] - top)
        weight = mass / total
        outs.append(weight @ values)
        maps.append(raw)
        weights.append(weight)
    return torch.stack(outs, 1), torch.stack(maps), torch.stack(weights)


# ------------------------------------------------------------------------------------- architectures that look it up


def _expected(module: Any, length: int) -> Tensor:
    """What a token of this layer should see, by the configuration."""
    config = module.config
    kinds = getattr(config, "layer_types", None)
    kind = "full_attention" if kinds is None else kinds[module.layer_idx]
    if kinds is None and config.model_type in ("mistral", "mixtral", "phi3", "starcoder2"):
        return triangle(length, window=config.sliding_window)
    if kind == "sliding_attention":
        return triangle(length, window=config.sliding_window)
    if kind == "chunked_attention":
        return triangle(length, chunk=config.attention_chunk_size)
    return triangle(length)


def _dispatched(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    assert query.shape[0] == 1, "one prompt at a time"
    seen = _expected(module, query.shape[2])
    assert torch.equal(attention_mask[0, 0] == 0, seen), "Hugging Face lets other tokens be seen"
    softcap = getattr(module.config, "attn_logit_softcapping", None)
    sinks = getattr(module, "sinks", None)
    out, maps, weights = plain_attention(query[0], key[0], value[0], scaling, seen, softcap=softcap, sinks=sinks)
    module.seen_layers.append(LayerSeen(module, maps, weights))
    return out[None], None


AttentionInterface.register(NAME, _dispatched)
AttentionMaskInterface.register(NAME, eager_mask)


# ------------------------------------------------------------------------------------------- the seven inline ones


def _rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    return torch.stack([x[..., row] for row in rows], -1)


def split_rows(kind: str, heads: int, kv_heads: int, d: int) -> dict[str, list[list[int]]]:
    """Which rows of a fused matrix make each head of q, k and v: the layouts, written out.

    `thirds`: all of q, then k, then v. `by_head`: q, k and v of head 0, then of head 1 … `groups`: the q of a group,
    then its k and v. `codegen`: four blocks (logical cores) of q, v, k: in that order.
    """
    found: dict[str, list[list[int]]] = {"q": [], "k": [], "v": []}
    block = lambda start: list(range(start, start + d))  # noqa: E731
    if kind == "thirds":
        for head in range(heads):
            found["q"].append(block(head * d))
        for head in range(kv_heads):
            found["k"].append(block(heads * d + head * d))
            found["v"].append(block((heads + kv_heads) * d + head * d))
    elif kind == "by_head":
        for head in range(heads):
            for place, role in enumerate("qkv"):
                found[role].append(block((3 * head + place) * d))
    elif kind == "groups":
        per = heads // kv_heads
        for g in range(kv_heads):
            start = g * (per + 2) * d
            for head in range(per):
                found["q"].append(block(start + head * d))
            found["k"].append(block(start + per * d))
            found["v"].append(block(start + (per + 1) * d))
    elif kind == "codegen":
        per = heads // 4
        for core in range(4):
            for place, role in enumerate("qvk"):
                for head in range(per):
                    found[role].append(block((core * 3 * per + place * per + head) * d))
    else:
        raise ValueError(kind)
    return found


def _fused(x: Tensor, matrix: nn.Linear, kind: str, heads: int, kv_heads: int, d: int) -> list[Tensor]:
    made = matrix(x)
    rows = split_rows(kind, heads, kv_heads, d)
    return [torch.stack([_rows(made, head) for head in rows[role]]) for role in "qkv"]


def _heads(x: Tensor, heads: int) -> Tensor:
    d = x.shape[-1] // heads
    return torch.stack([x[:, head * d : (head + 1) * d] for head in range(heads)])


def _turn(x: Tensor, angles: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Rotate each pair of coordinates (a, b) of [head, token, d] by its angle [token, pair]."""
    columns = list(x.unbind(-1))
    for place, (a, b) in enumerate(pairs):
        cos, sin = torch.cos(angles[:, place]).to(x.dtype), torch.sin(angles[:, place]).to(x.dtype)
        columns[a], columns[b] = x[..., a] * cos - x[..., b] * sin, x[..., b] * cos + x[..., a] * sin
    return torch.stack(columns, -1)


def _neighbours(q: Tensor, k: Tensor, dim: int, at: Tensor) -> list[Tensor]:
    """GPT-J's rotary: coordinates (0, 1), (2, 3) … of the first `dim` turn together."""
    at = at.double()
    speeds = torch.tensor([10000.0 ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    pairs = [(2 * i, 2 * i + 1) for i in range(dim // 2)]
    return [_turn(x, at[:, None] * speeds, pairs) for x in (q, k)]


def _halves(q: Tensor, k: Tensor, theta: float) -> list[Tensor]:
    """Falcon's rotary: coordinate i turns with i + d/2. Transformers makes the angles in float32 in any model."""
    d = q.shape[-1]
    speeds = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
    angles = torch.arange(q.shape[1], dtype=torch.float32)[:, None] * speeds
    return [_turn(x, angles, [(i, i + d // 2) for i in range(d // 2)]) for x in (q, k)]


def alibi_slopes(heads: int) -> list[float]:
    """Press et al. 2021: 2^(−8/n), 2^(−16/n), …; for n not a power of two, every other slope of 2n fills up.

    Transformers rounds the first slope to float32 and takes its powers in float32.
    """
    n = 1 << (heads.bit_length() - 1)
    first, extra = torch.tensor(2.0 ** (-8.0 / n)), torch.tensor(2.0 ** (-4.0 / n))
    powers = [(first, i + 1) for i in range(n)] + [(extra, 2 * i + 1) for i in range(heads - n)]
    return [float(torch.pow(base, torch.tensor(power))) for base, power in powers]


def mpt_slopes(heads: int) -> list[float]:
    """MPT takes the next power of two and, where heads are fewer, the odd slopes first."""
    n = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    return slopes if n == heads else (slopes[1::2] + slopes[::2])[:heads]


def _linear_bias(slopes: Sequence[float], length: int, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """[head, 1, key]: slope · position, in the precision the architecture keeps it in."""
    at = torch.arange(length)
    return torch.stack([rounded(rounded(torch.tensor(slope)) * at) for slope in slopes])[:, None, :].double()


def _single(x: Tensor) -> Tensor:
    return x.float()


def _brain(x: Tensor) -> Tensor:
    return x.bfloat16()


def _xglm(m: Any, x: Tensor, _at: Tensor) -> tuple[Any, ...]:
    q, k, v = (_heads(f(x), m.num_heads) for f in (m.q_proj, m.k_proj, m.v_proj))
    return q, k, v, m.out_proj, {"scale": 1 / math.sqrt(m.embed_dim // m.num_heads)}


def _gpt_neo(m: Any, x: Tensor, _at: Tensor) -> tuple[Any, ...]:
    q, k, v = (_heads(f(x), m.config.num_heads) for f in (m.q_proj, m.k_proj, m.v_proj))
    local = m.config.attention_layers[m.layer_id] == "local"
    return q, k, v, m.out_proj, {"scale": 1.0, "window": m.config.window_size if local else None}


def _gptj(m: Any, x: Tensor, at: Tensor) -> tuple[Any, ...]:
    heads = m.config.n_head
    q, k, v = (_heads(f(x), heads) for f in (m.q_proj, m.k_proj, m.v_proj))
    q, k = _neighbours(q, k, m.config.rotary_dim, at)
    return q, k, v, m.out_proj, {"scale": 1 / math.sqrt(m.config.n_embd // heads)}


def _codegen(m: Any, x: Tensor, at: Tensor) -> tuple[Any, ...]:
    heads, d = m.num_attention_heads, m.embed_dim // m.num_attention_heads
    q, k, v = _fused(x, m.qkv_proj, "codegen", heads, heads, d)
    q, k = _neighbours(q, k, m.rotary_dim, at)
    return q, k, v, m.out_proj, {"scale": 1 / math.sqrt(d)}


def _bloom(m: Any, x: Tensor, _at: Tensor) -> tuple[Any, ...]:
    d = m.hidden_size // m.num_heads
    q, k, v = _fused(x, m.query_key_value, "by_head", m.num_heads, m.num_heads, d)
    bias = _linear_bias(alibi_slopes(m.num_heads), len(x), _single)
    return q, k, v, m.dense, {"scale": 1 / math.sqrt(d), "bias": bias.expand(-1, len(x), -1)}


def _falcon(m: Any, x: Tensor, _at: Tensor) -> tuple[Any, ...]:
    config, heads = m.config, m.config.num_attention_heads
    d = config.hidden_size // heads
    if config.new_decoder_architecture:
        kind, kv = "groups", config.num_kv_heads
    else:
        kind, kv = ("thirds", 1) if config.multi_query else ("by_head", heads)
    q, k, v = _fused(x, m.query_key_value, kind, heads, kv, d)
    settings: dict[str, Any] = {"scale": 1 / math.sqrt(d)}
    if config.alibi:
        # Falcon adds its ALiBi, kept in bfloat16, before it scales.
        bias = _linear_bias(alibi_slopes(heads), len(x), _brain) / math.sqrt(d)
        settings["bias"] = bias.expand(-1, len(x), -1)
    else:
        q, k = _halves(q, k, config.rope_parameters["rope_theta"])
    return q, k, v, m.dense, settings


def _mpt(m: Any, x: Tensor, _at: Tensor) -> tuple[Any, ...]:
    d = m.hidden_size // m.n_heads
    q, k, v = _fused(x, m.Wqkv, "thirds", m.n_heads, m.n_heads, d)
    if m.clip_qkv:
        most = torch.tensor(m.clip_qkv, dtype=x.dtype)
        q, k, v = (torch.minimum(torch.maximum(y, -most), most) for y in (q, k, v))
    bias = _linear_bias(mpt_slopes(m.n_heads), len(x), _single)
    return q, k, v, m.out_proj, {"scale": 1 / math.sqrt(d), "bias": bias.expand(-1, len(x), -1)}


_INLINE: dict[str, Callable[..., tuple[Any, ...]]] = {
    "XGLMAttention": _xglm,
    "GPTNeoSelfAttention": _gpt_neo,
    "GPTJAttention": _gptj,
    "CodeGenAttention": _codegen,
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
}


def _inline_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    assert hidden_states.shape[0] == 1, "one prompt at a time"
    name = type(self).__name__
    at = kwargs.get("position_ids")
    at = torch.arange(hidden_states.shape[1]) if at is None else at[0]
    q, k, v, output, settings = _INLINE[name](self, hidden_states[0], at)
    seen = triangle(hidden_states.shape[1], window=settings.get("window"))
    out, maps, weights = plain_attention(q, k, v, settings["scale"], seen, bias=settings.get("bias"))
    h = output(out.flatten(1))
    self.seen_layers.append(LayerSeen(self, maps, weights, h))
    if name == "BloomAttention":  # it adds the residual stream itself
        residual = kwargs["residual"] if "residual" in kwargs else args[0]
        return residual + h[None], None
    return h[None], None


# -------------------------------------------------------------------------------------------------- running prompts


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """An untouched copy that attends by this file."""
    twin = copy.deepcopy(model).eval()
    configs = {id(m.config): m.config for m in twin.modules() if isinstance(m, PreTrainedModel)}
    for config in configs.values():
        config._attn_implementation = NAME
    seen_layers: list[LayerSeen] = []
    for module in twin.modules():
        module.seen_layers = seen_layers  # shared by all of the copy's modules, and by no other copy's
        if type(module).__name__ in _INLINE:
            module.forward = MethodType(_inline_forward, module)
    return twin


def run(twin: PreTrainedModel, ids: Sequence[int], positions: Sequence[int] | None = None) -> Pass:
    """One prompt from beginning to end. `twin` comes from `copy_of`."""
    layers: list[LayerSeen] = twin.seen_layers  # pyright: ignore[reportAssignmentType]
    layers.clear()

    def keep(module: nn.Module, _inputs: Any, output: Any) -> None:
        if layers and layers[-1].module is module and layers[-1].h is None:
            layers[-1].h = (output[0] if isinstance(output, tuple) else output)[0]

    arguments: dict[str, Any] = {"input_ids": torch.tensor([list(ids)]), "use_cache": False}
    if positions is not None:
        arguments["position_ids"] = torch.tensor([list(positions)])
        # Said outright, or a gap in the positions would pass for the start of another sequence.
        arguments["attention_mask"] = torch.ones(1, len(ids), dtype=torch.long)
    hooks = [module.register_forward_hook(keep) for module in twin.modules()]
    try:
        logits = twin(**arguments).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    top = logits.detach().amax(-1, keepdim=True)
    shifted = logits - top
    return Pass(shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True)), list(layers))


@dataclass
class Answer:
    """What the contract says of one query: mean log-probs, and h, m and λ at the recorded token."""

    log_probs: list[float]
    h: np.ndarray  # [layer, d_model]
    m: list[np.ndarray]  # per layer [head, column]
    demo_mass: list[np.ndarray]  # per layer [head]
    demo_logits: np.ndarray  # [layer, prefix token]


@torch.no_grad()
def answer(
    twin: PreTrainedModel,
    prefix: Sequence[int],
    special: int,
    query: Sequence[int],
    candidates: Sequence[Sequence[int]],
) -> dict[str, Answer]:
    """One query after one prefix, each candidate in a prompt of its own; records `at` both "prompt" and "label0"."""
    start, stop = len(prefix), len(prefix) + len(query)
    scores: list[float] = []
    first: Pass | None = None
    for candidate in candidates:
        seen = run(twin, [*prefix, *query, *candidate])
        first = first or seen
        scores.append(sum(float(seen.log_probs[stop - 1 + i, token]) for i, token in enumerate(candidate)))
        scores[-1] /= len(candidate)
    assert first is not None
    found: dict[str, Answer] = {}
    for at, token in (("prompt", stop - 1), ("label0", stop + len(candidates[0]) - 1)):
        found[at] = Answer(
            scores,
            np.stack([layer.h[token].numpy() for layer in first.layers]),
            [layer.logits[:, token, start : token + 1].numpy() for layer in first.layers],
            [layer.weights[:, token, special:start].sum(-1).numpy() for layer in first.layers],
            np.stack([layer.logits[:, token, :start].sum(0).numpy() for layer in first.layers]),
        )
    return found
