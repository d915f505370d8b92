"""The prompts exactly as the model saw them, ready to show: the text of every token, and its span.

A result file holds no texts. A run that is still in memory has its prompts; for one read from disk they are rebuilt
from its options, and shown only if their hash is the one in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from dualview.comparison.result import Result
from dualview.io.errors import UserError
from dualview.tasks.prompts import PromptSet, build_prompts, prompts_hash

_DEMO_SPANS = ("template", "label", "separator")


@dataclass(frozen=True)
class Piece:
    """A group of tokens of the prefix: BOS, or one demonstration's template, label or separator."""

    span: str
    demo: int | None
    ids: tuple[int, ...]


@dataclass(frozen=True)
class ShownQuery:
    ids: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    text: str
    """The query's tokens decoded together."""
    labels: tuple[str, ...]


@dataclass(frozen=True)
class ShownPrompts:
    """One prefix, shared by every query, and the queries that follow it."""

    prefix: tuple[Piece, ...]
    queries: tuple[ShownQuery, ...]
    tokens: dict[int, str]
    """What each token id decodes to on its own; the vocabulary's entry where that is part of a character."""

    @classmethod
    def of(cls, prompts: PromptSet, tokenizer: Any) -> ShownPrompts:
        @cache  # candidates repeat from query to query
        def text_of(ids: tuple[int, ...]) -> str:
            return str(tokenizer.decode(list(ids)))

        def token_of(token: int) -> str:
            text = text_of((token,))
            return str(tokenizer.convert_ids_to_tokens(token)) if not text or "�" in text else text

        queries = tuple(
            ShownQuery(q.ids, q.candidates, text_of(q.ids), tuple(text_of(each).strip() for each in q.candidates))
            for q in prompts.queries
        )
        bos = () if prompts.bos is None else (Piece("bos", None, (prompts.bos,)),)
        described = (Piece("description", None, prompts.description),) if prompts.description else ()
        demos = (Piece(s, i, getattr(demo, s)) for i, demo in enumerate(prompts.demos) for s in _DEMO_SPANS)
        prefix = (*bos, *described, *demos)
        return cls(prefix, queries, {token: token_of(token) for token in _used(prefix, queries)})

    @property
    def spans(self) -> list[str]:
        """The kinds of spans in the prefix."""
        before = [piece.span for piece in self.prefix if piece.demo is None]
        return [*before, *_DEMO_SPANS]

    @property
    def prefix_length(self) -> int:
        return sum(len(piece.ids) for piece in self.prefix)

    def first(self, count: int) -> ShownPrompts:
        """The same with the first `count` queries, and the tokens that these need."""
        queries = self.queries[:count]
        return ShownPrompts(self.prefix, queries, {token: self.tokens[token] for token in _used(self.prefix, queries)})

    def to_json(self) -> dict[str, Any]:
        """As the report's script reads it: ids, and the texts once."""
        return {
            "tokens": {str(token): text for token, text in self.tokens.items()},
            "prefix": [{"span": p.span, "demo": p.demo, "ids": p.ids} for p in self.prefix],
            "queries": [{"ids": q.ids, "candidates": q.candidates} for q in self.queries],
        }


def _used(prefix: Sequence[Piece], queries: Sequence[ShownQuery]) -> list[int]:
    pieces = (*(p.ids for p in prefix), *(q.ids for q in queries), *(c for q in queries for c in q.candidates))
    return sorted({token for ids in pieces for token in ids})


@dataclass(frozen=True)
class Missing:
    """Why a report cannot show its prompts."""

    reason: str


def prompts_of(result: Result) -> ShownPrompts | Missing:
    """The prompts of a run; those of one read from disk are rebuilt from its options and checked by their hash."""
    if result.asked is not None:
        return ShownPrompts.of(result.asked.prompts, result.asked.tokenizer)
    try:
        return rebuild(result)
    except Exception as error:
        # Data moved, no connection to a hub, another tokenizer: whatever it is, the numbers can still be shown.
        return Missing(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")


def rebuild(result: Result) -> ShownPrompts:
    """The same rows through the same tokenizer, without loading the model or asking a hub."""
    from dualview.comparison.inputs import read_inputs
    from dualview.options import RunOptions

    # The result lists every option that differs from its default, so a protocol must not add its presets to them.
    # Patches and adapters change no prompt, and need not be there any more.
    kept = {k: v for k, v in result.provenance.options.items() if k not in ("protocol", "patch", "adapter")}
    options = RunOptions.make(**{**kept, "seed": result.provenance.seeds.demos})
    if options.task.startswith("lm-eval:"):  # such a task is code, and a result file may come from anyone
        raise UserError("prompts of lm-evaluation-harness's tasks are shown only by the run itself.")
    inputs, tokenizer = read_inputs(options), _tokenizer(options.model)
    demos = (inputs.demos or ())[: result.task.shots_used]
    how: Any = {"bos": options.bos, "separator": options.separator}
    prompts = build_prompts(inputs.task, tokenizer, demos, inputs.queries, **how)
    if prompts_hash(prompts) != result.provenance.prompts_hash:
        raise UserError("the rows or the tokenizer have changed since the run: the prompts' hash differs.")
    return ShownPrompts.of(prompts, tokenizer)


def _tokenizer(name: str) -> Any:
    """From this machine only, and never with a model's own code: a result file may come from anyone."""
    from pathlib import Path

    from transformers import AutoTokenizer

    from dualview.io import assets
    from dualview.io.gguf import cache as gguf_cache

    if name == "embedded":
        ready = [status.state == "ready" for status in assets.list_assets() if status.name == assets.MODEL.name]
        if not all(ready):
            raise UserError("the embedded model is not on this machine; run `dualview assets fetch`.")
        return AutoTokenizer.from_pretrained(str(assets.embedded_model()), local_files_only=True)
    path = assets.named_model(name) or Path(name).expanduser()
    if path.suffix == ".gguf":
        folder = gguf_cache.lookup(path) if path.is_file() else None
        if folder is not None:
            return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    return AutoTokenizer.from_pretrained(str(path.absolute()) if path.is_dir() else name, local_files_only=True)
