"""Tiny random models of many architectures, in float64, with weights large enough that every part matters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 101
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {**_BASE, "num_key_value_heads": 2}
_HEAD = {**_GQA, "head_dim": 8}
_GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GQA),
    "mistral-window": ("mistral", {**_GQA, "sliding_window": 7}),
    "qwen2-bias": ("qwen2", _GQA),
    "qwen3-qk-norm": ("qwen3", _HEAD),
    "gemma": ("gemma", _HEAD),
    "gemma2-softcap": ("gemma2", {**_HEAD, "sliding_window": 6}),
    "gemma3": ("gemma3_text", {**_HEAD, "sliding_window": 6}),
    "gpt2": ("gpt2", _GPT),
    "gpt_neox": ("gpt_neox", _BASE),
    "gpt_bigcode-mqa": ("gpt_bigcode", _GPT),
    "opt": ("opt", {**_BASE, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi-parallel": ("phi", _BASE),
    "phi3-fused": ("phi3", _GQA),
    "olmo2": ("olmo2", _GQA),
    "cohere-parallel": ("cohere", _GQA),
    "stablelm": ("stablelm", _GQA),
    "granite": ("granite", _GQA),
    "gpt_oss-sinks": ("gpt_oss", {**_HEAD, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("mixtral", {**_GQA, "num_local_experts": 4}),
    # These seven compute attention inline.
    "xglm": ("xglm", {"vocab_size": VOCAB, "d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 48}),
    "gpt_neo-local": (
        "gpt_neo",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 128}
        | {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    ),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 4}),
    "codegen": ("codegen", {**_GPT, "rotary_dim": 4}),
    "bloom": ("bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "falcon-mqa": ("falcon", {**_BASE, "alibi": False, "multi_query": True}),
    "falcon-alibi": ("falcon", {**_BASE, "alibi": True, "multi_query": False}),
    "falcon-groups": ("falcon", {**_BASE, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "mpt": (
        "mpt",
        {"vocab_size": VOCAB, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128, "expansion_ratio": 2},
    ),
    # A pack would mix its tokens: it must take the slow path.
    "lfm2-hybrid": ("lfm2", {**_GQA, "layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3_next-hybrid": (
        "qwen3_next",
        {**_HEAD, **_MOE, "num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 16}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
}
INLINE = ("xglm", "gpt_neo-local", "gptj", "codegen", "bloom", "falcon-mqa", "falcon-alibi", "falcon-groups", "mpt")
HYBRID = ("lfm2-hybrid", "qwen3_next-hybrid")


def make(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 0.25) -> PreTrainedModel:
    """A random model of the zoo; `spread` is the standard deviation of its matrices."""
    kind, settings = ZOO[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product has no float64
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float64).to(dtype)
            parameter.copy_(parameter + 0.1 * noise if parameter.dim() == 1 else spread * noise)
    return model.eval()
