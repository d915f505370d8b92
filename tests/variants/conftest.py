"""Tiny random models, masks, and every variant once more, written as loops over the equations."""

from __future__ import annotations

import math
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf

from dualview.variants import (
    Alibi,
    Linear,
    Momentum,
    Negative,
    Regularised,
    Sign,
    TokenShift,
    attach,
    variant_parameters,
)

_SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WITHOUT_GROUPS = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.4}
_DENSE = {"num_local_experts": 2, "intermediate_size_mlp": 24, "interleave_moe_layer_step": 3}

CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**_SHAPE),
    "gpt2": lambda: tf.GPT2Config(vocab_size=40, bos_token_id=1, eos_token_id=None, pad_token_id=0, **_GPT2),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**_WITHOUT_GROUPS),
    "qwen3": lambda: tf.Qwen3Config(**_SHAPE, head_dim=4),
    "mistral": lambda: tf.MistralConfig(**_SHAPE, sliding_window=4),
    "gemma2": lambda: tf.Gemma2Config(**_SHAPE, head_dim=4, sliding_window=4, attn_logit_softcapping=2.0),
    # All layers sliding here, and it passes use_cache=False to its attention in any case.
    "olmo3": lambda: tf.Olmo3Config(**_SHAPE, sliding_window=4),
    "llama4": lambda: tf.Llama4TextConfig(**_SHAPE, attention_chunk_size=4, head_dim=4, **_DENSE),
    "phi3": lambda: tf.Phi3Config(**_SHAPE),
    # What its first layer caches of a token depends on nothing before the token.
    "gemma3": lambda: tf.Gemma3TextConfig(
        **_SHAPE, head_dim=4, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
}
NORMS = {
    "llama": "LlamaRMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "mistral": "MistralRMSNorm",
    "gemma2": "Gemma2RMSNorm",
    "gemma3": "Gemma3RMSNorm",
    "olmo3": "Olmo3RMSNorm",
    "llama4": "Llama4TextRMSNorm Llama4TextL2Norm",
    "phi3": "Phi3RMSNorm",
}


def _exact_norm(name, original):
    """The norm in the precision of its input. transformers' own rounds to float32, which would hide what the tests
    measure of the attention."""

    def forward(self, x):
        if x.dtype != torch.float64:
            return original(self, x)
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        weight = getattr(self, "weight", None)
        return out if weight is None else out * (weight + 1 if name.startswith("Gemma") else weight)

    return forward


@pytest.fixture(autouse=True)
def exact_norms(monkeypatch):
    for kind, names in NORMS.items():
        module = import_module(f"transformers.models.{kind}.modeling_{kind}")
        for name in names.split():
            norm = getattr(module, name)
            monkeypatch.setattr(norm, "forward", _exact_norm(name, norm.forward))


def make_model(kind: str, implementation: str = "sdpa") -> tf.PreTrainedModel:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=implementation)
    model = model.double().eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, where mistakes hide
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def equipped(kind: str, variant) -> tf.PreTrainedModel:
    """A model with the variant on, its adapters filled with numbers."""
    model = make_model(kind, "eager" if kind == "gemma2" else "sdpa")
    attach(model, variant)
    with torch.no_grad():
        for parameter in variant_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def decoded(model, ids, attention_mask, cache, cuts) -> torch.Tensor:
    """Logits with a cache, in pieces that end at `cuts`."""
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        out = model(
            ids[:, start:end],
            attention_mask=attention_mask[:, :end],
            position_ids=positions(attention_mask)[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        pieces.append(out.logits)
        cache = out.past_key_values
    return torch.cat(pieces, 1)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def slow(variant, query, key, value, coefficient=None, window=None, demos=None) -> np.ndarray:
    """One unpadded sequence: query [head, token, d], key and value [kv_head, token, d] -> [token, head, d]."""
    query, key, value = (np.asarray(x, dtype=float) for x in (query, key, value))
    heads, length, d = query.shape
    group = heads // key.shape[0]
    c = np.broadcast_to(variant.value() if coefficient is None else np.asarray(coefficient), key.shape[0])
    out = np.zeros((length, heads, value.shape[-1]))
    for h in range(heads):
        k, v, x = key[h // group], value[h // group], float(c[h // group])
        starts = [0 if window is None else max(0, t - window + 1) for t in range(length)]
        used = _changed_values(variant, k, v, x, starts, demos)
        for t in range(length):
            seen = range(starts[t], t + 1)
            score = np.array([query[h, t] @ k[i] / math.sqrt(d) for i in seen])
            if isinstance(variant, Alibi):
                score += [-x * 2 ** (-8 * (h + 1) / heads) * (t - i) for i in seen]
            weights = softmax(score)
            if isinstance(variant, Linear):
                weights = x * score * (math.sqrt(d) if variant.bare else 1) / (len(seen) if variant.average else 1)
            y = sum(w * used[i] for w, i in zip(weights, seen, strict=True))
            if isinstance(variant, Momentum):
                y = y + sum((x ** (t - i) * v[i] for i in seen if i < t), np.zeros_like(v[0]))
            if isinstance(variant, Sign) and variant.scale == "sequence":
                y = y * np.mean([abs(v[i]).mean() for i in seen])
            if isinstance(variant, Regularised) and variant.form == "slides":
                y = y - x * v[t]
            if isinstance(variant, Regularised) and variant.form == "strict" and demos is None:
                y = y - x * weights[-1] * v[t]
            out[t, h] = y
    return out


def _changed_values(variant, k, v, x, starts, demos) -> list[np.ndarray]:
    used = []
    for i in range(len(v)):
        value = v[i]
        earlier = range(starts[i], i)
        if isinstance(variant, Sign):
            value = x * np.sign(v[i]) * (abs(v[i]).mean() if variant.scale == "token" else 1)
        if isinstance(variant, Negative):
            lowest = sorted(earlier, key=lambda j: k[i] @ k[j])[: variant.k]
            value = v[i] - x / variant.k * sum((v[j] for j in lowest), np.zeros_like(v[i]))
        if isinstance(variant, TokenShift):
            value = v[i] + sum((x ** (i - j) * v[j] for j in earlier), np.zeros_like(v[i]))
        if isinstance(variant, Regularised) and demos is not None and i >= demos:
            value = (1 - x) * v[i]
        used.append(value)
    return used


def causal_mask(real: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """[batch, 1, query, key] from which tokens are real."""
    length = real.shape[1]
    at = torch.arange(length)
    seen = at[None, :] <= at[:, None]
    if window is not None:
        seen = seen & (at[None, :] > at[:, None] - window)
    return (seen[None] & real[:, None, :])[:, None]


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    return SimpleNamespace(
        model=make_model,
        equipped=equipped,
        decoded=decoded,
        positions=positions,
        slow=slow,
        causal_mask=causal_mask,
        configs=CONFIGS,
        norms=NORMS,
    )
