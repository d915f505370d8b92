"""The training loop against one written out, its data order, and going on after a stop."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dualview.lab.gpt.model import Shape, build, variant_of
from dualview.lab.gpt.training import (
    Blocks,
    CorpusRecipe,
    block_losses,
    median_of,
    perplexities,
    saved_bytes,
    token_losses,
    train,
)
from dualview.lab.units import Unit

SHAPE = Shape(vocab=50, d_model=16, layers=2, heads=2, context=32, d_ff=24)
RECIPE = CorpusRecipe(steps=30, batch=3, context=16, lr=1e-2, warmup=5)
TOKENS = torch.randint(50, (401,), generator=torch.Generator().manual_seed(0)).int()


def _train(name="momentum", recipe=RECIPE, unit=None, **more):
    model = build(SHAPE, 0, variant_of(name, learnable=True), 1)
    trained = train(model, Blocks(TOKENS, recipe.context, recipe.batch, 1), recipe, unit or Unit(None, {}), **more)
    return model, trained


def test_one_step_after_another_written_out():
    """AdamW, clipping and the schedule, by hand, on float64 copies of the same gradients' inputs."""
    model, trained = _train("plain", replace(RECIPE, steps=8))
    slow = build(SHAPE, 0, None, 1)
    blocks = Blocks(TOKENS, 16, 3, 1)
    parameters = list(slow.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for step in range(8):
        numbers = blocks.numbers(step)
        rows = torch.stack([TOKENS[n * 16 : n * 16 + 17].long() for n in numbers])
        log_probs = torch.log_softmax(slow(input_ids=rows[:, :-1]).logits, -1)
        loss = -log_probs.gather(-1, rows[:, 1:, None]).mean()
        assert trained.losses[step] == pytest.approx(float(loss.detach()), abs=2e-5)
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        lr = 1e-2 * (step + 1) / 5 if step < 5 else 1e-2 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 5) / 3)) / 2)
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
                g = g * min(1.0, 1.0 / (norm + 1e-6))
                first[i] = 0.9 * first[i] + 0.1 * g
                second[i] = 0.95 * second[i] + 0.05 * g**2
                p.mul_(1 - lr * (0.1 if p.ndim > 1 else 0.0))
                unbiased = second[i] / (1 - 0.95 ** (step + 1))
                p.sub_(lr * first[i] / (1 - 0.9 ** (step + 1)) / (unbiased.sqrt() + 1e-8))
    for p, q in zip(slow.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=3e-4, rtol=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.integers(17, 300), st.integers(2, 16), st.integers(1, 9), st.integers(0, 3))
def test_every_block_once_before_any_twice(tokens, context, batch, seed):
    blocks = Blocks(torch.arange(tokens), context, batch, seed)
    count = blocks.count
    seen = np.concatenate([blocks.numbers(step) for step in range(3 * count)])
    for epoch in range(len(seen) // count):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
    row = blocks.take(1)
    assert row.shape == (batch, context + 1) and bool((row[:, 1:] == row[:, :-1] + 1).all())
    assert int(row[0, 0]) == blocks.numbers(1)[0] * context


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_micro_batches_give_the_same_training_in_less_memory(rows):
    """Two rows of three leave an uneven last part."""
    whole, at_once = _train("momentum", replace(RECIPE, steps=6))
    parts, bit_by_bit = _train("momentum", replace(RECIPE, steps=6, micro_batch=rows))
    assert bit_by_bit.losses == pytest.approx(at_once.losses, abs=1e-5)
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=3e-4, rtol=1e-3)
    batch = Blocks(TOKENS, 16, 3, 1).take(0)
    assert saved_bytes(parts, batch[:rows]) < saved_bytes(parts, batch) or rows == 3


def test_the_order_is_the_seeds_alone():
    one, two = (Blocks(TOKENS, 16, 3, seed) for seed in (1, 2))
    assert not np.array_equal(one.numbers(0), two.numbers(0))
    late = Blocks(TOKENS, 16, 3, 1)
    np.testing.assert_array_equal(late.numbers(40), [one.numbers(s) for s in range(41)][-1])


