"""A model with an attention variant is measured with it, however it was attached or loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import dualview
from close import assert_close, assert_same_weights
from dualview.models.loading import load_model
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import Query
from dualview.variants import Augmented, Momentum, Sign, attach, detach
from equivalence import tiny

QUERIES = [Query((5, 9, 14), ((3,), (4, 6)), 0), Query((8, 7), ((3,), (4, 6)), 1)]
PREFIX = (1, 11, 12, 13, 10, 9, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def by_hand(model: torch.nn.Module, query: Query) -> list[float]:
    """Each candidate's mean log-probability, one whole prompt at a time."""
    found: list[float] = []
    for candidate in query.candidates:
        ids = torch.tensor([[*PREFIX, *query.ids, *candidate]])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(input_ids=ids).logits[0], -1)
        at = range(ids.shape[1] - len(candidate) - 1, ids.shape[1] - 1)
        found.append(float(np.mean([log_probs[i, token] for i, token in zip(at, candidate, strict=True)])))
    return found


@pytest.mark.parametrize(
    "variant", [Momentum(eta=0.9), Sign(scale="constant"), Augmented(seed=1)], ids=lambda v: v.name
)
def test_a_variant_that_is_put_on_later_counts(folder: Path, variant: object) -> None:
    lm = load_model(str(folder), dtype="float64", device="cpu")
    plain = ask(lm, QUERIES, PassPlan(PREFIX, 1)).settings[0].log_probs
    attach(lm.model, variant)
    with torch.no_grad():
        for parameter in lm.model.parameters():
            if parameter.requires_grad:  # the adapters start at nothing
                parameter.add_(0.1)
    assert lm.fast == isinstance(variant, Augmented)
    worn = ask(lm, QUERIES, PassPlan(PREFIX, 1)).settings[0].log_probs
    assert abs(worn - np.array([by_hand(lm.model, query) for query in QUERIES])).max() < 1e-6  # float32 norms
    assert abs(worn - plain).max() > 1e-3
    detach(lm.model)
    assert lm.fast
    assert abs(ask(lm, QUERIES, PassPlan(PREFIX, 1)).settings[0].log_probs - plain).max() < 1e-12


def test_the_comparison_says_that_a_variant_is_worn(folder: Path, tmp_path: Path) -> None:
    lm = load_model(str(folder), device="cpu")
    options = {"task": str(tiny.save_task(tmp_path)), "shots": 2, "n_queries": 3, "lr": 0.01}
    plain = dualview.compare(model=lm, **options).to_json()
    attach(lm.model, Sign(scale="constant"))
    worn = dualview.compare(model=lm, **options).to_json()
    assert worn["queries"] != plain["queries"]
    assert "the variant sign" in worn["provenance"]["attention"] and "the variant sign" in worn["warnings"][0]


def test_a_saved_variant_is_read_with_the_model(folder: Path, tmp_path: Path) -> None:
    lm = load_model(str(folder), dtype="float64", device="cpu")
    attach(lm.model, Momentum(eta=0.9, learnable=True))
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    read = load_model(str(tmp_path), dtype="float64", device="cpu")
    found, wanted = (ask(each, QUERIES, PassPlan(PREFIX, 1)).settings[0].log_probs for each in (read, lm))
    assert_same_weights(read.model, lm.model)
    assert_close(found, wanted)
    assert "momentum" in (read.whole_because or "")
