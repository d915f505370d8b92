"""Queries packed into one pass, so that the states at their last prompt tokens can be read and replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.anatomy.dispatch import run_forward
from dualview.duality.errors import NotApplicable
from dualview.models.language_model import LanguageModel
from dualview.models.packing.rows import Pack, Tree, grow, pack, plan
from dualview.models.prefix import Prefix
from dualview.models.probe import Packed
from dualview.models.scoring import candidate_scores
from dualview.tasks.prompts import Query

_TOKENS = 2048
_LOGIT_BYTES = 1 << 28


@dataclass(frozen=True)
class QueryPack:
    """Some queries side by side behind one prefix."""

    pack: Pack
    prefix: Prefix
    candidates: int
    """The largest number of candidates in the set this pack is a part of."""

    @property
    def last(self) -> Int[Tensor, " query"]:
        """Where in the row each query's last prompt token is."""
        return self.pack.record

    def run(self, lm: LanguageModel) -> Float[Tensor, "read vocab"]:
        """One pass, with whatever is hooked onto the model: the logits that score the candidates."""
        strategy = Packed(self.pack, self.prefix)
        with torch.no_grad():
            return run_forward(lm.model, strategy, self.pack.ids[None], strategy.positions[None], self.pack.read)[0]

    def log_probs(self, logits: Float[Tensor, "read vocab"]) -> Float[np.ndarray, "query candidate"]:
        """Mean log-prob of every candidate's tokens; −∞ where a query has fewer candidates."""
        return candidate_scores(self.pack, logits[None], self.candidates)[0].cpu().numpy()


def query_pack(lm: LanguageModel, queries: Sequence[Query], prefix: Prefix) -> QueryPack:
    """All queries in one pack, in their order."""
    _packable(lm)
    trees = [grow(query) for query in queries]
    widest = max((len(query.candidates) for query in queries), default=0)
    return QueryPack(pack(trees, range(len(trees))).to(lm.device), prefix, widest)


def tree_packs(lm: LanguageModel, trees: Sequence[Tree], prefix: Prefix) -> Iterator[QueryPack]:
    """Trees of tokens in packs of bounded size; `pack.members` are their numbers."""
    _packable(lm)
    reads = max(1, _LOGIT_BYTES // (4 * lm.vocab))
    widest = max((len(tree.reads) for tree in trees), default=0)
    for each in plan(trees, tokens=_TOKENS, reads=reads):
        yield QueryPack(each.to(lm.device), prefix, widest)


def branched(query: Query, copies: int) -> Tree:
    """A query with `copies` copies of its last token side by side, each with all candidates after it.

    Copy c is node `len(query.ids) − 1 + c`, and candidate j of it is candidate `c · len(query.candidates) + j` of the
    tree: what is done to one copy's states reaches no other copy, so many can be tried in one pass.
    """
    stem = len(query.ids) - 1
    ids = [*query.ids[:stem], *([query.ids[-1]] * copies)]
    parents = [*range(-1, stem - 1), *([stem - 1] * copies)]
    depth = [*range(stem), *([stem] * copies)]
    reads: list[tuple[tuple[int, int], ...]] = []
    for copy in range(copies):
        for candidate in query.candidates:
            node, read = stem + copy, [(stem + copy, candidate[0])]
            for token, following in pairwise(candidate):
                ids.append(token)
                parents.append(node)
                depth.append(depth[node] + 1)
                node = len(ids) - 1
                read.append((node, following))
            reads.append(tuple(read))
    return Tree(tuple(ids), tuple(parents), tuple(depth), tuple(reads), tuple(range(stem + 1)))


def _packable(lm: LanguageModel) -> None:
    if lm.whole_because is not None:
        raise NotApplicable(
            f"Reusable patches and task vectors need a model whose queries can be packed; {lm.name} cannot be: "
            f"{lm.whole_because}."
        )
