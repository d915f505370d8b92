"""One patch for many queries, and task vectors: against closed forms, and against whole prompts of Hugging Face."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from dualview.duality.on_model.block_patches import ridge_map
from dualview.duality.on_model.context_patch import context_patch
from dualview.duality.on_model.feed_forward import feed_forwards
from dualview.duality.on_model.query_packing import branched, query_pack
from dualview.duality.on_model.shared_patch import fit_patch, in_context_aims
from dualview.duality.on_model.single_prompt import last_logits
from dualview.duality.on_model.task_vector import TaskVector, ask_with_vectors
from dualview.io.errors import UserError
from dualview.models.prefix import Prefix
from dualview.models.scoring import PassPlan, ask, compute_prefix
from dualview.tasks.prompts import Query
from equivalence.cases import QUERIES, tokens
from equivalence.cases import lm as zoo_lm

DEMOS = (1, *tokens(14, 0))
ASKED = [Query(tokens(3 + i % 3, 30 + i), ((5,), (6, 7)), 0) for i in range(5)]
LINEAR = ["llama", "qwen2-bias", "gpt2", "gpt_neox", "opt", "gptj", "falcon-groups", "bloom", "granite", "phi3-fused"]


def fitted(name, queries, ridge, bare=(1,)):
    lm = zoo_lm(name)
    places = feed_forwards(lm)
    with torch.no_grad():
        prefix = compute_prefix(lm, DEMOS, 1)
    return lm, fit_patch(lm, places, queries, bare, in_context_aims(lm, places, queries, prefix), ridge)


def gap(lm, query, patch=None, bare=(1,)):
    return float((last_logits(lm, [*bare, *query.ids], patch) - last_logits(lm, [*DEMOS, *query.ids])).abs().max())


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("bare", [(1,), ()])
def test_without_ridge_every_fitted_query_gets_its_in_context_logits(name, bare):
    lm, patch = fitted(name, ASKED, 0.0, bare)
    assert max(gap(lm, query, patch, bare) for query in ASKED) < 1e-9
    assert min(gap(lm, query, None, bare) for query in ASKED) > 0.1
    unseen = Query(tokens(5, 88), ((5,),), 0)
    assert gap(lm, unseen, patch, bare) > 1e-3  # it is no context


@pytest.mark.parametrize("name", ["llama", "gemma2-softcap", "olmo2"])
def test_one_query_is_the_context_patch(name):
    lm, patch = fitted(name, ASKED[:1], 0.0)
    exact = context_patch(lm, DEMOS, ASKED[0].ids, [1], token="every")
    other = [1, *ASKED[2].ids]
    assert torch.allclose(last_logits(lm, other, patch), last_logits(lm, other, exact), atol=1e-6)
    assert gap(lm, ASKED[0], patch) < 1e-9


@pytest.mark.parametrize("name", ["gemma2-softcap", "olmo2"])
def test_norms_at_the_end_are_fitted_as_well_as_they_can_be(name):
    lm, patch = fitted(name, ASKED, 0.01)
    before = np.mean([gap(lm, query) for query in ASKED])
    assert np.mean([gap(lm, query, patch) for query in ASKED]) < 0.8 * before


def test_a_patch_works_in_ask_with_packs_and_prefixes():
    lm, patch = fitted("gpt2", ASKED, 0.0)
    scores = ask(lm, ASKED, PassPlan((1,), 1, record=False), patch).settings[0].log_probs
    aim = ask(lm, ASKED, PassPlan(DEMOS, 1, record=False)).settings[0].log_probs
    assert np.abs(scores[:, 0] - aim[:, 0]).max() < 1e-9  # single tokens: read at the fitted token alone
    assert ask(lm, ASKED, PassPlan((1,), 1, record=False)).settings[0].log_probs[0, 0] != pytest.approx(
        aim[0, 0], abs=1e-3
    )


def test_more_ridge_is_less_patch():
    lm = zoo_lm("llama")
    sizes = []
    for ridge in (0.01, 1.0, 100.0, 1e9):
        _, patch = fitted("llama", ASKED, ridge)
        sizes.append(float((last_logits(lm, [1, *ASKED[0].ids], patch) - last_logits(lm, [1, *ASKED[0].ids])).norm()))
    assert sizes[1] > sizes[2] > sizes[3] and sizes[3] < 1e-5


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 8),
    d_in=st.integers(1, 8),
    d_out=st.integers(1, 5),
    ridge=st.sampled_from([1e-3, 0.1, 1.0, 50.0]),
    seed=st.integers(0, 9999),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_ridge_map_solves_the_normal_equations(n, d_in, d_out, ridge, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(n, d_in, generator=generator, dtype=torch.float64)
    y = torch.randn(n, d_out, generator=generator, dtype=torch.float64)
    mu = ridge * x.square().sum(1).mean()
    primal = torch.linalg.solve(x.T @ x + mu * torch.eye(d_in, dtype=torch.float64), x.T @ y).T
    found = ridge_map(x, y, ridge)
    assert torch.allclose(found.left.T @ found.right, primal, rtol=1e-7, atol=1e-9 / scale)
    points = torch.randn(2, 3, d_in, generator=generator, dtype=torch.float64)
    assert torch.allclose(found(points), points @ primal.T, rtol=1e-7, atol=1e-8)


def test_ridge_map_takes_the_least_solution_of_equal_queries():
    x = torch.ones(3, 4, dtype=torch.float64)
    y = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    found = ridge_map(x, y, 0.0)
    assert torch.allclose(found.left.T @ found.right, torch.full((1, 4), 0.5, dtype=torch.float64))


def slow_vector(lm, ids, candidate, vector, at):
    """Hugging Face's own forward with one block's output overwritten at one token."""

    def put(_module, _inputs, output):
        states = (output[0] if isinstance(output, tuple) else output).clone()
        states[0, at] = vector.state
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handle = lm.anatomy.blocks[vector.layer].register_forward_hook(put)
    try:
        with torch.no_grad():
            scores = torch.log_softmax(lm.model(torch.tensor([[*ids, *candidate]])).logits[0], -1)
    finally:
        handle.remove()
    return np.mean([float(scores[len(ids) - 1 + i, token]) for i, token in enumerate(candidate)])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2-softcap", "gptj"])
def test_many_task_vectors_at_once_are_each_alone(name):
    lm = zoo_lm(name)
    draw = torch.Generator().manual_seed(1)
    vectors = [TaskVector(layer, torch.randn(32, generator=draw, dtype=torch.float64)) for layer in (0, 2, 1, 2)]
    found = ask_with_vectors(lm, QUERIES, [1], vectors)
    for v, vector in enumerate(vectors):
        for q, query in enumerate(QUERIES):
            for c, candidate in enumerate(query.candidates):
                slow = slow_vector(lm, [1, *query.ids], candidate, vector, len(query.ids))
                assert found[v, q, c] == pytest.approx(slow, abs=1e-5)
            assert np.isinf(found[v, q, len(query.candidates) :]).all()


def test_without_bos_a_query_of_one_token_can_carry_a_vector():
    lm = zoo_lm("gpt2")
    query, vector = QUERIES[2], TaskVector(1, torch.ones(32, dtype=torch.float64))
    found = ask_with_vectors(lm, [query], [], [vector, vector])
    slow = slow_vector(lm, query.ids, query.candidates[1], vector, 0)
    assert found[:, 0, 1] == pytest.approx([slow, slow], abs=1e-9)


@given(copies=st.integers(1, 5), index=st.integers(0, len(QUERIES) - 1))
def test_branched_trees(copies, index):
    query = QUERIES[index]
    tree = branched(query, copies)
    assert len(tree.reads) == copies * len(query.candidates)
    for number, read in enumerate(tree.reads):
        copy, candidate = divmod(number, len(query.candidates))
        assert tuple(token for _, token in read) == query.candidates[candidate]
        path, node = [], read[-1][0]
        while node >= 0:
            path.append(node)
            node = tree.parents[node]
        chain = path[::-1]
        assert tuple(tree.ids[n] for n in chain) == query.ids + query.candidates[candidate][:-1]
        assert [tree.depth[n] for n in chain] == list(range(len(chain)))
        assert chain[len(query.ids) - 1] == len(query.ids) - 1 + copy == read[0][0]


def test_what_cannot_be_fitted_is_refused():
    lm = zoo_lm("llama")
    with pytest.raises(UserError, match="ridge"):
        fit_patch(lm, feed_forwards(lm), ASKED, [1], (), -1.0)
    with pytest.raises(UserError, match="at least one"):
        fit_patch(lm, feed_forwards(lm), [], [1], (), 1.0)
    hybrid = zoo_lm("lfm2-hybrid")
    with pytest.raises(UserError, match="packed"):
        query_pack(hybrid, ASKED, Prefix(0))
    with pytest.raises(UserError, match="packed"):
        ask_with_vectors(hybrid, ASKED, [1], [])
    assert set(LINEAR) <= set(zoo.ZOO)