def test_stopped_and_taken_up_again_it_ends_in_the_same_bits(tmp_path):
    whole, trained = _train()
    steps: list[int] = []

    class Stopped(Exception):
        pass

    def stop(step: int) -> None:
        steps.append(step)
        if step == 25 and len(steps) == 1:
            raise Stopped

    with pytest.raises(Stopped):
        _train(unit=Unit(tmp_path, {}, every=0.0), keep=stop, keep_at=[25])
    unit = Unit(tmp_path, {}, every=0.0)
    again, resumed = _train(unit=unit, keep=stop, keep_at=[25])
    assert unit.resumed and resumed.resumed and not trained.resumed
    assert resumed.losses == trained.losses
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))


def test_what_diverges_is_told_and_stopped():
    model = build(SHAPE, 0, None, 1)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("inf"))
    trained = train(model, Blocks(TOKENS, 16, 3, 1), RECIPE, Unit(None, {}))
    assert trained.status == "diverged" and trained.steps == 20


def test_the_time_limit_is_told():
    _, trained = _train(recipe=replace(RECIPE, steps=200, time_limit=1e-6))
    assert trained.status == "time limit" and trained.steps == 20


def test_stretches_that_warm_up_are_no_timing():
    assert median_of([]) is median_of([9.0]) is None
    assert median_of([9.0, 1.0]) == 1.0 and median_of([9.0, 1.0, 3.0]) == 2.0
    assert _train(recipe=replace(RECIPE, steps=20))[1].seconds_per_step is None
    assert _train(recipe=replace(RECIPE, steps=60))[1].seconds_per_step is not None


def test_perplexity_in_bfloat16_is_near():
    model, _ = _train()
    one, other = (perplexities(model, TOKENS, [16], 32, 2, precision) for precision in ("float32", "bfloat16"))
    assert one is not None and other is not None
    assert one["16"]["loss"] != other["16"]["loss"] == pytest.approx(one["16"]["loss"], abs=1e-2)


def test_lengths_predict_the_same_tokens():
    """Against one forward pass for each piece, and the block means put together by hand."""
    model = build(SHAPE, 0, variant_of("token_shift"), 1)
    for length in (8, 16, 32):
        found = block_losses(model, TOKENS, length, 32, 2)
        assert found.shape == (12,)
        for block in (0, 5, 11):
            total = []
            for start in range(block * 32, block * 32 + 32, length):
                piece = TOKENS[start : start + length + 1].long()
                with torch.no_grad():
                    logits = model(input_ids=piece[None, :-1]).logits[0]
                total += nn.functional.cross_entropy(logits, piece[1:], reduction="none").tolist()
            assert len(total) == 32
            assert found[block] == pytest.approx(np.mean(total), abs=1e-5)


def test_saved_bytes_count_storages_once_and_grow_with_the_batch():
    model = build(SHAPE, 0, None, 1)
    rows = TOKENS[:68].view(4, 17).long()
    one, four = saved_bytes(model, rows[:1]), saved_bytes(model, rows)
    assert 3 < four / one < 4.2

    class Hold(nn.Module):
        """The same count on a model simple enough to know: x is saved once though two maps read it."""

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False)

        def forward(self, input_ids, use_cache):
            x = nn.functional.one_hot(input_ids, 50).float()
            return type("Out", (), {"logits": self.a(x) + self.b(x)})

    rows_of = rows[:, :-1].numel()
    found = saved_bytes(Hold(), rows)
    x = rows_of * 50 * 4
    assert found == x + x + rows_of * 8 + 4  # x, log-softmax, the targets, their total weight


def test_bfloat16_leaves_the_weights_in_float32():
    model, trained = _train("plain", replace(RECIPE, precision="bfloat16"))
    exact = _train("plain")[1].losses
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert trained.losses != exact
    np.testing.assert_allclose(trained.losses, exact, atol=0.05)
    assert token_losses(model, TOKENS[None, :17].long(), "bfloat16").dtype == torch.float32
