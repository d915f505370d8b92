"""Queries as trees of tokens, packed side by side into one row.

A query is a chain of tokens; its candidate answers branch off its last token. Every token is run once: candidates
that begin alike share their beginning, and the pack holds no padding. Each token attends to its ancestors (and to a
prefix that lies before all queries), so the scores are those of running every prompt and candidate apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dualview.tasks.prompt import Query

At = Literal["prompt", "label0"]


@dataclass(frozen=True)
class Tree:
    """One query and its candidates. Node 0 is the query's first token; a node's parent comes before it."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    reads: tuple[tuple[tuple[int, int], ...], ...]
    """Per candidate, per token of it: (the node whose logits predict it, the token)."""
    path: tuple[int, ...]
    """The nodes from the first query token to the recorded one: the columns of m."""

    @property
    def chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


def grow(query: Query, at: At = "prompt") -> Tree:
    """The tree that scores all candidates of a query and holds its recorded token."""
    ids = list(query.ids)
    parents = list(range(-1, len(ids) - 1))
    children: dict[tuple[int, int], int] = {}

    def step(node: int, token: int) -> int:
        if (node, token) not in children:
            children[node, token] = len(ids)
            ids.append(token)
            parents.append(node)
        return children[node, token]

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
    return Tree(tuple(ids), tuple(parents), tuple(reads), tuple(path))


@dataclass(frozen=True)
class Pack:
    """Several trees laid out in one row; `members` says which queries they are."""

    members: tuple[int, ...]
    ids: Int[Tensor, " token"]
    depth: Int[Tensor, " token"]
    """Distance from the query's first token: the position, once the prefix's length is added."""
    slots: Int[Tensor, "query slot"]
    """Where each query's tokens lie in the row, padded by repeating the first."""
    cells: Int[Tensor, " token"]
    """The inverse: where each token of the row lies in the flattened `slots`."""
    ancestors: Bool[Tensor, "query slot slot"] | None
    """Whom each token may attend to; None where every query is a plain chain, so that causality says it all."""
    read: Int[Tensor, " read"]
    """Tokens of the row whose logits are wanted."""
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


def pack(trees: Sequence[Tree], members: Sequence[int]) -> Pack:
    """Lay trees side by side."""
    starts = [0]
    for tree in trees:
        starts.append(starts[-1] + len(tree.ids))
    width = max(len(tree.ids) for tree in trees)
    depth: list[int] = []
    cells: list[int] = []
    slots = torch.zeros(len(trees), width, dtype=torch.long)
    read: list[int] = []
    first_read: list[int] = []
    scored: list[tuple[int, int, int, int]] = []
    for i, tree in enumerate(trees):
        slots[i] = starts[i]
        slots[i, : len(tree.ids)] = torch.arange(starts[i], starts[i + 1])
        cells.extend(range(i * width, i * width + len(tree.ids)))
        own_depth: list[int] = []
        for parent in tree.parents:
            own_depth.append(0 if parent < 0 else own_depth[parent] + 1)
        depth.extend(own_depth)
        first_read.append(len(read))  # every candidate begins after the last prompt token, so it is read first
        row_of: dict[int, int] = {}
        for j, candidate in enumerate(tree.reads):
            for node, target in candidate:
                if node not in row_of:
                    row_of[node] = len(read)
                    read.append(starts[i] + node)
                scored.append((row_of[node], target, i, j))
    columns = torch.tensor([len(tree.path) for tree in trees])
    own = torch.stack(
        [
            torch.tensor([starts[i] + n for n in tree.path] + [starts[i]] * (int(columns.max()) - len(tree.path)))
            for i, tree in enumerate(trees)
        ]
    )
    scores = torch.tensor(scored).T
    return Pack(
        members=tuple(members),
        ids=torch.tensor([token for tree in trees for token in tree.ids]),
        depth=torch.tensor(depth),
        slots=slots,
        cells=torch.tensor(cells),
        ancestors=None if all(tree.chain for tree in trees) else _ancestors(trees, width),
        read=torch.tensor(read),
        read_row=scores[0],
        target=scores[1],
        scored_query=scores[2],
        scored_candidate=scores[3],
        first_read=torch.tensor(first_read),
        record=torch.tensor([starts[i] + tree.path[-1] for i, tree in enumerate(trees)]),
        own=own,
        columns=columns,
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
    order = sorted(range(len(trees)), key=lambda i: (len(trees[i].ids), trees[i].ids))
    chosen: list[int] = []
    size = rows = 0
    for i in order:
        own_rows = len({node for candidate in trees[i].reads for node, _ in candidate})
        full = size + len(trees[i].ids) > tokens or rows + own_rows > reads
        if chosen and (full or (queries is not None and len(chosen) >= queries)):
            yield pack([trees[j] for j in chosen], chosen)
            chosen, size, rows = [], 0, 0
        chosen.append(i)
        size += len(trees[i].ids)
        rows += own_rows
    if chosen:
        yield pack([trees[j] for j in chosen], chosen)
