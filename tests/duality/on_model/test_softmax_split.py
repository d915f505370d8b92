"""Heads of real architectures: the softmax split, both updates in weight space, and the meta-gradients."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import zoo
from dualview.analyses.heads import head_report
from dualview.duality.on_model.demo_tokens import demo_tokens
from dualview.duality.on_model.meta_gradients import TokenVectors, compare_meta_gradients, token_vectors
from dualview.duality.on_model.softmax_split import record_heads, split_heads
from dualview.duality.on_model.weight_space import compare_updates, tuned_on_base_states
from dualview.duality.theory.icl_as_update import FourTerms, state_weights
from dualview.io.errors import UserError
from dualview.learning.recipe import TrainingRecipe
from dualview.learning.traces import trace_training
from dualview.learning.weight_patches import Deltas
from dualview.models.loading import adopt
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import Demo, PromptSet, Query
from equivalence import reference
from equivalence.cases import lm as zoo_lm
from equivalence.cases import tokens, twin, worst

DEMOS = tuple(Demo(tokens(4 + i, i), tokens(1 + i % 2, 50 + i), tokens(1, 99)) for i in range(4))
QUERY = Query(tokens(4, 77), ((5,), (6, 7)), 0)
PROMPTS = PromptSet(1, DEMOS, (QUERY,), 4)
IDS, PLACES = [*PROMPTS.prefix, *QUERY.ids], range(1, len(PROMPTS.prefix))


def trace_of(name, rate=0.01, **recipe):
    return trace_training(zoo_lm(name), PROMPTS.training_sequences, [rate], TrainingRecipe(**recipe))[0]


@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_the_split_is_exact_on_every_architecture(name):
    lm = zoo_lm(name)
    layers = record_heads(lm, IDS)
    found = split_heads(layers, PLACES)
    assert len(layers) == len(lm.anatomy.layers) and max(found.error) < 1e-12
    asked = ask(lm, [QUERY], PassPlan(PROMPTS.prefix, 1)).settings[0].demo_mass
    assert asked is not None and worst(found.mass.numpy(), asked[0]) < 1e-9
    for layer in layers:
        masses = layer.weights().sum(-1)
        assert (masses < 1.0).all() if layer.rule.sinks is not None else torch.allclose(masses, torch.ones_like(masses))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2-softcap", "gpt_oss-sinks", "bloom", "mistral-window"])
def test_weights_are_those_of_the_slow_reference(name):
    slow = reference.run(twin(name), IDS).layers
    for layer, seen in zip(record_heads(zoo_lm(name), IDS), slow, strict=True):
        assert worst(layer.weights(), seen.weights[:, -1]) < 1e-9


def test_bad_places_are_refused():
    layers = record_heads(zoo_lm("llama"), IDS)
    for places in (range(3, 3), range(len(IDS)), range(-2, 3)):
        with pytest.raises(UserError, match="places of both"):
            split_heads(layers, places)


def update_of(layer):
    """ΔW_ICL of the demonstrations, one matrix for each key/value head."""
    return state_weights(*(x[:, PLACES.start : PLACES.stop].mT for x in (layer.k, layer.v)))


def test_state_weights_are_the_sum_of_outer_products():
    layer = record_heads(zoo_lm("qwen3-qk-norm"), IDS)[1]
    slow = torch.zeros(2, 8, 8, dtype=torch.float64)
    for head in range(2):
        for place in PLACES:
            slow[head] += torch.outer(layer.v[head, place], layer.k[head, place])
    assert torch.allclose(update_of(layer), slow, atol=1e-12)


def test_tuned_keys_and_values_read_the_base_states():
    """By hand for Llama: what each layer's projections read in a plain pass, tuned, and rotated at its position."""
    lm, trace = zoo_lm("llama"), trace_of("llama")
    patch = trace.tuned.patch
    assert isinstance(patch, Deltas)
    start = len(PROMPTS.prefix)
    positions = torch.tensor([[0, *range(start, start + len(QUERY.ids))]])
    reads: list[torch.Tensor] = []
    model = copy.deepcopy(lm.model)
    for block in model.model.layers:
        block.input_layernorm.register_forward_hook(lambda _m, _i, out: reads.append(out[0].detach()))
    mask = torch.ones_like(positions)  # said outright, or the gap in the positions would look like a new sequence
    model(torch.tensor([[1, *QUERY.ids]]), position_ids=positions, attention_mask=mask)
    cos, sin = model.model.rotary_emb(reads[0][None], positions)
    change = {p.name: w[0] for p, w in zip(patch.projections, patch.weights, strict=True)}
    states = tuned_on_base_states(lm, patch, [1], QUERY.ids, start)
    for number, (x, found) in enumerate(zip(reads, states, strict=True)):
        attention = model.model.layers[number].self_attn
        for tuned, keys, values in (
            (0.0, found.base_keys, found.base_values),
            (1.0, found.tuned_keys, found.tuned_values),
        ):
            name = f"model.layers.{number}.self_attn"
            k = x @ (attention.k_proj.weight + tuned * change[f"{name}.k_proj"]).T
            v = x @ (attention.v_proj.weight + tuned * change[f"{name}.v_proj"]).T
            k, v = (t.view(-1, 2, 8).transpose(0, 1) for t in (k, v))
            k = apply_rotary_pos_emb(k[None], k[None], cos, sin)[0][0]
            assert worst(keys.detach(), k.detach()) < 1e-6 and worst(values.detach(), v.detach()) < 1e-6
        terms = found.four_terms()
        whole = found.tuned_values.mT @ found.tuned_keys
        assert torch.allclose(terms.total, whole, atol=1e-12)
        assert torch.allclose(terms.base + terms.delta, whole, atol=1e-12)


