"""Trees and packs: every token once, all ancestors right, no query lost, budgets kept."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.models.packing.rows import Tree, grow, pack, plan
from dualview.tasks.prompts import Query

FAST = settings(max_examples=80, deadline=None)
TOKENS = st.integers(0, 3)  # few, so that candidates often have the same beginning
CANDIDATES = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=5).map(tuple)
QUERIES = st.builds(Query, st.lists(TOKENS, min_size=1, max_size=6).map(tuple), CANDIDATES, st.just(0))
AT = st.sampled_from(["prompt", "label0"])


def spelt(tree: Tree, node: int) -> tuple[int, ...]:
    """The tokens from the first of the query to this one."""
    tokens: list[int] = []
    while node >= 0:
        tokens.append(tree.ids[node])
        node = tree.parents[node]
    return tuple(reversed(tokens))


@FAST
@given(QUERIES, AT)
def test_a_tree_spells_every_candidate(query: Query, at) -> None:
    tree = grow(query, at)
    assert tree.parents[0] == -1
    assert all(parent < node for node, parent in enumerate(tree.parents))
    for candidate, read in zip(query.candidates, tree.reads, strict=True):
        assert tuple(token for _, token in read) == candidate
        for place, (node, _) in enumerate(read):
            assert spelt(tree, node) == query.ids + candidate[:place]
    recorded = query.ids + (query.candidates[0] if at == "label0" else ())
    assert tuple(spelt(tree, node) for node in tree.path) == tuple(recorded[: i + 1] for i in range(len(recorded)))


@FAST
@given(QUERIES, AT)
def test_a_tree_runs_every_token_once_and_none_in_vain(query: Query, at) -> None:
    tree = grow(query, at)
    needed = {query.ids[: i + 1] for i in range(len(query.ids))}
    needed |= {query.ids + candidate[:i] for candidate in query.candidates for i in range(1, len(candidate))}
    if at == "label0":
        first = query.candidates[0]
        needed |= {query.ids + first[: i + 1] for i in range(len(first))}
    nodes = [spelt(tree, node) for node in range(len(tree.ids))]
    assert len(nodes) == len(set(nodes))
    assert set(nodes) == needed
    single = all(len(candidate) == 1 for candidate in query.candidates) and at == "prompt"
    assert not single or tree.chain


@FAST
@given(st.lists(QUERIES, min_size=1, max_size=5), AT)
def test_a_pack_says_where_everything_is(queries: list[Query], at) -> None:
    trees = [grow(query, at) for query in queries]
    row = pack(trees, [7 + i for i in range(len(trees))])
    total = sum(len(tree.ids) for tree in trees)
    assert row.members == tuple(range(7, 7 + len(trees)))
    assert row.ids.tolist() == [token for tree in trees for token in tree.ids]
    assert row.slots.flatten()[row.cells].tolist() == list(range(total))
    starts = [sum(len(tree.ids) for tree in trees[:i]) for i in range(len(trees))]
    for i, tree in enumerate(trees):
        size = len(tree.ids)
        own = range(starts[i], starts[i] + size)
        assert row.slots[i, :size].tolist() == list(own)
        assert set(row.slots[i].tolist()) == set(own), "padding stays with its own query"
        assert [int(row.depth[t]) for t in own] == [len(spelt(tree, node)) - 1 for node in range(size)]
        assert int(row.columns[i]) == len(tree.path)
        assert row.own[i, : len(tree.path)].tolist() == [starts[i] + node for node in tree.path]
        assert int(row.record[i]) == starts[i] + tree.path[-1]
        assert int(row.read[row.first_read[i]]) == starts[i] + len(queries[i].ids) - 1
        for a in range(size):
            for b in range(size):
                above = spelt(tree, a)[: len(spelt(tree, b))] == spelt(tree, b)
                seen = b <= a if row.ancestors is None else bool(row.ancestors[i, a, b])
                assert seen == above
    if row.ancestors is not None:
        assert row.ancestors.any(-1).all(), "even padding sees something, or its softmax would be empty"


@FAST
@given(st.lists(QUERIES, min_size=1, max_size=5), AT)
def test_a_pack_scores_every_token_of_every_candidate(queries: list[Query], at) -> None:
    trees = [grow(query, at) for query in queries]
    row = pack(trees, range(len(trees)))
    assert len(set(row.read.tolist())) == len(row.read), "each wanted row of logits once"
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for at_row, target, query, candidate in zip(
        row.read_row.tolist(),
        row.target.tolist(),
        row.scored_query.tolist(),
        row.scored_candidate.tolist(),
        strict=True,
    ):
        found.setdefault((query, candidate), []).append((int(row.depth[row.read[at_row]]), target))
    for i, query in enumerate(queries):
        for j, candidate in enumerate(query.candidates):
            right = [(len(query.ids) - 1 + place, token) for place, token in enumerate(candidate)]
            assert sorted(found[i, j]) == sorted(right)
    assert len(found) == sum(len(query.candidates) for query in queries)


@FAST
@given(
    st.lists(QUERIES, min_size=1, max_size=12),
    AT,
    st.integers(1, 30),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_a_plan_asks_everybody_within_its_budget(
    queries: list[Query], at, tokens: int, reads: int, most: int | None
) -> None:
    trees = [grow(query, at) for query in queries]
    packs = list(plan(trees, tokens=tokens, reads=reads, queries=most))
    assert sorted(member for row in packs for member in row.members) == list(range(len(trees)))
    for row in packs:
        assert row.ids.tolist() == [token for member in row.members for token in trees[member].ids]
        if len(row.members) > 1:
            assert len(row.ids) <= tokens
            assert len(row.read) <= reads
            assert most is None or len(row.members) <= most


def test_a_plan_of_nothing_is_empty() -> None:
    assert list(plan([], tokens=10, reads=10)) == []


def test_a_pack_moves_whole() -> None:
    row = pack([grow(Query((1, 2), ((3, 4), (3, 5)), 0))], [0])
    moved = row.to(torch.device("meta"))
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert all(value.device.type == "meta" for value in tensors) and moved.members == row.members
