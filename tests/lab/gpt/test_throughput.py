"""The loss in chunks against the whole one, compiled layers, the learning rate of coefficients, and the rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from dualview.lab.gpt.model import Shape, build, parameters_of, variant_of
from dualview.lab.gpt.throughput import (
    batch_loss,
    chunked_loss,
    compiled_layers,
    flops_per_token,
    has_plain_head,
    matrix_rate,
    throughput,
)
from dualview.lab.gpt.training import Blocks, CorpusRecipe, make_optimiser, token_losses, train
from dualview.lab.units import Unit
from dualview.variants import variant_parameters

SHAPE = Shape(vocab=50, d_model=16, layers=3, heads=2, context=32, d_ff=24)
RECIPE = CorpusRecipe(steps=6, batch=3, context=16, lr=1e-2, warmup=2)
TOKENS = torch.randint(50, (401,), generator=torch.Generator().manual_seed(0)).int()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 3))
def test_the_loss_in_chunks_is_the_whole_loss(tokens: int, rows: int, seed: int):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 6, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = (9 * torch.randn(11, 6, generator=draw, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(11, (tokens,), generator=draw)
    found, expected = (
        chunked_loss(hidden, weight, targets, rows),
        torch.nn.functional.cross_entropy(hidden @ weight.T, targets),
    )
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    for one, other in zip(*(torch.autograd.grad(3 * x, (hidden, weight)) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_in_bfloat16_it_is_the_whole_loss_to_its_rounding():
    """With the shared embedding's gradient from both of its uses."""
    model, rows = build(SHAPE, 0, None, 1), Blocks(TOKENS, 16, 3, 1).take(0)
    found = []
    for loss in (batch_loss(model, "bfloat16", 7)(rows), token_losses(model, rows, "float32").mean()):
        found.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()))))
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), rel=1e-2)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert float((one - other).norm()) <= 0.05 * float(other.norm()) + 1e-6


def test_a_training_in_chunks_is_the_training():
    losses = []
    for rows in (0, 5):
        model = build(SHAPE, 0, variant_of("momentum", learnable=True), 1)
        losses.append(train(model, Blocks(TOKENS, 16, 3, 1), replace(RECIPE, loss_rows=rows), Unit(None, {})).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_only_a_plain_head_is_taken_apart():
    assert has_plain_head(build(SHAPE, 0, None, 1), TOKENS)
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    biased = LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=24))
    biased.lm_head = torch.nn.Linear(16, 50, bias=True)
    assert not has_plain_head(biased, TOKENS)

    class Capped(GPT2LMHeadModel):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            found.logits = torch.tanh(found.logits)
            return found

    capped = Capped(GPT2Config(**shape)).eval()
    with torch.no_grad():
        capped.transformer.wte.weight.mul_(50)
    assert not has_plain_head(capped, TOKENS)


@pytest.mark.parametrize("name", ["plain", "momentum", "token_shift"])
def test_all_layers_share_one_compiled_graph(name: str):
    """With the eager backend: the tracing, without a compiler."""
    import torch._dynamo as dynamo

    model, rows = build(SHAPE, 0, variant_of(name, learnable=True), 1), Blocks(TOKENS, 16, 3, 1).take(0)
    loss = batch_loss(model, "float32", 7)
    expected = float(loss(rows).detach())
    dynamo.reset()
    dynamo.utils.counters.clear()
    with compiled_layers(model, True, lambda: loss(rows).backward(), backend="eager") as compiled:
        assert compiled and float(loss(rows).detach()) == pytest.approx(expected, rel=1e-6)
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)
    assert all(p.grad is None for p in model.parameters()), "the trial leaves no gradient"


def test_a_second_training_of_a_kind_compiles_nothing():
    """Models of several kinds in turn: each finds the graph of its kind again."""
    import torch._dynamo as dynamo

    rows, graphs = Blocks(TOKENS, 16, 3, 1).take(0), []
    dynamo.reset()
    for seed, name in ((1, "plain"), (1, "momentum"), (2, "plain"), (2, "momentum")):
        model = build(SHAPE, seed, variant_of(name, learnable=True), 1)
        loss = batch_loss(model, "float32", 7)
        expected = float(loss(rows).detach())
        dynamo.utils.counters.clear()
        with compiled_layers(model, True, lambda loss=loss: loss(rows).backward(), backend="eager"):
            assert float(loss(rows).detach()) == pytest.approx(expected, rel=1e-6)
        graphs.append(dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 0, 0]


def test_a_compiler_that_fails_is_a_warning_and_the_training_goes_on():
    model = build(SHAPE, 0, None, 1)

    def fail() -> None:
        raise RuntimeError("no compiler here")

    with (
        pytest.warns(UserWarning, match="training without it: no compiler here"),
        compiled_layers(model, True, fail, backend="eager") as compiled,
    ):
        assert not compiled and model.model.layers[0]._compiled_call_impl is None
    with compiled_layers(model, False, fail) as compiled:
        assert not compiled


def test_coefficients_have_their_own_rate():
    model = build(SHAPE, 0, variant_of("momentum", learnable=True), 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(
        model,
        Blocks(TOKENS, 16, 3, 1),
        replace(RECIPE, steps=1, warmup=1, lr=1e-5, coefficient_lr=1e-2),
        Unit(None, {}),
    )
    apart = set(variant_parameters(model))
    for name, p in model.named_parameters():
        moved = float((p.detach() - before[name]).abs().max())
        if name in apart:  # Adam's first step is as long as the rate
            assert moved == pytest.approx(1e-2, rel=1e-2)
        else:
            assert moved < 1e-4
    assert len(make_optimiser(model, RECIPE, model.device).param_groups) == 2


def test_operations_of_a_token_are_counted_by_hand():
    """d 16, 3 layers, feed-forward 24, vocabulary 50, two norms a layer and one at the end."""
    model = build(SHAPE, 0, None, 1)
    assert parameters_of(model) == 3 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) + 50 * 16 + 16
    assert flops_per_token(model, 10) == 6 * parameters_of(model) + 6 * 3 * 16 * 10
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    untied = LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=24, tie_word_embeddings=False))
    assert flops_per_token(untied, 10) == flops_per_token(model, 10), "an embedding is looked up, not multiplied"


def test_the_share_is_of_the_measured_rate():
    model = build(SHAPE, 0, None, 1)
    found = throughput(model, "float32", 3, 10, 0.5)
    assert found["tokens_per_second"] == 60 and found["flops_per_second"] == 60 * flops_per_token(model, 10)
    assert found["matrix_share"] == found["flops_per_second"] / matrix_rate(model.device, "float32")
    assert throughput(model, "float32", 3, 10, None)["matrix_share"] is None