def test_the_same_update_has_cosine_one_and_its_shuffle_less():
    layers = record_heads(zoo_lm("llama"), IDS)

    class Same:
        def __init__(self, layer):
            self.layer = layer

        def four_terms(self):
            update = update_of(self.layer)
            return FourTerms(base=update, from_key=0 * update, from_value=2.0 * update, cross=0 * update)

        def rounding(self):
            return torch.zeros(len(self.layer.k))

    found = compare_updates(layers, PLACES, [Same(layer) for layer in layers], rank=2)
    for values, aim in (
        (found.cosine, 1.0),
        (found.left_overlap, 1.0),
        (found.right_overlap, 1.0),
        (found.norm_ratio, 0.5),
        (found.from_value, 1.0),
        (found.from_key, 0.0),
    ):
        assert values == pytest.approx([aim] * 3, abs=1e-9)
    assert all(floor < 0.9 for floor in found.cosine_floor) and all(sd > 0 for sd in found.cosine_floor_sd)
    assert found.stable_rank_icl == pytest.approx(found.stable_rank_ft)
    again = compare_updates(layers, PLACES, [Same(layer) for layer in layers], rank=2)
    assert again == found


def test_shared_tokens_are_the_same_tokens_on_both_sides():
    shared = demo_tokens(PROMPTS)
    assert len(shared) == sum(len(demo.template) + len(demo.label) for demo in DEMOS)
    for i, token in enumerate(shared.ids.tolist()):
        assert PROMPTS.prefix[shared.place[i]] == token
        assert PROMPTS.training_sequences[shared.demo[i]].ids[shared.position[i]] == token
    assert [int(n) for n in shared.label.sum()[None]] == [sum(len(demo.label) for demo in DEMOS)]


@pytest.mark.parametrize("epochs", [1, 3])
def test_values_come_from_training_summed_over_epochs(epochs):
    trace, shared = trace_of("llama", epochs=epochs), demo_tokens(PROMPTS)
    values = torch.randn(len(trace.tokens.step), 2, dtype=torch.float64)
    found = shared.from_training(values, trace.tokens)
    slow = torch.zeros_like(found)
    for i in range(len(shared)):
        for t in range(len(values)):
            if trace.tokens.demo[t] == shared.demo[i] and trace.tokens.position[t] == shared.position[i]:
                slow[i] += values[t]
    assert torch.allclose(found, slow)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "falcon-groups"])
def test_both_vectors_of_a_token(name):
    """W_V x' from Hugging Face's hidden states; e from the gradient of the first step, at the base weights."""
    lm, shared = zoo_lm(name), demo_tokens(PROMPTS)
    vectors = token_vectors(lm, trace_of(name), IDS, shared)
    layer = lm.anatomy.layers[1]
    (projection,) = layer.projections["v"]
    model = copy.deepcopy(lm.model).requires_grad_(False)
    module, outputs = model.get_submodule(projection.name), []
    module.weight.requires_grad_()
    module.register_forward_hook(lambda _m, _i, out: (out.retain_grad(), outputs.append(out))[0])
    rows = slice(None) if projection.rows is None else projection.rows
    model(torch.tensor([IDS]))
    assert worst(vectors[1].meta.T, outputs[0][0, shared.place][:, rows].detach()) < 1e-6
    first = torch.tensor([PROMPTS.training_sequences[0].ids])
    torch.nn.functional.cross_entropy(model(first).logits[0, :-1], first[0, 1:]).backward()
    error = -0.01 * outputs[1].grad[0][:, rows]
    own = shared.demo == 0
    assert worst(vectors[1].error.T[own], error[shared.position[own]]) < 1e-8
    assert vectors[1].error.T[own].abs().max() > 1e-5


