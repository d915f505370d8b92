"""What `compile` and `finetune` share: a change of weights that is written, its twin, and its scores.

The twin is the same change of weights, made from the same demonstrations with flipped labels: nothing else differs, so
what the two do differently is what was learnt from the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from jaxtyping import Float
from rich.table import Table
from scipy.special import log_softmax  # pyright: ignore[reportMissingTypeStubs]

from dualview.comparison.controls.settings import flipped_labels
from dualview.comparison.prepare import Prepared, prepare
from dualview.comparison.provenance import finished, provenance
from dualview.io.clock import Clock
from dualview.io.errors import UserError
from dualview.io.progress import Progress
from dualview.learning.adapter_writing import Exported
from dualview.metrics.predictions import accuracy, predictions
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import PassPlan, Patch, ask
from dualview.options import RunOptions
from dualview.tasks.prompts import Query

Scores = Float[np.ndarray, "query candidate"]


@dataclass(frozen=True)
class SettingScore:
    """One setting on the reported queries."""

    accuracy: float
    agreement: float
    """The fraction of queries answered as in-context learning answers them."""
    divergence: float
    """Mean KL(in-context ‖ this) over the candidates."""
    log_probs: Scores = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        divergence = self.divergence if np.isfinite(self.divergence) else None  # a diverged model has no numbers
        return {"accuracy": self.accuracy, "agreement": self.agreement, "divergence": divergence}


def score_setting(scores: Scores, icl: Scores, queries: Sequence[Query]) -> SettingScore:
    """Accuracy, agreement with in-context learning, and the divergence from it."""
    gold = np.array([query.gold for query in queries])
    return SettingScore(
        accuracy=accuracy(scores, gold),
        agreement=float((predictions(scores) == predictions(icl)).mean()),
        divergence=divergence(icl, scores),
        log_probs=scores,
    )


def divergence(p: Scores, q: Scores) -> float:
    """Mean over queries of KL(p ‖ q) between candidates' probabilities, each normalised over its query's candidates."""
    log_p, log_q = log_softmax(p, axis=-1), log_softmax(q, axis=-1)
    present = np.isfinite(p)
    terms = np.where(present, np.exp(log_p), 0.0) * np.where(present, log_p - np.where(present, log_q, 0.0), 0.0)
    return float(terms.sum(-1).mean())


def begin(
    options: RunOptions, model: str | LanguageModel, progress: Progress
) -> tuple[Prepared, dict[str, Any], Clock]:
    """The prepared run, what is known of it before the work, and the clock of the work."""
    clock = Clock()
    prepared = prepare(options, None if isinstance(model, str) else model, progress)
    known = provenance(prepared)
    clock.lap("prepare")
    return prepared, known, clock


def ask_all(prepared: Prepared, queries: Sequence[Query], prefix: Sequence[int], patch: Patch | None = None) -> Scores:
    """Every candidate's score behind a prefix, with a patch or without."""
    special = len(prepared.prompts.zero_prefix)
    how = PassPlan(tuple(prefix), special, record=False, batch_size=prepared.options.batch_size)
    return ask(prepared.lm, queries, how, patch).settings[0].log_probs


Made = TypeVar("Made")


def with_flipped_labels(prepared: Prepared, make: Callable[[Prepared], Made]) -> tuple[Made | None, str | None]:
    """What is made from the demonstrations with flipped labels; None where that cannot be done, and why."""
    try:
        return make(replace(prepared, prompts=flipped_labels(prepared))), None
    except UserError as error:
        return None, str(error)


@dataclass(frozen=True)
class Twin:
    """How the twin that is written with a change of weights went."""

    why_not: str | None
    """Why there is none: a task with a single label has no other to flip it to."""
    exported: Exported | None
    """As a LoRA adapter, if that is what is written."""

    @property
    def line(self) -> str:
        if self.why_not is not None:
            return f"! no twin of flipped labels, so `run` cannot judge the level labels: {self.why_not}"
        return f"twin of flipped labels: {'in the same file' if self.exported is None else self.exported.line}"

    def to_json(self) -> dict[str, Any]:
        return {"why_not": self.why_not, **({} if self.exported is None else self.exported.to_json())}


@dataclass(frozen=True, kw_only=True)
class Written:
    """A change of weights that was written, and its scores."""

    path: Path
    task: str
    shots: int
    shots_used: int
    n_queries: int
    lr: float | None
    settings: Mapping[str, SettingScore]
    provenance: Mapping[str, Any]
    twin: Twin

    @classmethod
    def of(cls, prepared: Prepared, known: dict[str, Any], clock: Clock, **own: Any) -> Self:
        prompts = prepared.prompts
        return cls(
            task=prepared.task.name,
            shots=prompts.shots,
            shots_used=prompts.shots_used,
            n_queries=len(prompts.queries),
            provenance=finished(known, prepared.lm, clock),
            **own,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "task": {"name": self.task, "shots": self.shots, "shots_used": self.shots_used},
            "n_queries": self.n_queries,
            "lr": self.lr,
            "twin": self.twin.to_json(),
            "settings": {name: score.to_json() for name, score in self.settings.items()},
            "provenance": self.provenance,
        }

    def scores(self, title: str, names: Mapping[str, str]) -> Table:
        """Each setting's scores, under the names that a reader knows."""
        table = Table(title=f"{self.task}: {title}", box=None)
        table.add_column("")
        for name in ("accuracy", "same answer as ICL", "KL from ICL"):
            table.add_column(name, justify="right")
        for name, score in self.settings.items():
            table.add_row(names[name], f"{score.accuracy:.3f}", f"{score.agreement:.3f}", f"{score.divergence:.3f}")
        return table
