"""What the equivalence tests share: every model of the zoo once, its slow twin, and a few awkward queries."""

from __future__ import annotations

import random
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
from transformers import PreTrainedModel

import zoo
from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt
from dualview.tasks.prompts import Query, TrainingSequence
from equivalence import reference

BOS = 1
EXACT = 1e-9


def tokens(n: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, zoo.VOCAB) for _ in range(n))


DEMOS = (BOS, *tokens(14, 0))
PREFIXES = {"demos": (DEMOS, 1), "bos": ((BOS,), 1), "none": ((), 0), "demos without bos": (DEMOS[1:], 0)}
_A, _B, _C, _D = tokens(4, 1)
QUERIES = (
    Query(tokens(5, 2), ((_A,), (_B,)), 0),
    # Candidates of several tokens: two that part at the second token, one that begins another, one of its own.
    Query(tokens(9, 3), ((_A, _B), (_A, _C), (_A,), (_D, _B, _C)), 1),
    # A query of one token, longer than its candidates by nothing; two equal candidates.
    Query(tokens(1, 4), ((_B, _C), (_D,), (_B, _C)), 2),
    Query(tokens(5, 5), ((_C, _C, _C, _C), (_A,)), 1),
)
SEQUENCES = tuple(
    TrainingSequence((BOS, *tokens(n, 10 + n)), label_start=1 + n - label) for n, label in ((6, 1), (11, 3), (4, 2))
)


# Beyond the zoo: one setting each that something else in the package might overlook.
_SMALL = dict(zoo.ZOO["llama"][1])
_MLA = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 12}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo-clip": ("olmo", {**_SMALL, "clip_qkv": 0.4}),
    "dbrx-clip-fused": (
        "dbrx",
        {"vocab_size": zoo.VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.4, "rope_theta": 10000.0}}
        | {"ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "mpt-clip": ("mpt", {**zoo.ZOO["mpt"][1], "attn_config": {"clip_qkv": 0.4}}),
    "gpt_bigcode-by-head": ("gpt_bigcode", {**zoo.ZOO["gpt2"][1], "multi_query": False}),
    "gpt2-scaled-by-layer": ("gpt2", {**zoo.ZOO["gpt2"][1], "scale_attn_by_inverse_layer_idx": True}),
    "gemma2-tight-cap": ("gemma2", {**zoo.ZOO["gemma2-softcap"][1], "attn_logit_softcapping": 0.5}),
    "persimmon-fused-norm": ("persimmon", zoo.ZOO["gpt_neox"][1]),
    "opt-post-norm": ("opt", {**zoo.ZOO["opt"][1], "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "falcon-serial": ("falcon", {**zoo.ZOO["falcon-alibi"][1], "parallel_attn": False, "bias": True}),
    "starcoder2-window": ("starcoder2", {**_SMALL, "sliding_window": 6}),
    # Its final norm is also the first thing to run.
    "nanochat": ("nanochat", _SMALL),
    # Keys wider than values, and made by two maps, one of them in part.
    "minicpm3-latent": ("minicpm3", {**_SMALL, **_MLA, "num_key_value_heads": 4}),
}
# Twelve heads of 4: ALiBi's slopes are then no powers of two, and every rounding of them shows.
_TWELVE = {"vocab_size": zoo.VOCAB, "hidden_size": 48, "max_position_embeddings": 512}
ALIBI: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom-12": ("bloom", {"vocab_size": zoo.VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 12}),
    "falcon-12": (
        "falcon",
        {**_TWELVE, "num_hidden_layers": 2, "num_attention_heads": 12, "alibi": True, "multi_query": False},
    ),
    "mpt-12": (
        "mpt",
        {"vocab_size": zoo.VOCAB, "d_model": 48, "n_layers": 2, "n_heads": 12, "max_seq_len": 512}
        | {"expansion_ratio": 2},
    ),
}


@cache
def model(name: str) -> PreTrainedModel:
    with mock.patch.dict(zoo.ZOO, MORE | ALIBI):
        return zoo.make(name)


@cache
def lm(name: str) -> LanguageModel:
    return adopt(model(name), None, name)  # pyright: ignore: no tokenizer is needed where ids are given


@cache
def twin(name: str) -> PreTrainedModel:
    """The slow reference of the same weights; never changed."""
    return reference.copy_of(model(name)).requires_grad_(False)


@cache
def answers(name: str, prefix: str) -> tuple[dict[str, reference.Answer], ...]:
    ids, special = PREFIXES[prefix]
    return tuple(reference.answer(twin(name), ids, special, query.ids, query.candidates) for query in QUERIES)


def worst(a: object, b: object) -> float:
    """The largest difference; NaN counts as infinite."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    assert x.shape == y.shape, f"shapes {x.shape} and {y.shape}"
    gap = np.abs(x - y)
    return float(np.where(np.isnan(gap), np.inf, gap).max(initial=0.0))
