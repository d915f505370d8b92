"""Fine-tuning beyond one rate on one architecture (for that, see equivalence/test_training): batches of rates,
divergence, precision, and what is left untouched."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zoo
from close import assert_close
from dualview.io.errors import UserError
from dualview.learning import finetune as module
from dualview.learning import recipe as recipe_module
from dualview.learning import training_step
from dualview.learning.batch import Step, Watch
from dualview.learning.finetune import finetune, train
from dualview.learning.recipe import Rule, Training, TrainingRecipe, steps_of
from dualview.learning.weight_patches import Deltas, Parameters
from dualview.models.loading import adopt
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import TrainingSequence
from equivalence import cases, training
from live_bytes import LiveBytes

RATES = (0.001, 0.01, 0.03)


def deltas(patch: object) -> Deltas:
    assert isinstance(patch, Deltas)
    return patch


def same_deltas(a: Deltas, b: Deltas, tolerance: float = 1e-12) -> None:
    assert [p.name for p in a.projections] == [p.name for p in b.projections]
    for x, y in zip(a.weights, b.weights, strict=True):
        assert cases.worst(x, y) < tolerance
    for x, y in zip(a.biases, b.biases, strict=True):
        assert (x is None) == (y is None)
        assert x is None or cases.worst(x, y) < tolerance


@pytest.mark.parametrize("rule", ["sgd", "layer-causal"])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gemma2-softcap", "gpt_oss-sinks", "mixtral", "bloom", "lfm2-hybrid"]
)
def test_rates_together_are_rates_apart(name: str, rule) -> None:
    lm, recipe = cases.lm(name), TrainingRecipe(rule=rule)
    together = finetune(lm, cases.SEQUENCES, RATES, recipe)
    assert [tuned.lr for tuned in together] == list(RATES)
    for rate, tuned in zip(RATES, together, strict=True):
        [alone] = finetune(lm, cases.SEQUENCES, [rate], recipe)
        assert cases.worst(tuned.losses, alone.losses) < 1e-12
        assert tuned.status == alone.status == "ok"
        same_deltas(deltas(tuned.patch), deltas(alone.patch))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "lfm2-hybrid"])
def test_a_diverging_rate_is_told_and_harms_nobody(name: str) -> None:
    lm = cases.lm(name)
    mild = finetune(lm, cases.SEQUENCES, RATES)
    wild = finetune(lm, cases.SEQUENCES, (RATES[0], 1e300, *RATES[1:]))
    assert [tuned.status for tuned in wild] == ["ok", "diverged", "ok", "ok"]
    # LFM2 norms its keys: its loss stays finite, and only the gradients give the divergence away.
    assert name == "lfm2-hybrid" or not math.isfinite(wild[1].losses[-1])
    assert wild[1].losses[0] == wild[0].losses[0], "before the first step they are one model"
    for a, b in zip([wild[0], *wild[2:]], mild, strict=True):
        assert cases.worst(a.losses, b.losses) < 1e-12
        same_deltas(deltas(a.patch), deltas(b.patch))


def test_a_huge_rate_with_finite_losses_is_as_finite_as_alone() -> None:
    """At 1e6 the norms keep the loss of this model finite: by the contract that is no divergence, but it is contagious
    to no neighbour either."""
    lm = cases.lm("llama")
    found = finetune(lm, cases.SEQUENCES, (0.01, 1e6))
    [alone] = finetune(lm, cases.SEQUENCES, (0.01,))
    same_deltas(deltas(found[0].patch), deltas(alone.patch))
    assert all(math.isfinite(loss) for loss in found[1].losses)
    scores = ask(lm, cases.QUERIES, PassPlan((cases.BOS,), 1), found[0].patch).settings[0].log_probs
    right = ask(lm, cases.QUERIES, PassPlan((cases.BOS,), 1), alone.patch).settings[0].log_probs
    assert cases.worst(np.exp(scores), np.exp(right)) < 1e-12


def test_training_everything_reports_divergence_too() -> None:
    [tuned] = finetune(cases.lm("llama"), cases.SEQUENCES, [1e300], TrainingRecipe("all"))
    assert tuned.status == "diverged"
    assert not math.isfinite(tuned.losses[-1])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_groups_of_rates_make_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = cases.lm(name)
    whole = finetune(lm, cases.SEQUENCES, RATES)
    monkeypatch.setitem(module._LOGIT_BYTES, "cpu", 1)  # one rate at a time
    for a, b in zip(finetune(lm, cases.SEQUENCES, RATES), whole, strict=True):
        same_deltas(deltas(a.patch), deltas(b.patch))


def test_rate_zero_changes_nothing_and_a_negative_one_climbs() -> None:
    lm = cases.lm("llama")
    still, down, up = finetune(lm, cases.SEQUENCES[:1] * 3, (0.0, 0.01, -0.01))
    assert not any(weight.any() for weight in deltas(still.patch).weights)
    assert len(set(still.losses)) == 1
    assert down.losses[0] > down.losses[1] > down.losses[2]
    assert up.losses[0] < up.losses[1] < up.losses[2]
    base = ask(lm, cases.QUERIES, PassPlan((cases.BOS,), 1)).settings[0].log_probs
    worn = ask(lm, cases.QUERIES, PassPlan((cases.BOS,), 1), still.patch).settings[0].log_probs
    assert_close(base, worn)


def test_steps_follow_the_prompts_order_again_each_epoch() -> None:
    assert steps_of(cases.SEQUENCES, TrainingRecipe(epochs=2)) == [*cases.SEQUENCES, *cases.SEQUENCES]
    lm = cases.lm("llama")
    [forward] = finetune(lm, cases.SEQUENCES, [0.03])
    [backward] = finetune(lm, cases.SEQUENCES[::-1], [0.03])
    right = training.train(cases.model("llama"), "llama", cases.SEQUENCES[::-1], 0.03)
    assert cases.worst(backward.losses, right.losses) < cases.EXACT
    assert cases.worst(deltas(forward.patch).weights[0], deltas(backward.patch).weights[0]) > 1e-6, "order matters"


def test_the_watched_signals_are_the_update() -> None:
    """ΔW = −lr Σ g_t x_tᵀ, Δb = −lr Σ g_t: what a watch receives adds up to the change."""
    lm, rate = cases.lm("qwen2-bias"), 0.02
    total: dict[str, torch.Tensor] = {}
    bias: dict[str, torch.Tensor] = {}

    def keep(step: Step) -> None:
        for (index, x, _), g in zip(step.tape.calls, step.signals, strict=True):
            assert x.shape[:2] == g.shape[:2]
            name = step.tape.projections[index].name
            total[name] = total.get(name, 0.0) - rate * torch.einsum("tr,td->rd", g[0], x[0])
            bias[name] = bias.get(name, 0.0) - rate * g[0].sum(0)

    [tuned] = finetune(lm, cases.SEQUENCES[:2], [rate], watch=Watch(keep))
    patch = deltas(tuned.patch)
    for index, projection in enumerate(patch.projections):
        assert cases.worst(patch.weights[index][0], total[projection.name]) < 1e-12
        mine = patch.biases[index]
        assert mine is not None and cases.worst(mine[0], bias[projection.name]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "codegen"])
def test_a_narrow_model_can_be_trained_on_a_float32_copy(name: str, dtype: torch.dtype) -> None:
    narrow = zoo.make(name, dtype=dtype)
    before = {key: value.clone() for key, value in narrow.state_dict().items()}
    lm = adopt(narrow, None, name)
    [tuned] = finetune(lm, cases.SEQUENCES, [0.01], TrainingRecipe(precision="float32"))
    patch = deltas(tuned.patch)
    assert all(weight.dtype == torch.float32 for weight in patch.weights)
    assert narrow.dtype == dtype
    assert all(torch.equal(value, before[key]) for key, value in narrow.state_dict().items())
    # The patch is applied to the narrow model itself, not to the copy that was trained.
    own = set(narrow.modules())
    assert all(projection.module in own for projection in patch.projections)
    wide = zoo.make(name, dtype=dtype).float()
    [same] = finetune(adopt(wide, None, name), cases.SEQUENCES, [0.01])
    same_deltas(patch, deltas(same.patch), tolerance=1e-7)
    base = ask(lm, cases.QUERIES, PassPlan((cases.BOS,), 1)).settings[0].log_probs
    worn = ask(lm, cases.QUERIES, PassPlan((cases.BOS,), 1), patch).settings[0].log_probs
    assert cases.worst(np.exp(base), np.exp(worn)) > 1e-6
    # Every parameter: the narrow model uses them in its own precision.
    [everything] = finetune(lm, cases.SEQUENCES[:1], [0.01], TrainingRecipe("all"))
    assert isinstance(everything.patch, Parameters)
    assert all(value.dtype == dtype for value in everything.patch.values.values())
    assert all(torch.equal(value, before[key]) for key, value in narrow.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "codegen"])
def test_a_narrow_model_is_trained_without_a_copy(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = adopt(zoo.make(name, dtype=dtype), None, name)
    [copied] = finetune(lm, cases.SEQUENCES, [0.01], TrainingRecipe(precision="float32"))
    monkeypatch.setattr(recipe_module.copy, "deepcopy", lambda _: pytest.fail("the model was copied"))
    [tuned] = finetune(lm, cases.SEQUENCES, [0.01])
    patch = deltas(tuned.patch)
    assert all(weight.dtype == torch.float32 for weight in patch.weights)
    # Errors of a half-precision pass are independent from token to token: the updates point the same way.
    for x, y in zip(patch.weights, deltas(copied.patch).weights, strict=True):
        assert torch.cosine_similarity(x.flatten(), y.flatten(), dim=0) > 0.99


def test_training_takes_memory_for_the_changes_and_not_for_the_model() -> None:
    """A deep model in bfloat16: a float32 copy would take twice its weights, and the gradient of all of them once."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 1024}
    config = LlamaConfig(vocab_size=zoo.VOCAB, num_hidden_layers=24, **shape)
    lm = adopt(LlamaForCausalLM(config).to(torch.bfloat16), None, "deep")
    weights = sum(p.numel() * p.element_size() for p in lm.model.parameters())
    changes = sum(4 * p.d_out * p.d_in for p in lm.anatomy.projections(("k", "v")))
    with LiveBytes() as live:
        finetune(lm, cases.SEQUENCES, [0.01, 0.02])
    assert live.peak < 2 * changes + 0.5 * weights
    with LiveBytes() as copied:
        finetune(lm, cases.SEQUENCES, [0.01, 0.02], TrainingRecipe(precision="float32"))
    assert copied.peak > 2 * weights


