"""Rows as token ids: every setting, metric and figure reads the same `PromptSet`.

With tok(s) the tokenizer without special tokens, the pieces are tokenised separately and joined:

    prefix      = [BOS] + Σ_demos ( tok(template) + tok(" " + label) + tok(separator) )
    query       = tok(template),    candidate_j = tok(" " + label_j)
    zero-shot   = [BOS] + query
    fine-tuning = [BOS] + tok(template) + tok(" " + label), one sequence a demonstration: no separator, no EOS

This keeps a demonstration's tokens the same at any place. In return, tokens never merge across a boundary, as they
would with some tokenizers in running text. A task whose `tokens` are `running` is tokenised as one text instead (see
`_running`), and its `delimiter` takes the place of " ".
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from dualview.io.errors import UserError
from dualview.tasks.lm_eval import PREFIX
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
    def __call__(self, text: Any, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False) -> Any: ...


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
    summed: bool = False
    """A candidate's score is the sum, not the mean, of its tokens' log-probabilities."""

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
    description: tuple[int, ...] = ()
    """The task's description, between BOS and everything else."""
    alone: tuple[TrainingSequence, ...] | None = None
    """What fine-tuning reads of each requested demonstration, where a demonstration on its own has other tokens."""

    @property
    def shots_used(self) -> int:
        return len(self.demos)

    @property
    def zero_prefix(self) -> tuple[int, ...]:
        return (() if self.bos is None else (self.bos,)) + self.description

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
        if self.alone is not None:
            return self.alone[: len(self.demos)]
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
    if task.tokens == "running":
        between = task.separator if separator is None else separator
        prompts = _running(task, tokenizer, demos, queries, bos_id, between)
        return prompts if max_context is None else _truncated(prompts, demos, queries, max_context, room_for)
    between = _separator(tokenizer, task.separator if separator is None else separator)
    texts = _tokens(tokenizer, [task.render(row) for row in demos])
    answers = _tokens(tokenizer, [_answer(task, row) for row in demos])
    pieces = tuple(Demo(text, answer, between) for text, answer in zip(texts, answers, strict=True))
    for number, (row, demo) in enumerate(zip(demos, pieces, strict=True)):
        _not_empty(demo.template, f"the template of {_named('demonstration', number, row)}")
        _not_empty(
            demo.label, f"the label of {_named('demonstration', number, row)}, {task.candidates(row)[row.label]!r}"
        )
    description = _tokens(tokenizer, [task.description])[0] if task.description else ()
    prompts = PromptSet(bos_id, pieces, encode_queries(task, tokenizer, queries), len(pieces), description)
    return prompts if max_context is None else _truncated(prompts, demos, queries, max_context, room_for)


def encode_queries(task: Task, tokenizer: Tokenizer, rows: Sequence[Row]) -> tuple[Query, ...]:
    """Each row as a query with its candidates: the task's labels, or the row's own choices."""
    running = task.tokens == "running"
    texts = _tokens(tokenizer, [_question(task, row)[0] for row in rows])
    labels = encode_labels(tokenizer, task.labels, task.delimiter) if task.labels and not running else None
    queries: list[Query] = []
    for number, (row, ids) in enumerate(zip(rows, texts, strict=True)):
        if running:
            candidates = _continuations(task, tokenizer, row, ids)
        else:
            candidates = labels or tuple(_tokens(tokenizer, [task.delimiter + text for text in task.candidates(row)]))
        _not_empty(ids, f"the template of {_named('query', number, row)}")
        for choice, candidate in zip(task.candidates(row), candidates, strict=True):
            _not_empty(candidate, f"the candidate {choice!r} of {_named('query', number, row)}")
        queries.append(Query(ids, candidates, row.label, task.scores == "sum"))
    return tuple(queries)


def encode_labels(tokenizer: Tokenizer, labels: Sequence[str], delimiter: str = " ") -> tuple[tuple[int, ...], ...]:
    """The labels as candidates; two with the same tokens are refused, since no score could separate them."""
    candidates = tuple(_tokens(tokenizer, [delimiter + label for label in labels]))
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
    if task.train.startswith(PREFIX):
        raise UserError(
            "--calibrate asks the template without its fields, and a task of lm-evaluation-harness has no fields; "
            "leave --calibrate out."
        )
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
    document: list[Any] = [
        prompts.bos,
        [[demo.template, demo.label, demo.separator] for demo in prompts.demos],
        [[query.ids, query.candidates] for query in prompts.queries],
    ]
    # Later additions count only where they are used, so that older prompts keep their hash.
    if prompts.description or any(query.summed for query in prompts.queries):
        document.append([prompts.description, [query.summed for query in prompts.queries]])
    return hashlib.sha256(json.dumps(document, separators=(",", ":")).encode()).hexdigest()


