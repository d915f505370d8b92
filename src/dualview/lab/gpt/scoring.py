"""Few-shot accuracy of a small model, with the library's prompts, draws and scores.

Models with plain attention are scored by `dualview.models.scoring.ask`, which packs queries behind a shared prefix by
splitting the softmax. A variant's attention has no such split, and `ask` would run every prompt whole. Here the prefix
is run once into a key-value cache (exact for every variant), and the queries follow it in padded batches. The scores
are those of `ask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import DynamicCache

from dualview.metrics.predictions import correct, predictions
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import PromptSet, Query, build_prompts
from dualview.tasks.sampling import sample_demos, sample_queries
from dualview.tasks.task import Task


@dataclass(frozen=True)
class _Room:
    """What one batch may hold: bytes of logits, bytes of the prefix's keys and values, and tokens of queries."""

    logits: int = 1 << 27
    cache: int = 1 << 28
    tokens: int = 1 << 14

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """On a GPU a share of its free memory: a batch of a few rows takes as long there as one of hundreds."""
        if device.type != "cuda":
            return cls()
        free, _ = torch.cuda.mem_get_info(device)  # other processes, too, may use the GPU
        memory = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return cls(logits=memory // 32, cache=memory // 8, tokens=1 << 17)


@dataclass(frozen=True)
class FewShot:
    """One model on one task."""

    task: str
    chance: float
    shots_used: list[int]
    """By draw of demonstrations."""
    zsl: Bool[np.ndarray, " query"]
    """Which queries are right without demonstrations."""
    icl: Bool[np.ndarray, "draw query"]
    constant: int
    """Draws in which one label was predicted for every query."""

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "chance": self.chance,
            "n_queries": int(self.zsl.size),
            "shots_used": self.shots_used,
            "zsl": float(self.zsl.mean()),
            "icl": [float(draw.mean()) for draw in self.icl],
            "constant_draws": self.constant,
        }


def prompts_of(
    task: Task, tokenizer: Any, context: int | None, *, shots: int, n_queries: int, draws: Sequence[int]
) -> list[PromptSet]:
    """The same queries behind each draw of demonstrations."""
    rows = sample_queries(task, n_queries)
    return [
        build_prompts(task, tokenizer, sample_demos(task, seed, shots), rows, max_context=context) for seed in draws
    ]


def few_shot(lm: LanguageModel, name: str, prompts: Sequence[PromptSet]) -> FewShot:
    """Accuracy without demonstrations, and behind each draw of them, on the queries they share."""
    queries = prompts[0].queries
    gold = np.array([query.gold for query in queries])
    bare = score(lm, queries, prompts[0].zero_prefix)
    behind = [in_context(lm, each) for each in prompts]
    return FewShot(
        task=name,
        chance=float(np.mean([1 / len(query.candidates) for query in queries])),
        shots_used=[each.shots_used for each in prompts],
        zsl=correct(bare, gold),
        icl=np.stack([correct(scores, gold) for scores in behind]),
        constant=sum(len(set(predictions(scores).tolist())) == 1 for scores in behind),
    )


def in_context(lm: LanguageModel, prompts: PromptSet) -> Float[np.ndarray, "query candidate"]:
    """Scores of every candidate behind the demonstrations."""
    return score(lm, prompts.queries, prompts.prefix, len(prompts.zero_prefix))


def score(
    lm: LanguageModel, queries: Sequence[Query], prefix: Sequence[int], special: int = 0
) -> Float[np.ndarray, "query candidate"]:
    """The mean log-probability of every candidate behind the prefix; −inf where a query has fewer candidates."""
    if lm.fast:
        return ask(lm, queries, PassPlan(tuple(prefix), special, record=False)).settings[0].log_probs
    widest = max(len(query.candidates) for query in queries)
    found = np.full((len(queries), widest), -np.inf)
    rows = sorted(_rows(queries), key=lambda row: len(row.ids))
    with torch.no_grad():
        cached = _read(lm, prefix) if prefix else []
        for batch in _batches(rows, cached, lm.vocab, _Room.of(lm.device)):
            for row, log_probs in zip(batch, _ask_rows(lm, batch, len(prefix), cached), strict=True):
                for candidate, value in zip(row.candidates, log_probs, strict=True):
                    found[row.query, candidate] = value
    return found


