"""Before the reference judges anybody: it says what Hugging Face says, as closely as Hugging Face says it."""

from __future__ import annotations

import copy

import pytest
import torch

import zoo
from equivalence import cases, reference

# Their own eager attention softmaxes (or multiplies q and k) in float32, whatever the model's dtype.
SINGLE = ("gemma2-softcap", "xglm", "gpt_neo-local", "gptj", "codegen", "bloom", "mpt", "gemma2-tight-cap", "mpt-clip")
SINGLE += ("bloom-12", "mpt-12")


@pytest.mark.parametrize("name", [*zoo.ZOO, *cases.MORE, *cases.ALIBI])
def test_the_reference_is_the_model(name: str) -> None:
    ids = [*cases.DEMOS, *cases.QUERIES[1].ids]
    model = cases.model(name)
    if name == "xglm":  # it clamps at a float32 constant, which a float64 model cannot even run
        model = copy.deepcopy(model).float()
    with torch.no_grad():
        theirs = torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0].double(), -1)
        ours = reference.run(cases.twin(name), ids).log_probs
    assert cases.worst(theirs, ours) < (5e-5 if name in SINGLE else 1e-12)


def test_the_reference_sees_every_layer() -> None:
    for name in zoo.ZOO:
        layers = reference.run(cases.twin(name), cases.DEMOS).layers
        assert len(layers) == (1 if name in zoo.HYBRID else 4 if name == "gpt_neo-local" else 3)
        for layer in layers:
            assert layer.h is not None
            rows = layer.weights.sum(-1)
            assert torch.all(rows <= 1 + 1e-12)
            if name != "gpt_oss-sinks":
                assert torch.allclose(rows, torch.ones_like(rows), atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "first"),
    [
        ("thirds", 2, 1, {"q": [0, 1], "k": [4, 5], "v": [6, 7]}),
        ("by_head", 2, 2, {"q": [0, 1], "k": [2, 3], "v": [4, 5]}),
        ("groups", 4, 2, {"q": [0, 1], "k": [4, 5], "v": [6, 7]}),
        ("codegen", 4, 4, {"q": [0, 1], "v": [2, 3], "k": [4, 5]}),
    ],
)
def test_layouts_use_every_row_once(kind: str, heads: int, kv_heads: int, first: dict[str, list[int]]) -> None:
    found = reference.split_rows(kind, heads, kv_heads, d=2)
    everything = sorted(row for blocks in found.values() for block in blocks for row in block)
    assert everything == list(range((heads + 2 * kv_heads) * 2))
    assert {role: blocks[0] for role, blocks in found.items()} == first