def _running(
    task: Task, tokenizer: Tokenizer, demos: Sequence[Row], rows: Sequence[Row], bos: int | None, separator: str
) -> PromptSet:
    """The prompts as lm-evaluation-harness has them: every prompt is one text, tokenised whole.

    A token belongs to the piece in which it begins. dualview asks every query after the same demonstrations, and with
    and without them, so a tokenizer that merges a query with the text before it is refused.
    """
    if separator == "eos":
        raise UserError(f"--separator is eos, but task {task.name} is tokenised as running text; give a text instead.")
    queries = encode_queries(task, tokenizer, rows)
    pieces = [piece for row in demos for piece in (task.render(row), _answer(task, row), separator)]
    description = _shared_prefix(task, tokenizer, task.description, rows, queries)
    prefix = _shared_prefix(task, tokenizer, task.description + "".join(pieces), rows, queries)
    if prefix[: len(description)] != description:
        raise _merged(task, "the description", "the first demonstration")
    cuts = _cuts(tokenizer, [task.description, *pieces, _question(task, rows[0])[0]])
    cuts[0], cuts[len(pieces)] = len(description), len(prefix)
    spans = [prefix[start:end] for start, end in itertools.pairwise(cuts[: len(pieces) + 1])]
    shown = tuple(Demo(*spans[place : place + 3]) for place in range(0, len(spans), 3))
    start = (() if bos is None else (bos,)) + description
    alone = tuple(
        TrainingSequence(start + query.ids + query.candidates[query.gold], len(start) + len(query.ids))
        for query in encode_queries(task, tokenizer, demos)
    )
    return PromptSet(bos, shown, queries, len(shown), description, alone)


def _shared_prefix(
    task: Task, tokenizer: Tokenizer, text: str, rows: Sequence[Row], queries: Sequence[Query]
) -> tuple[int, ...]:
    """The tokens of `text` in front of every query and candidate; they must be the same for all of them."""
    asked = [
        (ids, text + body + rest)
        for row, query in zip(rows, queries, strict=True)
        for body, candidates in [_question(task, row)]
        for ids, rest in [(query.ids + end, gap) for end, gap in zip(query.candidates, candidates, strict=True)]
    ]
    found: set[tuple[int, ...]] = set()
    for (ids, _), whole in zip(asked, _tokens(tokenizer, [text for _, text in asked]), strict=True):
        if whole[len(whole) - len(ids) :] != ids:
            raise _merged(task, "the demonstrations" if text != task.description else "the description", "a query")
        found.add(whole[: len(whole) - len(ids)])
    if len(found) != 1:
        raise _merged(task, "the demonstrations", "a query")
    return found.pop()


def _cuts(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[int]:
    """How many tokens of the joined pieces begin before the end of each piece."""
    try:
        offsets = tokenizer("".join(pieces), add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    except NotImplementedError:
        raise UserError("Tasks of running text need a fast tokenizer, and this model has a slow one.") from None
    starts = [int(start) for start, _ in offsets]
    return [bisect.bisect_left(starts, end) for end in itertools.accumulate(map(len, pieces))]


def _question(task: Task, row: Row) -> tuple[str, list[str]]:
    """The query's text and the text of each candidate after it.

    In running text, blanks at the end of the query belong to the candidates, as in lm-evaluation-harness: that is where
    tokenizers have them.
    """
    text, answers = task.render(row), [task.delimiter + answer for answer in task.candidates(row)]
    if task.tokens == "pieces":
        return text, answers
    body = text.rstrip()
    return body, [text[len(body) :] + answer for answer in answers]


def _continuations(task: Task, tokenizer: Tokenizer, row: Row, ids: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each candidate after the query's `ids`, tokenised together."""
    body, answers = _question(task, row)
    whole = _tokens(tokenizer, [body + answer for answer in answers])
    if any(tokens[: len(ids)] != ids for tokens in whole):
        raise _merged(task, "a query", "its answer")
    return tuple(tokens[len(ids) :] for tokens in whole)


def _answer(task: Task, row: Row) -> str:
    """The text of the right answer as it follows the template."""
    return task.delimiter + task.candidates(row)[row.label]


def _merged(task: Task, left: str, right: str) -> UserError:
    return UserError(
        f"This tokenizer gives {right} other tokens after {left} than without, so task {task.name} cannot be asked "
        "with and without demonstrations in running text; take another model, or write the task with a template."
    )


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