@pytest.mark.parametrize("rule", ["sgd", "layer-causal", "linearised"])
@pytest.mark.parametrize("loss", ["all", "label"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-bias", "mixtral"])
def test_trainings_together_are_trainings_apart(name: str, loss: Any, rule: Any) -> None:
    """Rows that differ in rate, order, labels, lengths and number of steps."""
    lm, recipe = cases.lm(name), TrainingRecipe(loss=loss, rule=rule, epochs=2)
    shown = cases.SEQUENCES
    other = [TrainingSequence((*s.ids[:-1], (s.ids[-1] + 1) % 90), s.label_start) for s in shown]
    longer = [TrainingSequence((*s.ids, *s.ids[1:4]), s.label_start) for s in shown[:2]]
    rows = [(shown, 0.01), (shown, -0.01), (shown[::-1], 0.01), (other, 0.02), (longer, 0.01), (shown[:1], 0.03)]
    trainings = [Training(tuple(sequences), rate) for sequences, rate in rows]
    for each, tuned in zip(trainings, train(lm, trainings, recipe), strict=True):
        [alone] = train(lm, [each], recipe)
        assert len(tuned.losses) == 2 * len(each.sequences)
        assert cases.worst(tuned.losses, alone.losses) < 1e-12
        same_deltas(deltas(tuned.patch), deltas(alone.patch), tolerance=1e-11)


def test_lengths_are_not_mixed_where_positions_depend_on_them() -> None:
    lm = cases.lm("llama")
    trainings = [
        Training(cases.SEQUENCES, 0.01),
        Training(cases.SEQUENCES[::-1], 0.01),
        Training(cases.SEQUENCES, 0.02),
    ]
    assert [len(batch) for batch in module.batches(lm, trainings, TrainingRecipe())] == [3]
    scaled = replace(lm, slow_because="its positions are scaled by length")
    assert [len(batch) for batch in module.batches(scaled, trainings, TrainingRecipe())] == [1, 1, 1]
    assert [len(batch) for batch in module.batches(scaled, trainings[::2], TrainingRecipe())] == [2]


@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf])
def test_a_rate_must_be_a_number(rate: float) -> None:
    with pytest.raises(UserError, match="learning rate"):
        finetune(cases.lm("llama"), cases.SEQUENCES, [rate])


