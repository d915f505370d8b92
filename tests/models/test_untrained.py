"""Untrained weights: drawn as the architecture says, the same on any number of threads, and nothing else changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from dualview.learning.finetune import finetune
from dualview.models.untrained import (
    _Draws,  # pyright: ignore[reportPrivateUsage]
    duplicate,
    untrained,
    with_trained_embeddings,
)
from equivalence import cases

LARGE = 300_000
"""More than two blocks."""


def drawn(threads: int, seed: int = 0) -> list[torch.Tensor]:
    with ThreadPoolExecutor(threads) as pool, _Draws(seed, pool), torch.no_grad():
        return [
            torch.empty(LARGE).normal_(1.0, 0.5),
            torch.empty(LARGE).normal_(std=2.0),
            torch.empty(LARGE).uniform_(-1, 3),
            torch.empty(600, 500).T.uniform_(),  # no plain array
            torch.empty(100, dtype=torch.float64).normal_(),
            nn.init.trunc_normal_(torch.empty(LARGE), std=0.1, a=-0.2, b=0.2),
        ]


def test_draws_have_their_distributions() -> None:
    normal, wide, uniform, turned, double, cut = drawn(2)
    for found, mean, deviation in (
        (normal, 1.0, 0.5),
        (wide, 0.0, 2.0),
        (uniform, 1.0, 4 / 12**0.5),
        (turned, 0.5, 1 / 12**0.5),
    ):
        # Six standard errors of a mean, and as much of a deviation.
        assert float(found.mean()) == pytest.approx(mean, abs=6 * deviation / LARGE**0.5)
        assert float(found.std()) == pytest.approx(deviation, rel=6 / LARGE**0.5)
    assert uniform.min() >= -1 and uniform.max() <= 3
    assert cut.abs().max() <= 0.2
    assert double.dtype == torch.float64 and 0.5 < float(double.std()) < 1.5
    assert len(set(normal[:1000].tolist()) & set(wide[:1000].tolist())) == 0


def test_draws_depend_on_the_seed_alone() -> None:
    for one, many, other in zip(drawn(1), drawn(5), drawn(1, seed=1), strict=True):
        assert torch.equal(one, many)
        assert not torch.equal(one, other)


def test_a_draw_is_made_before_anything_reads_its_memory() -> None:
    """What is drawn over is not drawn, and nothing can tell."""
    with ThreadPoolExecutor(2) as pool, _Draws(0, pool) as draws, torch.no_grad():
        over, part, read = torch.empty(LARGE).uniform_(), torch.empty(10, 10).normal_(), torch.empty(50).uniform_(1, 2)
        over.normal_(3.0, 0.1)
        part[:5].uniform_(5, 6)
        assert read.min() >= 1, "an operation on it sees the numbers"
        held = torch.empty(4, 3).normal_()
        held[1].zero_()
        assert len(draws._waiting) == 2  # pyright: ignore[reportPrivateUsage]
    with ThreadPoolExecutor(1) as pool, _Draws(0, pool) as draws, torch.no_grad():
        draws._tensors = 3  # pyright: ignore[reportPrivateUsage]
        alone = torch.empty(LARGE).normal_(3.0, 0.1)
    assert torch.equal(over, alone), "its numbers are those of its turn"
    assert part[:5].min() >= 5 and part[5:].max() < 5 and part[5:].std() > 0.5
    assert not held[1].any() and held[0].all() and held[2:].all()


def test_a_duplicate_is_a_model_of_its_own() -> None:
    lm = cases.lm("gpt2")
    twin = duplicate(lm)
    assert twin.weights_hash == lm.weights_hash
    own = {id(module) for module in twin.model.modules()}
    projections = twin.anatomy.projections(("q", "k", "v"))
    assert projections and all(id(p.module) in own for p in projections)
    assert all(id(block) in own for block in (*twin.anatomy.blocks, twin.anatomy.final))
    [tuned], [right] = (finetune(model, cases.SEQUENCES, [0.01]) for model in (twin, lm))
    assert tuned.losses == right.losses
    next(twin.model.parameters()).zero_()
    assert next(lm.model.parameters()).any()


def test_an_untrained_model_leaves_everything_else_alone() -> None:
    lm = cases.lm("llama")
    before, state = {n: p.clone() for n, p in lm.model.named_parameters()}, torch.get_rng_state()
    fresh = untrained(lm, keep_embeddings=False, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    weights = dict(fresh.model.named_parameters())
    moved = [n for n, p in before.items() if p.dim() > 1 and not torch.equal(weights[n], p)]
    assert len(moved) == sum(p.dim() > 1 for p in before.values())
    kept = with_trained_embeddings(fresh, lm)
    assert torch.equal(kept.model.get_input_embeddings().weight, lm.model.get_input_embeddings().weight)
    assert "trained embeddings" in kept.name and "untrained" in fresh.name
    same = untrained(lm, keep_embeddings=True, seed=3)
    assert all(torch.equal(p, dict(same.model.named_parameters())[n]) for n, p in kept.model.named_parameters())
    assert all(torch.equal(p, before[n]) for n, p in lm.model.named_parameters())
