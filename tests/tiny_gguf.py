"""A tiny quantised Llama, written as a GGUF file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np


def write_tiny_llama(path: Path, seed: int = 0, tied: bool = True) -> dict[str, np.ndarray]:
    """A one-layer Llama in GGUF (2 heads, 1 K/V head, 32 wide heads) and the Hugging Face weights it must become.

    A GGUF model is tied when it has no weights of its own for the output.
    """
    gguf: Any = importlib.import_module("gguf")
    d_model, d_head, heads, d_ff = 64, 32, 2, 96
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = ["<unk>", "<s>", "</s>", *letters, "!!"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(d_model)
    writer.add_block_count(1)
    writer.add_feed_forward_length(d_ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(d_head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3, 3, 3] + [1] * (len(vocabulary) - 3))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    rng = np.random.default_rng(seed)
    expected: dict[str, np.ndarray] = {}

    def add(name: str, theirs: str, shape: tuple[int, ...], heads: int | None = None) -> None:
        array = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 2:
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            array = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, array)
        if heads is not None:  # GGUF interleaves each head's rotary pairs; Hugging Face keeps the halves apart
            rows = [
                head * d_head + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(d_head // 2)
            ]
            array = array[rows]
        expected[theirs] = array

    add("token_embd.weight", "model.embed_tokens.weight", (len(vocabulary), d_model))
    add("output_norm.weight", "model.norm.weight", (d_model,))
    add("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight", (d_model,))
    add("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", (d_model,))
    add("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", (heads * d_head, d_model), heads)
    add("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", (d_head, d_model), 1)
    add("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", (d_head, d_model))
    add("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight", (d_model, heads * d_head))
    add("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight", (d_ff, d_model))
    add("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", (d_ff, d_model))
    add("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", (d_model, d_ff))
    if not tied:
        add("output.weight", "lm_head.weight", (len(vocabulary), d_model))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