def test_there_must_be_an_epoch() -> None:
    with pytest.raises(UserError, match="--epochs"):
        finetune(cases.lm("llama"), cases.SEQUENCES, [0.01], TrainingRecipe(epochs=0))


def test_progress_counts_every_step_of_every_rate() -> None:
    seen: list[int] = []
    finetune(cases.lm("gpt2"), cases.SEQUENCES, RATES, TrainingRecipe(epochs=2), seen.append)
    assert sum(seen) == len(RATES) * len(cases.SEQUENCES) * 2


def test_error_signals_of_one_shape_are_handled_together() -> None:
    draw = torch.Generator().manual_seed(0)
    signals = [torch.randn(2, 3, width, generator=draw) for width in (4, 5, 4, 4)]
    together = training_step.stacked(signals)
    assert [numbers for numbers, _ in together] == [[0, 2, 3], [1]]
    for numbers, stack in together:
        assert all(torch.equal(own, signals[number]) for number, own in zip(numbers, stack, strict=True))
    signals[2][1, 0, 0] = float("inf")
    stacks = [stack for _, stack in training_step.stacked(signals)]
    assert training_step.finite(torch.zeros(2), stacks).tolist() == [True, False]


@pytest.mark.parametrize("rule", ["sgd", "layer-causal"])
def test_large_error_signals_are_handled_one_by_one(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, recipe = cases.lm("qwen2-bias"), TrainingRecipe(rule=rule)
    trainings = [Training(cases.SEQUENCES, rate) for rate in (0.01, 1e300, 0.05)]
    together = train(lm, trainings, recipe)
    monkeypatch.setattr(training_step, "_STACK_BYTES", 0)
    apart = train(lm, trainings, recipe)
    for one, other in zip(together, apart, strict=True):
        assert one.status == other.status
        if one.status == "ok":
            same_deltas(deltas(one.patch), deltas(other.patch))
    assert [tuned.status for tuned in apart] == ["ok", "diverged", "ok"]
