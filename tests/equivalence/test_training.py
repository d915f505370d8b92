"""Fine-tuning of every architecture against autograd and a handwritten SGD on an untouched copy, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zoo
from dualview.io.errors import UserError
from dualview.learning.finetune import finetune
from dualview.learning.recipe import TrainingRecipe, Tuned
from dualview.learning.weight_patches import Deltas, Parameters
from dualview.models.scoring import PassPlan, ask
from equivalence import cases, reference, training

RATE = 0.03
EVERY = [*zoo.ZOO, *(name for name in cases.MORE if name != "minicpm3-latent")]  # its maps are not k_proj and v_proj


def state(name: str) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in cases.model(name).state_dict().items()}


def check_projections(name: str, tuned: Tuned, right: training.Trained, params: str) -> None:
    """Exactly the expected rows have changed, and by exactly what autograd says."""
    model, rows = cases.model(name), training.expected_rows(name, cases.model(name), params)
    assert isinstance(tuned.patch, Deltas)
    found = {projection.name: index for index, projection in enumerate(tuned.patch.projections)}
    assert set(found) == set(rows)
    for module, index in found.items():
        projection = tuned.patch.projections[index]
        width = projection.weight().shape[0] if projection.rows is None else None
        own = list(range(width)) if width is not None else projection.rows.tolist()  # pyright: ignore
        assert own == rows[module]
        weight, bias = training.change_of(model, right.model, module, own)
        assert float(weight.abs().max()) > 1e-7, "nothing was learnt, so nothing is tested"
        assert cases.worst(tuned.patch.weights[index][0], weight) < cases.EXACT
        mine = tuned.patch.biases[index]
        assert (mine is None) == (bias is None)
        if mine is not None:
            assert cases.worst(mine[0], bias) < cases.EXACT
    assert cases.worst(tuned.losses, right.losses) < cases.EXACT
    assert tuned.status == "ok"


@pytest.mark.parametrize("name", EVERY)
def test_sgd_on_keys_and_values(name: str) -> None:
    before = state(name)
    [tuned] = finetune(cases.lm(name), cases.SEQUENCES, [RATE])
    assert all(torch.equal(value, before[key]) for key, value in cases.model(name).state_dict().items())
    right = training.train(cases.model(name), name, cases.SEQUENCES, RATE)
    check_projections(name, tuned, right, "kv")
    # And the tuned model answers as the trained copy does.
    got = ask(cases.lm(name), cases.QUERIES[:2], PassPlan((cases.BOS,), 1), tuned.patch).settings[0]
    assert got.h is not None and got.m is not None
    for i, query in enumerate(cases.QUERIES[:2]):
        answer = reference.answer(right.model, (cases.BOS,), 1, query.ids, query.candidates)["prompt"]
        assert cases.worst(got.log_probs[i, : len(query.candidates)], answer.log_probs) < cases.EXACT
        assert cases.worst(got.h[i], answer.h) < cases.EXACT
        assert cases.worst(got.m[i, :, :, : len(query.ids)], np.stack(answer.m)) < cases.EXACT


@pytest.mark.parametrize("name", EVERY)
def test_queries_too_with_the_labels_loss_for_two_epochs(name: str) -> None:
    some = cases.SEQUENCES[1:]
    [tuned] = finetune(cases.lm(name), some, [RATE], TrainingRecipe("qkv", "label", epochs=2))
    right = training.train(cases.model(name), name, some, RATE, params="qkv", loss="label", epochs=2)
    assert len(tuned.losses) == 2 * len(some)
    check_projections(name, tuned, right, "qkv")


@pytest.mark.parametrize("name", EVERY)
def test_values_alone(name: str) -> None:
    some = cases.SEQUENCES[:1]
    [tuned] = finetune(cases.lm(name), some, [RATE], TrainingRecipe("v"))
    check_projections(name, tuned, training.train(cases.model(name), name, some, RATE, params="v"), "v")


def test_layer_by_layer_says_what_it_cannot_follow() -> None:
    """GPT-BigCode reshapes the final norm's output to the shape of the input, so it cannot carry all layers at once."""
    with pytest.raises(UserError, match="layer-causal fine-tuning cannot follow GPTBigCode"):
        finetune(cases.lm("gpt_bigcode-mqa"), cases.SEQUENCES, [RATE], TrainingRecipe(rule="layer-causal"))


@pytest.mark.parametrize("name", [name for name in EVERY if "bigcode" not in name])
def test_layer_by_layer(name: str) -> None:
    some = cases.SEQUENCES[1:]
    [tuned] = finetune(cases.lm(name), some, [RATE], TrainingRecipe(rule="layer-causal"))
    right = training.train(cases.model(name), name, some, RATE, layer_causal=True)
    check_projections(name, tuned, right, "kv")


@pytest.mark.parametrize("name", EVERY)
def test_every_parameter(name: str) -> None:
    before = state(name)
    some = cases.SEQUENCES[1:]
    [tuned] = finetune(cases.lm(name), some, [RATE], TrainingRecipe("all"))
    assert all(torch.equal(value, before[key]) for key, value in cases.model(name).state_dict().items())
    right = training.train(cases.model(name), name, some, RATE, params="all")
    assert isinstance(tuned.patch, Parameters)
    for key, value in right.model.named_parameters():
        assert cases.worst(tuned.patch.values[key], value) < cases.EXACT, key
    assert cases.worst(tuned.losses, right.losses) < cases.EXACT
    query = cases.QUERIES[1]
    got = ask(cases.lm(name), [query], PassPlan(cases.DEMOS, 1), tuned.patch).settings[0]
    answer = reference.answer(right.model, cases.DEMOS, 1, query.ids, query.candidates)["prompt"]
    assert cases.worst(got.log_probs[0], answer.log_probs) < cases.EXACT
    assert all(torch.equal(value, before[key]) for key, value in cases.model(name).state_dict().items())
