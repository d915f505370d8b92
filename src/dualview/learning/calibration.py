"""Contextual calibration (Zhao et al. 2021, section 5): divides by the answer to a question without content.

    p̂(label) ∝ p(label | query) / p̄(label),      p̄ = the mean of p(label | content-free input)

with both normalised over the candidates. It is reported next to the plain accuracies, never instead of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from scipy.special import log_softmax, logsumexp  # pyright: ignore[reportMissingTypeStubs]

from dualview.metrics.predictions import accuracy
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import PassPlan, Patch, ask
from dualview.records import Setting
from dualview.tasks.prompts import CONTENT_FREE, Query, Tokenizer, content_free_queries
from dualview.tasks.task import Task


def calibrated_accuracy(
    task: Task,
    lm: LanguageModel,
    queries: Sequence[Query],
    settings: Mapping[str, Setting],
    ways: Mapping[str, tuple[PassPlan, Patch | None]],
) -> dict[str, float]:
    """Accuracy of each setting after calibration, each by its own answers to the content-free queries."""
    gold = np.array([query.gold for query in queries])
    # A classification task has one list of candidates; a multiple-choice task may have one for each query.
    distinct = list(dict.fromkeys(query.candidates for query in queries))
    empty = calibration_queries(task, lm.tokenizer, queries)
    row_of = {candidates: i for i, candidates in enumerate(distinct)}
    rows = np.array([row_of[query.candidates] for query in queries])
    found: dict[str, float] = {}
    for name, (how, patch) in ways.items():
        scores = ask(lm, empty, replace(how, record=False, at="prompt"), patch).settings[0].log_probs
        prior = log_prior(scores.reshape(len(distinct), len(CONTENT_FREE), -1))
        found[name] = accuracy(calibrated(settings[name].log_probs, prior[rows]), gold)
    return found


def calibration_queries(task: Task, tokenizer: Tokenizer, queries: Sequence[Query]) -> tuple[Query, ...]:
    """The content-free queries before each distinct list of candidates."""
    distinct = dict.fromkeys(query.candidates for query in queries)
    return tuple(q for candidates in distinct for q in content_free_queries(task, tokenizer, candidates))


def log_prior(
    content_free: Float[np.ndarray, "distinct filler candidate"],
) -> Float[np.ndarray, "distinct candidate"]:
    """log of the mean, over the content-free inputs, of the normalised probabilities."""
    normalised = log_softmax(content_free, axis=-1)
    return logsumexp(normalised, axis=1) - np.log(content_free.shape[1])


def calibrated(
    log_probs: Float[np.ndarray, "query candidate"], prior: Float[np.ndarray, "query candidate"]
) -> Float[np.ndarray, "query candidate"]:
    """Scores with the prior divided out; candidates a query does not have stay impossible."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(log_probs), log_probs - prior, -np.inf)
