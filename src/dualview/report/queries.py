"""The report's prompts and queries: what the model was asked, and what each setting answered."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualview.comparison.result import Result
from dualview.metrics.predictions import predictions
from dualview.report.catalogue import at
from dualview.report.chart_data import SETTING_NAMES
from dualview.report.page import Markup, join, scrolling, tag
from dualview.report.prompts import Missing, ShownPrompts

BUDGET = 4_000_000
"""Bytes of a report that its queries may take, so that the whole stays below 5 MB."""


@dataclass(frozen=True)
class Answers:
    """One query: its right candidate, and for each setting shown the scores and the prediction (−1: none)."""

    gold: int
    scores: list[list[float | None]]
    predicted: list[int]

    @property
    def pattern(self) -> str:
        """A 1 for each setting that is right, a 0 for each that is wrong, in order."""
        return "".join("1" if chosen == self.gold else "0" for chosen in self.predicted)


def settings_of(result: Result) -> list[str]:
    """zsl, icl and ft, and a patch where one was asked."""
    return [name for name in SETTING_NAMES if name in result.queries[0].model_dump()]


def answers_of(result: Result) -> list[Answers]:
    names, found = settings_of(result), list[Answers]()
    for query in result.queries:
        content = query.model_dump()
        scores: list[list[float | None]] = [content[name] for name in names]
        table = np.array([[np.nan if x is None else x for x in row] for row in scores], dtype=np.float64)
        found.append(Answers(query.gold, scores, [int(choice) for choice in predictions(table)]))
    return found


def fitting(result: Result, prompts: ShownPrompts | Missing, budget: int = BUDGET) -> int:
    """How many of the queries, from the first, the page can show in so many bytes: always one at least."""
    labels, known, spent = at(result.to_json(), "task.labels") or [], set[int](), 0
    if isinstance(prompts, ShownPrompts):
        spent += len(json.dumps(prompts.first(0).to_json()))
    for index, answer in enumerate(answers_of(result)):
        spent += len(_row(index, answer, prompts, labels).encode("utf-8", "replace"))
        if isinstance(prompts, ShownPrompts):
            own = prompts.queries[index]
            new = {token for ids in (own.ids, *own.candidates) for token in ids} - known
            spent += len(json.dumps([_viewed(answer), own.ids, own.candidates, [prompts.tokens[t] for t in new]]))
            spent += 12 * len(new)  # their ids
            known |= new
        if spent > budget:
            return max(1, index)
    return len(result.queries)


def _viewed(answer: Answers) -> dict[str, Any]:
    scores = [[None if x is None else round(x, 4) for x in row] for row in answer.scores]
    return {"gold": answer.gold, "predicted": answer.predicted, "scores": scores}


def viewer_data(result: Result, prompts: ShownPrompts | Missing, count: int) -> dict[str, Any]:
    """What the script needs to show a prompt: tokens, and the scores of every candidate, of the first `count`."""
    if isinstance(prompts, Missing):
        return {"prompts": None}
    return {
        "prompts": prompts.first(count).to_json(),
        "settings": [{"name": name, "title": SETTING_NAMES[name]} for name in settings_of(result)],
        "queries": [_viewed(answer) for answer in answers_of(result)[:count]],
    }


def prompts_section(prompts: ShownPrompts | Missing, count: int) -> Markup:
    """The demonstrations once, and behind them any query; the script fills in the tokens."""
    if isinstance(prompts, Missing):
        return tag("p", f"The prompts cannot be shown: {prompts.reason}", class_="warning")
    bos = any(piece.span == "bos" for piece in prompts.prefix)
    spans = [*(["bos"] if bos else []), "template", "label", "separator", "query"]
    legend = tag("p", "Spans: ", *((tag("span", f" {span} ", class_=f"tok tok-{span}"), " ") for span in spans))
    chooser = tag(
        "div",
        tag("button", "Previous", id="prompt-back", type="button"),
        tag(
            "label",
            "query",
            tag("input", id="prompt-number", type="number", min=0, max=count - 1, value=0),
        ),
        tag("button", "Next", id="prompt-next", type="button"),
        class_="filters no-print",
    )
    length = sum(len(piece.ids) for piece in prompts.prefix)
    return join(
        tag(
            "p",
            "One list of demonstrations stands before every query; each token as the model saw it, its position and id "
            f"on hover. Zero-shot and fine-tuned see the query {'behind BOS alone' if bos else 'alone'}.",
        ),
        legend,
        tag(
            "details",
            tag("summary", f"The demonstrations ({length} tokens)"),
            tag("div", id="prompt-prefix", class_="toks"),
            class_="card",
            open=length <= 4000,
        ),
        tag(
            "div",
            chooser,
            tag("p", id="prompt-said", role="status", class_="muted"),
            tag("div", id="prompt-query", class_="toks"),
            tag("p", "Mean log-probability of each candidate; the prediction is marked.", class_="muted small"),
            tag("div", id="prompt-candidates", class_="scroll", tabindex=0, role="group", aria_label="Candidates"),
            id="prompt-asked",
            class_="card",
            tabindex=-1,
        ),
    )


def queries_section(result: Result, prompts: ShownPrompts | Missing, count: int) -> Markup:
    """The first `count` queries with their predictions, to be filtered by text and by who is right."""
    names, answers = settings_of(result), answers_of(result)
    choices = [("any", "any"), ("1", "right"), ("0", "wrong")]
    selects = [
        tag(
            "label",
            SETTING_NAMES[name],
            tag("select", *(tag("option", text, value=value) for value, text in choices), data_setting=index),
        )
        for index, name in enumerate(names)
    ]
    filters = tag(
        "div",
        tag("label", "text", tag("input", id="filter-text", type="search", autocomplete="off")),
        *selects,
        tag("button", "Reset", id="filter-reset", type="button"),
        tag("span", id="filter-count", role="status", class_="muted"),
        class_="filters",
        role="search",
        aria_label="Filter the queries",
    )
    shown = isinstance(prompts, ShownPrompts)
    head = ["#", "query", "right label", *(SETTING_NAMES[name] for name in names)]
    labels = at(result.to_json(), "task.labels") or []
    rows = [_row(i, answer, prompts, labels) for i, answer in enumerate(answers[:count])]
    table = tag(
        "table",
        tag("caption", "Each setting's prediction with its mean log-probability; ✓ right, ✗ wrong. Counted from 0."),
        tag("thead", tag("tr", *(tag("th", text, scope="col") for text in head))),
        tag("tbody", *rows, id="query-rows"),
        class_="wide",
    )
    note = None if shown else tag("p", f"Without their texts: {prompts.reason}", class_="muted")  # pyright: ignore
    fewer = (
        f"The first {count} of {len(answers)} queries, to keep this file small; the result's JSON file has them all."
    )
    cut = tag("p", fewer, class_="warning") if count < len(answers) else None
    return join(_patterns(names, answers), cut, filters, note, scrolling(table, "The queries"))


def _patterns(names: list[str], answers: list[Answers]) -> Markup:
    """Who is right together with whom, and how often; each a way to those queries."""
    counts = Counter(answer.pattern for answer in answers)
    rows: list[Markup] = []
    for pattern, count in sorted(counts.items(), key=lambda item: -item[1]):
        more = tag("span", f" these {count}", class_="visually-hidden")
        button = tag("button", "show", more, type="button", class_="plain", data_pattern=pattern)
        signs = [tag("td", *_sign(mark == "1")) for mark in pattern]
        rows.append(tag("tr", signs, tag("td", count, class_="num"), tag("td", button, class_="no-print")))
    head = [*(tag("th", SETTING_NAMES[name], scope="col") for name in names), tag("th", "queries", scope="col")]
    inner = tag("table", tag("thead", tag("tr", *head, tag("td", class_="no-print"))), tag("tbody", *rows))
    return tag("details", tag("summary", "Who is right together"), scrolling(inner, "Who is right together"), open=True)


def _sign(right: bool) -> tuple[Markup, Markup]:
    sign = tag("span", "✓" if right else "✗", class_="ok" if right else "no", aria_hidden="true")
    return sign, tag("span", "right" if right else "wrong", class_="visually-hidden")


def _row(index: int, answer: Answers, prompts: ShownPrompts | Missing, labels: list[str]) -> Markup:
    if isinstance(prompts, ShownPrompts):
        own = prompts.queries[index]
        labels = labels or list(own.labels)
        button = tag("button", index, type="button", class_="plain", data_query=index, title="show its tokens")
        number, text = tag("td", button), tag("td", own.text, class_="text")
    else:
        number, text = tag("td", index), tag("td", "not known", class_="muted")
    return tag(
        "tr",
        number,
        text,
        tag("td", _label(labels, answer.gold)),
        *(
            tag(
                "td",
                *_sign(choice == answer.gold),
                " ",
                _label(labels, choice),
                " ",
                _score(scores, choice),
                class_="answer",
            )
            for scores, choice in zip(answer.scores, answer.predicted, strict=True)
        ),
        data_right=answer.pattern,
    )


def _label(labels: list[str], index: int) -> str:
    if index < 0:
        return "none"
    return labels[index] if index < len(labels) else f"candidate {index}"


def _score(scores: list[float | None], choice: int) -> Markup | None:
    value = scores[choice] if choice >= 0 else None
    return None if value is None else tag("span", f"{value:.2f}".replace("-", "−"), class_="muted small")
