"""Rows as token ids: every setting, metric and figure reads the same `PromptSet`.

With tok(s) the tokenizer without special tokens, the pieces are tokenised separately and joined:

    prefix      = [BOS] + Σ_demos ( tok(template) + tok(" " + label) + tok(separator) )
    query       = tok(template),    candidate_j = tok(" " + label_j)
    zero-shot   = [BOS] + query
    fine-tuning = [BOS] + tok(template) + tok(" " + label), one sequence a demonstration: no separator, no EOS

This keeps a demonstration's tokens the same at any place. In return, tokens never merge across a boundary, as they
would with some tokenizers in running text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from dualview.io.errors import UserError
from dualview.tasks.rows import Row
from dualview.tasks.task import Task

BosMode = Literal["auto", "yes", "no"]
CONTENT_FREE = ("N/A", "", "[MASK]")
"""The inputs without content of Zhao et al. (2021), Calibrate Before Use, section 5."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    @property
    def bos_token_id(self) -> Any: ...
    @property
    def eos_token_id(self) -> Any: ...
    @property
    def all_special_ids(self) -> Any: ...
    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Any: ...


@dataclass(frozen=True)
class Demo:
    """One demonstration's token ids, in the three pieces they were tokenised in."""

    template: tuple[int, ...]
    label: tuple[int, ...]
    separator: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.template + self.label + self.separator


@dataclass(frozen=True)
class Query:
    """One query's token ids, its candidates' (each as appended to the query), and the index of the right one."""

    ids: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    gold: int

    @property
    def longest(self) -> int:
        """Tokens of the query with its longest candidate."""
        return len(self.ids) + max(len(candidate) for candidate in self.candidates)


@dataclass(frozen=True)
class DemoSpan:
    """Where one demonstration's pieces are in the prefix, as index ranges."""

    template: range
    label: range
    separator: range


@dataclass(frozen=True)
class TrainingSequence:
    """What one step of fine-tuning reads; the label's tokens are `ids[label_start:]`."""

    ids: tuple[int, ...]
    label_start: int


@dataclass(frozen=True)
class PromptSet:
    """Everything the model is asked: one list of demonstrations for every query and for fine-tuning."""

    bos: int | None
    demos: tuple[Demo, ...]
    queries: tuple[Query, ...]
    shots: int
    """Demonstrations requested; those that do not fit the context are not in `demos`."""

    @property
    def shots_used(self) -> int:
        return len(self.demos)

    @property
    def zero_prefix(self) -> tuple[int, ...]:
        return () if self.bos is None else (self.bos,)

    @property
    def prefix(self) -> tuple[int, ...]:
        return sum((demo.ids for demo in self.demos), self.zero_prefix)

    @property
    def demo_spans(self) -> tuple[DemoSpan, ...]:
        spans: list[DemoSpan] = []
        start = len(self.zero_prefix)
        for demo in self.demos:
            label = start + len(demo.template)
            separator = label + len(demo.label)
            end = separator + len(demo.separator)
            spans.append(DemoSpan(range(start, label), range(label, separator), range(separator, end)))
            start = end
        return tuple(spans)

    @property
    def training_sequences(self) -> tuple[TrainingSequence, ...]:
        return tuple(
            TrainingSequence(
                ids=self.zero_prefix + demo.template + demo.label,
                label_start=len(self.zero_prefix) + len(demo.template),
            )
            for demo in self.demos
        )

    def with_queries(self, queries: Sequence[Query]) -> PromptSet:
        """The same demonstrations before other queries (selection rows, content-free ones)."""
        return replace(self, queries=tuple(queries))


def build_prompts(
    task: Task,
    tokenizer: Tokenizer,
    demos: Sequence[Row],
    queries: Sequence[Row],
    *,
    bos: BosMode = "auto",
    separator: str | None = None,
    max_context: int | None = None,
    room_for: Sequence[Query] = (),
) -> PromptSet:
    """The demonstrations and queries as token ids, with as many demonstrations as fit.

    If the prefix and the longest query with its longest candidate exceed `max_context`, whole demonstrations are
    dropped from the end. `room_for` are queries that will be run behind the same demonstrations without being in this
    set (selection rows, content-free ones): they must fit as well. `separator` overrides the task's.
    """
    if not demos:
        raise UserError(f"Task {task.name} was given no demonstrations; ask for at least one with --shots or --demos.")
    if not queries:
        raise UserError(f"Task {task.name} was given no queries; ask for at least one.")
    bos_id = resolve_bos(tokenizer, bos)
    between = _separator(tokenizer, task.separator if separator is None else separator)
    texts = _tokens(tokenizer, [task.render(row) for row in demos])
    answers = _tokens(tokenizer, [f" {task.candidates(row)[row.label]}" for row in demos])
    pieces = tuple(Demo(text, answer, between) for text, answer in zip(texts, answers, strict=True))
    for number, (row, demo) in enumerate(zip(demos, pieces, strict=True)):
        _not_empty(demo.template, f"the template of {_named('demonstration', number, row)}")
        _not_empty(
            demo.label, f"the label of {_named('demonstration', number, row)}, {task.candidates(row)[row.label]!r}"
        )
    prompts = PromptSet(bos_id, pieces, encode_queries(task, tokenizer, queries), shots=len(pieces))
    return prompts if max_context is None else _truncated(prompts, demos, queries, max_context, room_for)