@dataclass(frozen=True)
class _Row:
    """A query and the beginning of some of its candidates, which differ in their last token at most."""

    query: int
    ids: tuple[int, ...]
    start: int
    """Where the candidates' first token is predicted."""
    candidates: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]


def _rows(queries: Sequence[Query]) -> list[_Row]:
    """A row for each different beginning: one for all candidates of a single token."""
    rows: list[_Row] = []
    for number, query in enumerate(queries):
        beginnings: dict[tuple[int, ...], list[int]] = {}
        for index, candidate in enumerate(query.candidates):
            beginnings.setdefault(candidate[:-1], []).append(index)
        for begun, members in beginnings.items():
            tokens = tuple(query.candidates[index] for index in members)
            rows.append(_Row(number, query.ids + begun, len(query.ids) - 1, tuple(members), tokens))
    return rows


Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of the prefix, by layer, of a batch of one."""


def _batches(rows: Sequence[_Row], cached: Layers, vocab: int, room: _Room) -> list[list[_Row]]:
    """Rows of similar length, each with its copy of the prefix, as many as there is room for (always at least one)."""
    batches: list[list[_Row]] = []
    most = max(1, room.cache // max(1, sum(x.nbytes for pair in cached for x in pair)))
    for row in rows:
        if batches and len(batches[-1]) < most:
            grown = [*batches[-1], row]
            read = max(len(r.ids) for r in grown) - min(r.start for r in grown)
            if 4 * vocab * len(grown) * read <= room.logits and len(grown) * len(row.ids) <= room.tokens:
                batches[-1] = grown
                continue
        batches.append([row])
    return batches


def _read(lm: LanguageModel, prefix: Sequence[int]) -> Layers:
    cache = DynamicCache()
    ids = torch.tensor([list(prefix)], device=lm.device)
    lm.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cast(list[Any], cache.layers)]


def _ask_rows(lm: LanguageModel, rows: Sequence[_Row], prefix: int, cached: Layers) -> list[list[float]]:
    """The scores of each row's candidates; rows are padded at the end."""
    width, size = max(len(row.ids) for row in rows), len(rows)
    ids = torch.zeros(size, width, dtype=torch.long)
    mask = torch.zeros(size, prefix + width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        mask[i, : prefix + len(row.ids)] = 1
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(cached):
        cache.update(keys.expand(size, -1, -1, -1), values.expand(size, -1, -1, -1), layer)
    first = min(row.start for row in rows)
    keep = torch.arange(first, width, device=lm.device)
    arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": keep}
    logits: Tensor = lm.model(input_ids=ids.to(lm.device), attention_mask=mask.to(lm.device), **arguments).logits
    log_probs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    # One gather for all tokens of all candidates, so that the GPU is synchronised once.
    each = [
        (i, row.start - first + t, token, number)
        for number, (i, row, tokens) in enumerate(_candidates(rows))
        for t, token in enumerate(tokens)
    ]
    at, place, token, number = torch.tensor(each).T
    picked = log_probs[at.to(lm.device), place.to(lm.device), token.to(lm.device)].double().cpu()
    total = torch.zeros(int(number[-1]) + 1, dtype=torch.float64).index_add(0, number, picked)
    means = iter((total / torch.bincount(number)).tolist())
    return [[next(means) for _ in row.candidates] for row in rows]


def _candidates(rows: Sequence[_Row]) -> list[tuple[int, _Row, tuple[int, ...]]]:
    """(row's number, row, tokens) of every candidate, in order."""
    return [(i, row, tokens) for i, row in enumerate(rows) for tokens in row.tokens]
