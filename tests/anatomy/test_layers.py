"""What `dissect` finds in each architecture, against rows and names written down by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import zoo
from dualview.anatomy.layers import Anatomy, dissect
from dualview.io.errors import UserError
from dualview.models.loading import adopt
from equivalence import cases, training


def spans(*pieces: tuple[int, int]) -> list[int]:
    return [row for first, last in pieces for row in range(first, last + 1)]


BY_HEAD = {
    "q": spans((0, 7), (24, 31), (48, 55), (72, 79)),
    "k": spans((8, 15), (32, 39), (56, 63), (80, 87)),
    "v": spans((16, 23), (40, 47), (64, 71), (88, 95)),
}
THIRDS = {"q": spans((0, 31)), "k": spans((32, 63)), "v": spans((64, 95))}
ONE_KEY_HEAD = {"q": spans((0, 31)), "k": spans((32, 39)), "v": spans((40, 47))}
TWO_KEY_HEADS = {"q": spans((0, 31)), "k": spans((32, 47)), "v": spans((48, 63))}
FUSED = {
    "gpt2": THIRDS,
    "gpt2-scaled-by-layer": THIRDS,
    "mpt": THIRDS,
    "mpt-clip": THIRDS,
    "gpt_neox": BY_HEAD,
    "bloom": BY_HEAD,
    "falcon-alibi": BY_HEAD,
    "falcon-serial": BY_HEAD,
    "gpt_bigcode-by-head": BY_HEAD,
    "persimmon-fused-norm": BY_HEAD,
    "gpt_bigcode-mqa": ONE_KEY_HEAD,
    "falcon-mqa": ONE_KEY_HEAD,
    "phi3-fused": TWO_KEY_HEADS,
    "dbrx-clip-fused": TWO_KEY_HEADS,
    "falcon-groups": {
        "q": spans((0, 15), (32, 47)),
        "k": spans((16, 23), (48, 55)),
        "v": spans((24, 31), (56, 63)),
    },
    # Four blocks, one a core of the machine it was trained on, each of q, then v, then k.
    "codegen": {
        "q": spans((0, 7), (24, 31), (48, 55), (72, 79)),
        "v": spans((8, 15), (32, 39), (56, 63), (80, 87)),
        "k": spans((16, 23), (40, 47), (64, 71), (88, 95)),
    },
}


def rows_of(anatomy: Anatomy, layer: int, role: str) -> list[list[int]]:
    found = []
    for projection in anatomy.layers[layer].projections[role]:  # pyright: ignore[reportArgumentType]
        found.append(list(range(projection.d_out)) if projection.rows is None else projection.rows.tolist())
    return found


@pytest.mark.parametrize("name", FUSED)
def test_rows_of_fused_matrices(name: str) -> None:
    anatomy = cases.lm(name).anatomy
    for layer in range(len(anatomy.layers)):
        for role, rows in FUSED[name].items():
            assert rows_of(anatomy, layer, role) == [rows]
    both = anatomy.projections(("k", "v"))
    assert len(both) == len(anatomy.layers)
    for projection in both:
        assert projection.rows is not None
        assert projection.rows.tolist() == sorted(FUSED[name]["k"] + FUSED[name]["v"])
        assert not set(projection.rows.tolist()) & set(FUSED[name]["q"])
        assert torch.equal(projection.weight(), training._matrix(projection.module)[projection.rows])
    everything = anatomy.projections(("q", "k", "v"))
    assert all(projection.rows is None for projection in everything)


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name not in FUSED])
def test_separate_matrices_are_found_by_name(name: str) -> None:
    anatomy, model = cases.lm(name).anatomy, cases.model(name)
    for params, roles in (("kv", ("k", "v")), ("qkv", ("q", "k", "v")), ("v", ("v",))):
        expected = training.expected_rows(name, model, params)
        found = {
            p.name: list(range(p.d_out)) if p.rows is None else p.rows.tolist() for p in anatomy.projections(roles)
        }
        assert found == expected


def test_a_gate_beside_the_queries_is_not_a_query() -> None:
    [layer] = cases.lm("qwen3_next-hybrid").anatomy.layers
    [queries] = layer.projections["q"]
    assert queries.rows is not None
    assert queries.rows.tolist() == spans((0, 7), (16, 23), (32, 39), (48, 55))


def test_latent_keys_come_from_two_maps() -> None:
    """MiniCPM3: four rows of the first map are the rotated part of every key; the second makes the rest, and values."""
    layer = cases.lm("minicpm3-latent").anatomy.layers[0]
    keys = {p.name.rsplit(".", 1)[1]: p for p in layer.projections["k"]}
    assert set(keys) == {"kv_a_proj_with_mqa", "kv_b_proj"}
    assert keys["kv_a_proj_with_mqa"].rows.tolist() == spans((12, 15))  # pyright: ignore[reportOptionalMemberAccess]
    # Head by head: 4 rows of key, then 12 of value.
    assert keys["kv_b_proj"].rows.tolist() == spans((0, 3), (16, 19), (32, 35), (48, 51))  # pyright: ignore
    [values] = layer.projections["v"]
    assert values.rows.tolist() == spans((4, 15), (20, 31), (36, 47), (52, 63))  # pyright: ignore


OUTPUTS = {
    "c_proj": ("gpt2", "gpt_bigcode-mqa"),
    "dense": ("gpt_neox", "phi-parallel", "bloom", "falcon-mqa", "falcon-alibi", "falcon-groups"),
    "out_proj": ("opt", "xglm", "gpt_neo-local", "gptj", "codegen", "mpt", "lfm2-hybrid"),
}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_parts_of_a_model(name: str) -> None:
    anatomy, model = cases.lm(name).anatomy, cases.model(name)
    names = {module: key for key, module in model.named_modules()}
    place = training.place_of(name)
    ending = next((ending for ending, who in OUTPUTS.items() if name in who), "o_proj")
    with_attention = (
        [1] if name == "lfm2-hybrid" else [3] if name == "qwen3_next-hybrid" else range(len(anatomy.blocks))
    )
    prefixes = [f"{place.blocks}.{i}.{place.attention}" for i in with_attention]
    assert [names[layer.output] for layer in anatomy.layers] == [f"{prefix}.{ending}" for prefix in prefixes]
    assert [names[layer.module] for layer in anatomy.layers] == prefixes
    assert list(anatomy.blocks) == list(model.get_submodule(place.blocks).children())
    for layer in anatomy.layers:
        assert (layer.heads, layer.d_head, layer.d_model) == (4, 8, 32)
    final = names[anatomy.final].rsplit(".", 1)[1]
    assert final in ("norm", "ln_f", "final_layer_norm", "final_layernorm", "layer_norm", "norm_f", "embedding_norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "falcon-groups", "codegen", "mixtral"])
def test_narrow_models_have_the_same_anatomy(name: str, dtype: torch.dtype) -> None:
    anatomy = dissect(zoo.make(name, dtype=dtype))
    for mine, wide in zip(anatomy.layers, cases.lm(name).anatomy.layers, strict=True):
        for role in ("q", "k", "v"):
            for a, b in zip(mine.projections[role], wide.projections[role], strict=True):
                assert a.name == b.name
                assert (a.rows is None) == (b.rows is None)
                assert a.rows is None or b.rows is None or torch.equal(a.rows, b.rows)


def test_dissecting_leaves_no_trace() -> None:
    model = zoo.make("llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    dissect(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["phimoe", "llama4_text"])
def test_a_router_that_is_a_linear_map_and_more_keeps_its_forward(kind: str) -> None:
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 16, "intermediate_size_mlp": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1 if kind == "llama4_text" else 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **heads, **experts))
    assert any(type(m) is not nn.Linear and isinstance(m, nn.Linear) for m in model.modules())
    for number, layer in enumerate(dissect(model).layers):
        found = [layer.projections[role][0].name for role in ("q", "k", "v")]
        assert found == [f"model.layers.{number}.self_attn.{role}_proj" for role in ("q", "k", "v")]


def test_a_model_without_attention_is_refused_in_one_sentence() -> None:
    config = AutoConfig.for_model(
        "mamba", vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4, intermediate_size=16
    )
    with pytest.raises(UserError, match="cannot follow the attention of tiny"):
        adopt(AutoModelForCausalLM.from_config(config), None, "tiny")


def test_a_model_without_blocks_is_refused_in_one_sentence() -> None:
    class Flat(nn.Module):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=10))

    with pytest.raises(UserError, match="no list of blocks"):
        dissect(Flat())  # pyright: ignore[reportArgumentType]
