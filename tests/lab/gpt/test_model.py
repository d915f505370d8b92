"""The language lab's models: sizes, starting weights, folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from close import assert_close, assert_same_weights
from dualview.io.errors import UserError
from dualview.lab.gpt.corpus import Corpus, Document, Source, tokenise
from dualview.lab.gpt.model import (
    NAMES,
    Shape,
    build,
    matched,
    parameters_of,
    save_model,
    usual_width,
    variant_of,
)
from dualview.models.loading import adopt, load_model
from dualview.variants import Augmented, Momentum


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    documents = [Document("a cat sat on a mat and a dog ran " * 30, held_out) for held_out in (False, True)]
    return tokenise(Source(documents, {}), "trained", 280)


SHAPE = Shape(vocab=280, d_model=32, layers=2, heads=4, context=64, d_ff=usual_width(32))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_counted_and_matched(name):
    plain = 280 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * SHAPE.d_ff + 2 * 32) + 32
    variant = variant_of(name)
    model = build(matched(SHAPE, 0, variant), 0, variant, 1)
    assert abs(parameters_of(model) - plain) <= SHAPE.ff_unit / 2
    if name != "augmented":
        assert parameters_of(model) == plain


def test_learnable_coefficients_count_too():
    variant = Momentum(eta=0.5, learnable=True)
    assert parameters_of(build(SHAPE, 0, variant, 1)) == parameters_of(build(SHAPE, 0, None, 1)) + 2


def test_adapters_too_large_for_the_feed_forward_layers_are_refused():
    with pytest.raises(UserError, match="wider model"):
        matched(Shape(280, 32, 2, 4, 64, 8), 0, Augmented(rank=16))


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second, other = (build(SHAPE, 0, variant_of(n), s) for n, s in (("plain", 1), ("momentum", 1), ("plain", 2)))
    assert torch.equal(before, torch.random.get_rng_state())
    weights = dict(second.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in first.named_parameters())
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("name", ["plain", "momentum", "augmented"])
def test_a_saved_model_is_the_same_model(tmp_path: Path, corpus: Corpus, name: str):
    variant = variant_of(name, learnable=name == "momentum")
    model = build(SHAPE, corpus.separator, variant, 1)
    with torch.no_grad():  # away from where everything starts
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    folder = tmp_path / "deep" / "step-000001"
    save_model(model, corpus.tokenizer, folder)
    save_model(model, corpus.tokenizer, folder)  # over itself
    assert not list(folder.parent.glob(".*"))
    read = load_model(str(folder), device="cpu")
    made = adopt(model, corpus.tokenizer, name)
    ids = torch.arange(20)[None]
    assert_same_weights(read.model, made.model)
    with torch.no_grad():
        assert_close(read.model(input_ids=ids).logits, made.model(input_ids=ids).logits)
    assert read.fast == made.fast == (name != "momentum")
    assert read.tokenizer("a cat")["input_ids"] == corpus.tokenizer("a cat")["input_ids"]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert load_file(folder / "model.safetensors")


def test_a_plain_model_is_anyones(tmp_path: Path, corpus: Corpus):
    model = build(SHAPE, corpus.separator, None, 1).eval()
    save_model(model, corpus.tokenizer, tmp_path / "m")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
        assert_same_weights(theirs, model)
        assert_close(theirs(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_weak_variant_is_still_run_whole(corpus: Corpus):
    from dualview.variants import Regularised, attach

    model = build(SHAPE, corpus.separator, None, 1)
    attach(model, Regularised(alpha=1e-9))
    assert "regularised" in (adopt(model, corpus.tokenizer, "weak").whole_because or "")


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(str(tmp_path))
