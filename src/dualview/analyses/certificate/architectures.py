"""Small models with random weights, of several architectures: nothing they do in context was learnt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt

_LLAMA = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_LLAMA, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "gpt_neox": _LLAMA,
    "gemma2": {**_LLAMA, "num_key_value_heads": 4, "head_dim": 16},
}


def random_model(name: str, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> LanguageModel:
    """A model of one of `ARCHITECTURES`, with the weights that this seed draws."""
    config = AutoConfig.for_model(name, vocab_size=len(tokenizer), **ARCHITECTURES[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    return adopt(model.eval(), tokenizer, f"{name} with random weights, seed {seed}")
