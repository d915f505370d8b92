"""Scores behind a cached prefix are those of whole prompts, for every variant."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dualview.lab.gpt.model import NAMES, variant_of
from dualview.lab.gpt.scoring import _Room, few_shot, in_context, prompts_of, score
from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt, load_model
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import PromptSet, Query, build_prompts
from dualview.tasks.sampling import sample_demos, sample_queries
from dualview.tasks.task import load_task
from dualview.variants import attach
from equivalence.tiny import save_model, save_task


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def _model(folder, name: str) -> LanguageModel:
    if not (folder / "model").exists():
        save_model(folder / "model")
    lm = load_model(str(folder / "model"), dtype="float64", device="cpu")
    variant = variant_of(name)
    if variant is not None:
        attach(lm.model, variant)
    return adopt(lm.model, lm.tokenizer, name)


def _prompts(folder, lm: LanguageModel) -> PromptSet:
    task = load_task(save_task(folder / "task"))
    return build_prompts(task, lm.tokenizer, sample_demos(task, 1, 5), sample_queries(task, 7), max_context=lm.context)


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_whole_prompts(folder, name):
    lm = _model(folder, name)
    slow = replace(lm, slow_because="on trial")
    prompts = _prompts(folder, lm)
    for prefix in (prompts.prefix, prompts.zero_prefix, ()):
        whole = ask(slow, prompts.queries, PassPlan(prefix, 1, record=False)).settings[0].log_probs
        np.testing.assert_allclose(score(slow, prompts.queries, prefix), whole, atol=1e-9)
        np.testing.assert_allclose(score(lm, prompts.queries, prefix), whole, atol=1e-9)


def test_batches_do_not_change_the_scores(folder, monkeypatch):
    lm = replace(_model(folder, "momentum"), slow_because="on trial")
    prompts = _prompts(folder, lm)
    together = in_context(lm, prompts)
    for room in (_Room(tokens=1), _Room(cache=1), _Room(logits=1)):
        monkeypatch.setattr(_Room, "of", lambda _device, room=room: room)
        np.testing.assert_allclose(in_context(lm, prompts), together, atol=1e-12)


def test_candidates_that_begin_alike_or_differ_in_number(folder):
    """Hand-made queries, against one forward pass for each candidate."""
    lm = replace(_model(folder, "token_shift"), slow_because="on trial")
    queries = [Query((5, 6, 7), ((8, 9, 10), (8, 9, 11), (12,)), 0), Query((9,), ((3, 4), (6,)), 1)]
    found = score(lm, queries, (1, 20, 21))
    assert np.isneginf(found[1, 2])
    for i, query in enumerate(queries):
        for j, candidate in enumerate(query.candidates):
            ids = torch.tensor([[1, 20, 21, *query.ids, *candidate]])
            with torch.no_grad():
                log_probs = torch.log_softmax(lm.model(input_ids=ids).logits[0], -1)
            at = range(ids.shape[1] - len(candidate) - 1, ids.shape[1] - 1)
            mean = sum(float(log_probs[t, token]) for t, token in zip(at, candidate, strict=True)) / len(candidate)
            assert found[i, j] == pytest.approx(mean, abs=1e-9)


def test_few_shot_counts_what_it_says(folder):
    lm = _model(folder, "sign")
    task = load_task(save_task(folder / "task"))
    found = few_shot(lm, "tiny", prompts_of(task, lm.tokenizer, lm.context, shots=4, n_queries=9, draws=(1, 2)))
    assert found.icl.shape == (2, 9) and found.zsl.shape == (9,)
    told = found.to_json()
    assert told["chance"] == pytest.approx(1 / 3) and told["n_queries"] == 9 and told["shots_used"] == [4, 4]
    rows = sample_queries(task, 9)
    prompts = build_prompts(task, lm.tokenizer, sample_demos(task, 2, 4), rows, max_context=lm.context)
    log_probs = ask(lm, prompts.queries, PassPlan(prompts.prefix, 1, record=False)).settings[0].log_probs
    gold = [row.label for row in rows]
    assert told["icl"][1] == pytest.approx(float(np.mean(log_probs.argmax(1) == gold)))
