"""Queries as trees of tokens, packed side by side into one row.

A query is a chain of tokens; its candidate answers branch off its last token. Every token is run once: candidates
with the same beginning share it, and the pack has no padding. Each token attends to its ancestors (and to a
prefix that comes before all queries), so the scores equal those of running every prompt and candidate separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dualview.tasks.prompts import Query

At = Literal["prompt", "label0"]


@dataclass(frozen=True)
class Tree:
    """One query and its candidates. Node 0 is the query's first token; a node's parent comes before it."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    depth: tuple[int, ...]
    """Distance from the first token."""
    reads: tuple[tuple[tuple[int, int], ...], ...]
    """Per candidate, per token of it: (the node whose logits predict it, the token)."""
    path: tuple[int, ...]
    """The nodes from the first query token to the recorded one: the columns of m."""

    @property
    def chain(self) -> bool:
        return self.depth[-1] == len(self.depth) - 1

    def padded(self, nodes: int) -> Tree:
        """The same with a tail of nodes that nothing reads, `nodes` in all."""
        more = range(len(self.ids), nodes)
        return replace(
            self,
            ids=self.ids + self.ids[-1:] * len(more),
            parents=self.parents + tuple(node - 1 for node in more),
            depth=self.depth + tuple(self.depth[-1] + 1 + i for i in range(len(more))),
        )

    @property
    def read_nodes(self) -> tuple[int, ...]:
        """The nodes whose logits are needed, each once; the last prompt token comes first."""
        return tuple(dict.fromkeys(node for candidate in self.reads for node, _ in candidate))


def grow(query: Query, at: At = "prompt") -> Tree:
    """The tree that scores all candidates of a query and holds its recorded token."""
    ids = list(query.ids)
    parents = list(range(-1, len(ids) - 1))
    depth = list(range(len(ids)))
    children: dict[tuple[int, int], int] = {}

    def step(node: int, token: int) -> int:
        if (node, token) not in children:
            children[node, token] = len(ids)
            ids.append(token)
            parents.append(node)
            depth.append(depth[node] + 1)
        return children[node, token]

    # A candidate's first token is predicted by the query's last one, so a candidate of one token adds no node.
    end = len(ids) - 1
    reads: list[tuple[tuple[int, int], ...]] = []
    for candidate in query.candidates:
        node, read = end, [(end, candidate[0])]
        for token, following in pairwise(candidate):
            node = step(node, token)
            read.append((node, following))
        reads.append(tuple(read))
    path = list(range(end + 1))
    if at == "label0":
        for token in query.candidates[0]:
            path.append(step(path[-1], token))
    return Tree(tuple(ids), tuple(parents), tuple(depth), tuple(reads), tuple(path))


@dataclass(frozen=True)
class Pack:
    """Several trees in one row; `members` are their queries."""

    members: tuple[int, ...]
    ids: Int[Tensor, " token"]
    depth: Int[Tensor, " token"]
    """Distance from the query's first token: the position, once the prefix's length is added."""
    slots: Int[Tensor, "query slot"]
    """Where each query's tokens are in the row, padded by repeating the first."""
    cells: Int[Tensor, " token"]
    """The inverse: where each token of the row is in the flattened `slots`."""
    ancestors: Bool[Tensor, "query slot slot"] | None
    """Whom each token may attend to; None where every query is a plain chain, so that causality says it all."""
    read: Int[Tensor, " read"]
    """Tokens of the row whose logits are needed."""
    read_row: Int[Tensor, " scored"]
    target: Int[Tensor, " scored"]
    scored_query: Int[Tensor, " scored"]
    scored_candidate: Int[Tensor, " scored"]
    first_read: Int[Tensor, " query"]
    """The row of `read` that is each query's last prompt token."""
    record: Int[Tensor, " query"]
    own: Int[Tensor, "query column"]
    """The row's tokens that are the columns of m, padded by repeating the first."""
    columns: Int[Tensor, " query"]

    def to(self, device: torch.device) -> Pack:
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def fill(self, other: Pack) -> None:
        """Take over the contents of another of the same shape, in place, but for what only records read."""
        for name, x in vars(self).items():
            if isinstance(x, Tensor) and name not in ("own", "columns"):
                x.copy_(getattr(other, name))