@given(d=st.integers(4, 10), n=st.integers(12, 40), seed=st.integers(0, 999))
@settings(max_examples=15, deadline=None)
def test_known_answers_of_the_meta_gradients(d, n, seed):
    generator = torch.Generator().manual_seed(seed)
    meta = torch.randn(d, n, generator=generator, dtype=torch.float64)
    turn, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    same = compare_meta_gradients([TokenVectors(meta, 3 * meta)], rank=3, seed=seed)
    turned = compare_meta_gradients([TokenVectors(meta, turn @ meta)], rank=3, seed=seed)
    opposite = compare_meta_gradients([TokenVectors(meta, -meta)], rank=3, seed=seed)
    assert same.cosine[0] == pytest.approx(1) and same.overlap[0] == pytest.approx(1)
    assert turned.cka[0] == pytest.approx(1) and turned.token_overlap[0] == pytest.approx(1)
    assert opposite.cosine[0] == pytest.approx(-1)
    assert same.cosine_floor[0] < 0.95 and same.token_overlap_floor[0] < 0.95 and same.cka_floor[0] < 0.99
    other = torch.randn(d, n, generator=generator, dtype=torch.float64)
    apart = compare_meta_gradients([TokenVectors(meta, other)], rank=3)
    for found, (a, b) in ((apart.overlap, (meta, other)), (apart.token_overlap, (meta.T, other.T))):
        bases = (np.linalg.svd(x.numpy())[0][:, :3] for x in (a, b))
        assert found[0] == pytest.approx(float((np.cos(scipy.linalg.subspace_angles(*bases)) ** 2).mean()))


def test_a_layer_without_an_update_is_null():
    layers = record_heads(zoo_lm("llama"), IDS)
    still = tuned_on_base_states(zoo_lm("llama"), trace_of("llama", rate=0.0).tuned.patch, [1], QUERY.ids, 30)
    found = compare_updates(layers, PLACES, still).to_json()
    assert found["cosine"] == found["cosine_floor"] == found["cross"] == [None] * 3 and found["rank"] == 8


def rounded(states, relative):
    """The same keys and values, the tuned ones off by a relative change with random signs."""
    generator = torch.Generator().manual_seed(3)

    def off(x):
        signs = torch.randint(2, x.shape, generator=generator) * 2 - 1
        return x * (1 + relative * signs.to(x))

    return [replace(s, tuned_keys=off(s.base_keys), tuned_values=off(s.base_values)) for s in states]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_no_update_and_a_small_update_is_one(dtype):
    """Keys and values a few units apart are the same ones; a change a thousand times larger is not."""
    lm = adopt(copy.deepcopy(zoo_lm("llama").model).to(dtype), None, "llama")
    (trace,) = trace_training(lm, PROMPTS.training_sequences, [0.0], TrainingRecipe())
    states = tuned_on_base_states(lm, trace.tuned.patch, [1], QUERY.ids, 30)
    layers, eps = record_heads(lm, IDS), torch.finfo(dtype).eps
    assert compare_updates(layers, PLACES, rounded(states, 4 * eps)).to_json()["cosine"] == [None] * 3
    small = compare_updates(layers, PLACES, rounded(states, 4000 * eps)).to_json()
    assert all(isinstance(x, float) for x in small["cosine"])


def test_a_layer_without_errors_is_null():
    meta = torch.randn(4, 9, dtype=torch.float64)
    found = compare_meta_gradients([TokenVectors(meta, 0 * meta)])
    assert all(math.isnan(x) for x in (*found.cosine, *found.cka)) and found.to_json()["cosine"] == [None]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2-softcap", "lfm2-hybrid"])
def test_the_whole_report_is_json(name):
    report = head_report(zoo_lm(name), PROMPTS, trace_of(name), rank=3, shuffles=2)
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    layers = len(zoo_lm(name).anatomy.layers)
    assert len(content["weights"]["cosine"]) == len(content["meta_gradients"]["cka"]) == layers
    assert len(content["split"]["mass_per_layer"]) == layers and content["weights"]["shuffles"] == 2
    assert all(-1 <= x <= 1 for x in content["weights"]["cosine"])
