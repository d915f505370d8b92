"""Architectures with unusual attention arguments, against plain forward passes of Hugging Face."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dualview.models.loading import adopt
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import Query

VOCAB = 61
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 160,
    "sliding_window": 10,
    "ffn_dim": 40,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_RNG = np.random.default_rng(3)
PREFIX = (1, *(int(t) for t in _RNG.integers(3, VOCAB, 24)))
QUERIES = [Query(tuple(int(t) for t in _RNG.integers(3, VOCAB, n)), ((5,), (6, 7), (6, 8, 9)), 0) for n in (4, 13, 1)]


def build(name: str, *, eager: bool = False) -> PreTrainedModel:
    known = {key: value for key, value in _SIZES.items() if hasattr(AutoConfig.for_model(name), key)}
    torch.manual_seed(0)
    how = {"attn_implementation": "eager"} if eager else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **known), dtype=torch.float64, **how)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + 0.1 * noise if parameter.dim() == 1 else 0.25 * noise)
    return model.eval()


@torch.no_grad()
def plain(model: PreTrainedModel, query: Query) -> list[float]:
    """Each candidate's mean log-probability from a pass of its own."""
    found: list[float] = []
    for candidate in query.candidates:
        # The last token is not read: it would change what sparse attention chooses for those before it.
        ids = torch.tensor([[*PREFIX, *query.ids, *candidate[:-1]]])
        log_probs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double(), -1)
        last = len(PREFIX) + len(query.ids) - 1
        found.append(float(np.mean([float(log_probs[last + i, token]) for i, token in enumerate(candidate)])))
    return found


@pytest.mark.parametrize("name", ["afmoe", "moshi", "doge", "deepseek_v32", "glm_moe_dsa", "ministral", "starcoder2"])
def test_scores_are_those_of_plain_passes(name: str) -> None:
    """Windows short enough to matter, a window that is in the configuration alone, and attention to chosen tokens."""
    model = build(name)
    found = ask(adopt(model, None, name), QUERIES, PassPlan(PREFIX, 1, record=False)).settings[0].log_probs
    np.testing.assert_allclose(found, [plain(model, query) for query in QUERIES], atol=1e-5)


def test_the_mass_on_demonstrations_is_that_of_the_models_own_mask() -> None:
    """Doge adds a bias of its own making to its mask."""
    model = build("doge", eager=True)
    found = ask(adopt(model, None, "doge"), QUERIES, PassPlan(PREFIX, 1)).settings[0].demo_mass
    assert found is not None
    with torch.no_grad():
        maps = model(input_ids=torch.tensor([[*PREFIX, *QUERIES[1].ids]]), output_attentions=True).attentions
    own = torch.stack([layer[0, :, -1, 1 : len(PREFIX)].sum(-1) for layer in maps])
    np.testing.assert_allclose(found[1], own, atol=1e-6)