def pack(trees: Sequence[Tree], members: Sequence[int]) -> Pack:
    """Put trees side by side in one row."""
    lengths = np.array([len(tree.ids) for tree in trees])
    starts = np.cumsum(lengths) - lengths
    columns = np.array([len(tree.path) for tree in trees])
    slot = np.arange(lengths.max())
    filled = slot < lengths[:, None]
    read: list[int] = []
    first_read: list[int] = []
    scored: list[tuple[int, int, int, int]] = []
    for i, tree in enumerate(trees):
        first_read.append(len(read))
        row_of = {node: len(read) + r for r, node in enumerate(tree.read_nodes)}
        read.extend(int(starts[i]) + node for node in row_of)
        scored.extend((row_of[node], token, i, j) for j, reads in enumerate(tree.reads) for node, token in reads)
    # Padding repeats a real token of the same query: it can be computed like the others and is never read.
    own = np.repeat(starts[:, None], columns.max(), axis=1)
    own[np.arange(columns.max()) < columns[:, None]] += np.concatenate([tree.path for tree in trees])
    read_row, target, scored_query, scored_candidate = torch.tensor(scored).T.contiguous()
    return Pack(
        members=tuple(members),
        ids=torch.from_numpy(np.concatenate([tree.ids for tree in trees])),
        depth=torch.from_numpy(np.concatenate([tree.depth for tree in trees])),
        slots=torch.from_numpy(np.where(filled, slot, 0) + starts[:, None]),
        cells=torch.from_numpy(np.flatnonzero(filled)),
        ancestors=None if all(tree.chain for tree in trees) else _ancestors(trees, len(slot)),
        read=torch.tensor(read),
        read_row=read_row,
        target=target,
        scored_query=scored_query,
        scored_candidate=scored_candidate,
        first_read=torch.tensor(first_read),
        record=torch.from_numpy(starts + [tree.path[-1] for tree in trees]),
        own=torch.from_numpy(own),
        columns=torch.from_numpy(columns),
    )


def _ancestors(trees: Sequence[Tree], width: int) -> Bool[Tensor, "query slot slot"]:
    seen = torch.zeros(len(trees), width, width, dtype=torch.bool)
    for i, tree in enumerate(trees):
        for node, parent in enumerate(tree.parents):
            if parent >= 0:
                seen[i, node] = seen[i, parent]
            seen[i, node, node] = True
        seen[i, len(tree.ids) :, 0] = True  # padding attends to something, so that no softmax is empty
    return seen


def plan(trees: Sequence[Tree], *, tokens: int, reads: int, queries: int | None = None) -> Iterator[Pack]:
    """Packs of trees of similar size, each within a budget of tokens, of logit rows and of queries (at least one)."""
    # Similar sizes waste the fewest slots. Ties are ordered by content, so that the packs, and with them the rounding,
    # do not depend on the order of the queries.
    order = sorted(range(len(trees)), key=lambda i: (len(trees[i].ids), trees[i].ids))
    chosen: list[int] = []
    size = rows = 0
    for i in order:
        own_rows = len(trees[i].read_nodes)
        full = size + len(trees[i].ids) > tokens or rows + own_rows > reads
        if chosen and (full or (queries is not None and len(chosen) >= queries)):
            yield pack([trees[j] for j in chosen], chosen)
            chosen, size, rows = [], 0, 0
        chosen.append(i)
        size += len(trees[i].ids)
        rows += own_rows
    if chosen:
        yield pack([trees[j] for j in chosen], chosen)