def encode_queries(task: Task, tokenizer: Tokenizer, rows: Sequence[Row]) -> tuple[Query, ...]:
    """Each row as a query with its candidates: the task's labels, or the row's own choices."""
    texts = _tokens(tokenizer, [task.render(row) for row in rows])
    labels = encode_labels(tokenizer, task.labels) if task.labels else None
    queries: list[Query] = []
    for number, (row, ids) in enumerate(zip(rows, texts, strict=True)):
        candidates = labels or tuple(_tokens(tokenizer, [f" {choice}" for choice in task.candidates(row)]))
        _not_empty(ids, f"the template of {_named('query', number, row)}")
        for choice, candidate in zip(task.candidates(row), candidates, strict=True):
            _not_empty(candidate, f"the candidate {choice!r} of {_named('query', number, row)}")
        queries.append(Query(ids, candidates, row.label))
    return tuple(queries)


def encode_labels(tokenizer: Tokenizer, labels: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The labels as candidates; two with the same tokens are refused, since no score could separate them."""
    candidates = tuple(_tokens(tokenizer, [f" {label}" for label in labels]))
    for index, candidate in enumerate(candidates):
        if candidate in candidates[:index]:
            twin = labels[candidates.index(candidate)]
            raise UserError(
                f"Labels {twin!r} and {labels[index]!r} are the same tokens to this tokenizer; choose other words."
            )
    return candidates


def content_free_queries(
    task: Task, tokenizer: Tokenizer, candidates: tuple[tuple[int, ...], ...]
) -> tuple[Query, ...]:
    """The template with every field replaced by "N/A", by nothing and by "[MASK]", before the given candidates.

    For contextual calibration (Zhao et al. 2021): the model's answer to a question without content is its prior on the
    candidates. A multiple-choice task needs them once for each query's own candidates. They have no gold label (−1).
    """
    texts = [task.fill(dict.fromkeys(task.template_fields, filler)) for filler in CONTENT_FREE]
    queries = tuple(Query(ids, candidates, gold=-1) for ids in _tokens(tokenizer, texts))
    for query in queries:
        _not_empty(query.ids, "the template without content")
    return queries


def resolve_bos(tokenizer: Tokenizer, mode: BosMode) -> int | None:
    """The id every prompt begins with, or None.

    `auto`: the id the tokenizer itself puts first, if that is a special one. `yes`: the tokenizer's BOS.
    """
    if mode == "no":
        return None
    if mode == "auto":
        first = [int(token) for token in tokenizer("a")["input_ids"][:1]]
        return first[0] if first and first[0] in tokenizer.all_special_ids else None
    if tokenizer.bos_token_id is None:
        raise UserError("--bos is yes but this model's tokenizer has no BOS token; use --bos no or auto.")
    return int(tokenizer.bos_token_id)


def prompts_hash(prompts: PromptSet) -> str:
    """sha256 of every token id (BOS; each demonstration's pieces; each query and its candidates) as compact JSON."""
    document = [
        prompts.bos,
        [[demo.template, demo.label, demo.separator] for demo in prompts.demos],
        [[query.ids, query.candidates] for query in prompts.queries],
    ]
    return hashlib.sha256(json.dumps(document, separators=(",", ":")).encode()).hexdigest()


def _named(kind: str, number: int, row: Row) -> str:
    """A row as the user finds it: by file and line, and by its number among those used, from 0."""
    return f"{kind} {number} ({row.where})" if row.where else f"{kind} {number}"


def _truncated(
    prompts: PromptSet, demos: Sequence[Row], queries: Sequence[Row], max_context: int, room_for: Sequence[Query]
) -> PromptSet:
    longest = max(prompts.queries, key=lambda query: query.longest)
    bare = len(prompts.zero_prefix) + longest.longest
    if bare > max_context:
        number = prompts.queries.index(longest)
        raise UserError(
            f"{_named('Query', number, queries[number])} needs {bare} tokens with its longest candidate, but the "
            f"context holds {max_context}; raise --max-context, take a model with a longer context, or leave "
            "that query out."
        )
    room = max_context - max(query.longest for query in (longest, *room_for))
    length, kept = len(prompts.zero_prefix), 0
    for demo in prompts.demos:
        length += len(demo.ids)
        if length > room:
            break
        kept += 1
    if kept == 0:
        raise UserError(
            f"Not one demonstration fits: {_named('demonstration', 0, demos[0])} and the longest query need "
            f"{length + max_context - room} tokens, but the context holds {max_context}; "
            "raise --max-context or take shorter rows."
        )
    return replace(prompts, demos=prompts.demos[:kept])


def _separator(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    if text == "eos":
        if tokenizer.eos_token_id is None:
            raise UserError("The separator is eos but this model's tokenizer has no EOS token; give a text instead.")
        return (int(tokenizer.eos_token_id),)
    ids = _tokens(tokenizer, [text])[0]
    _not_empty(ids, f"the separator {text!r}")
    return ids


def _tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[int, ...]]:
    if not texts:  # an empty batch is an error to some tokenizers
        return []
    return [tuple(int(token) for token in ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def _not_empty(ids: tuple[int, ...], piece: str) -> None:
    if not ids:
        raise UserError(f"This tokenizer turns {piece} into no tokens at all; give it some text.")
