"""The queries of a report: each setting's answer to each of them, as rows of a table and as data for the script."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from dualview.comparison.result import QueryPart, Result
from dualview.metrics.predictions import predictions
from dualview.report.catalogue import given_weights, setting_title
from dualview.report.html.page import TEMPLATES
from dualview.report.html.prompts import Missing, ShownPrompts

BUDGET = 4_000_000
"""Bytes of a report that its queries may take, so that the whole stays below 5 MB."""


@dataclass(frozen=True)
class Answer:
    """One setting's answer to one query."""

    right: bool
    label: str
    score: str


@dataclass(frozen=True)
class ShownAnswers:
    """One query and what every setting answered."""

    index: int
    text: str | None
    """None where the prompts are not known."""
    gold: str
    answers: list[Answer]
    data: dict[str, Any]
    """The same for the script: the scores of every candidate, and the predictions."""

    @property
    def pattern(self) -> str:
        """A 1 for each setting that is right, a 0 for each that is wrong, in order."""
        return "".join("1" if answer.right else "0" for answer in self.answers)


def settings_of(result: Result) -> list[str]:
    """zsl, icl and ft, and the patch and the adapters that the run has."""
    return ["zsl", "icl", "ft", *(name for name in given_weights(result) if hasattr(result.queries[0], name))]


def answers_of(result: Result, prompts: ShownPrompts | Missing) -> list[ShownAnswers]:
    """Every query with its answers."""
    names, labels = settings_of(result), result.task.labels or []
    found: list[ShownAnswers] = []
    for index, query in enumerate(result.queries):
        own = prompts.queries[index] if isinstance(prompts, ShownPrompts) else None
        known = labels or ([] if own is None else list(own.labels))
        found.append(_answers(index, query, names, known, None if own is None else own.text))
    return found


def _answers(index: int, query: QueryPart, names: list[str], labels: list[str], text: str | None) -> ShownAnswers:
    scores: list[list[float | None]] = [getattr(query, name) for name in names]
    table = np.array(scores, dtype=np.float64)  # None is NaN
    chosen = [int(choice) for choice in predictions(table)]  # −1: none
    best = [None if choice < 0 else row[choice] for row, choice in zip(scores, chosen, strict=True)]
    answers = [
        Answer(choice == query.gold, _label(labels, choice), "" if x is None else f"{x:.2f}".replace("-", "−"))
        for choice, x in zip(chosen, best, strict=True)
    ]
    rounded = [[None if x is None else round(x, 4) for x in row] for row in scores]
    data = {"gold": query.gold, "predicted": chosen, "scores": rounded}
    return ShownAnswers(index, text, _label(labels, query.gold), answers, data)


def _label(labels: list[str], index: int) -> str:
    if index < 0:
        return "none"
    return labels[index] if index < len(labels) else f"candidate {index}"


def patterns_of(answers: list[ShownAnswers]) -> list[tuple[str, int]]:
    """Which settings are right together, and how often; the most frequent first."""
    return Counter(answer.pattern for answer in answers).most_common()


def query_rows(answers: list[ShownAnswers], prompts: ShownPrompts | Missing, budget: int = BUDGET) -> list[Markup]:
    """The table's rows, from the first query, as many as fit in so many bytes: always one at least.

    A row costs its HTML and, where the prompts are shown, its scores, its tokens and the tokens' texts.
    """
    row: Any = TEMPLATES.get_template("queries.html").module.row  # pyright: ignore[reportAttributeAccessIssue]
    rows, known = list[Markup](), set[int]()
    spent = len(json.dumps(prompts.first(0).to_json())) if isinstance(prompts, ShownPrompts) else 0
    for answer in answers:
        made: Markup = row(answer)
        spent += len(made.encode("utf-8", "replace"))
        if isinstance(prompts, ShownPrompts):
            own = prompts.queries[answer.index]
            new = {token for ids in (own.ids, *own.candidates) for token in ids} - known
            spent += len(json.dumps([answer.data, own.ids, own.candidates, [prompts.tokens[t] for t in new]]))
            spent += 12 * len(new)  # their ids
            known |= new
        if rows and spent > budget:
            break
        rows.append(made)
    return rows


def viewer_data(answers: list[ShownAnswers], settings: list[str], prompts: ShownPrompts | Missing) -> dict[str, Any]:
    """What the script needs to show the prompts of these queries: tokens, and the scores of every candidate."""
    if isinstance(prompts, Missing):
        return {"prompts": None}
    return {
        "prompts": prompts.first(len(answers)).to_json(),
        "settings": [{"name": name, "title": setting_title(name)} for name in settings],
        "queries": [answer.data for answer in answers],
    }
