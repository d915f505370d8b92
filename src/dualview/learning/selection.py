"""Choosing a learning rate, or a seed, on rows that are never reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dualview.io.progress import Advance
from dualview.learning.recipe import Status, Tuned
from dualview.learning.weight_patches import Deltas
from dualview.metrics.predictions import accuracy, predictions
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import PassPlan, ask
from dualview.records import Setting
from dualview.tasks.prompts import Query

_COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class SelectionTrial:
    """One candidate's accuracy on the selection rows."""

    value: float
    accuracy: float | None
    status: Status


def judge_rates(
    lm: LanguageModel, tuned: Sequence[Tuned], queries: Sequence[Query], how: PassPlan, advance: Advance | None = None
) -> list[SelectionTrial]:
    """Zero-shot accuracy of each fine-tuned model on the selection rows, all of one batch together."""
    gold = np.array([query.gold for query in queries])
    asked = ask_each(lm, queries, replace(how, record=False, demo_logits=False), tuned, advance)
    return [
        SelectionTrial(t.lr, None if t.status == "diverged" else accuracy(s.log_probs, gold), status_of(t, s.log_probs))
        for t, s in zip(tuned, asked, strict=True)
    ]


def status_of(tuned: Tuned, log_probs: np.ndarray) -> Status:
    """Diverged if the loss was ever not finite, collapsed if every query got the same answer."""
    if tuned.status == "diverged" or not np.isfinite(log_probs.max(1)).all():
        return "diverged"
    return "collapsed" if len(log_probs) > 1 and len(np.unique(predictions(log_probs))) == 1 else "ok"


def best(trials: Sequence[SelectionTrial]) -> int:
    """The index of the highest accuracy; ties to the smaller value; diverged trials only if there is no other."""
    # `max` keeps the first of equals, so sorting by value gives ties to the smaller one.
    order = sorted(range(len(trials)), key=lambda i: trials[i].value)
    return max(order, key=lambda i: -1.0 if trials[i].accuracy is None else (trials[i].accuracy or 0.0))


def ask_each(
    lm: LanguageModel, queries: Sequence[Query], how: PassPlan, tuned: Sequence[Tuned], advance: Advance | None = None
) -> list[Setting]:
    """The queries asked of each fine-tuned model: as rows of one batch, where there is room for them."""
    patches = [t.patch for t in tuned]
    deltas = [p for p in patches if isinstance(p, Deltas)]
    if len(deltas) < len(patches):
        return [ask(lm, queries, how, p, advance).settings[0] for p in patches]
    # Side by side they are copied, which large ones have no room for.
    together = max(1, _COPY_BYTES // max(1, deltas[0].nbytes))
    parts = [deltas[start : start + together] for start in range(0, len(deltas), together)]
    return [s for part in parts for s in ask(lm, queries, how, Deltas.side_by_side(part), advance).settings]
