"""Subspaces of task and function vectors: against Hugging Face's states and plain passes, and the lab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualview.lab
from dualview.comparison.prepare import Prepared, prepare, selection_queries
from dualview.io.errors import UserError
from dualview.lab import harness
from dualview.lab.harness import LabResult
from dualview.lab.task_vectors import run as lab_run
from dualview.lab.task_vectors.report import figures, over, tables
from dualview.lab.task_vectors.run import task_vectors
from dualview.lab.task_vectors.subspaces import basis, estimate, head_effects, inside_and_outside, last_tokens
from dualview.metrics.cosine import overall_mean
from dualview.metrics.sim_aou import sim_aou
from dualview.models.loading import load_model
from dualview.options import RunOptions
from equivalence.tiny import save_model, save_task


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    save_model(folder / "model")
    save_task(folder / "task")
    save_task(folder / "other", name="other", template="{text} Sentiment:")
    return folder


@pytest.fixture(scope="module")
def several(place: Path) -> list[Prepared]:
    lm = load_model(str(place / "model"), dtype="float64", device="cpu")
    task = str(place / "task" / "tiny.yaml")
    given = {"model": lm.name, "task": task, "shots": 4, "n_queries": 3, "lr": 0.03, "dtype": "float64"}
    return [prepare(RunOptions.make(**given, seed=seed), lm) for seed in (7, 8)]


def test_states_are_those_of_hugging_face(several: list[Prepared]):
    lm, prompts = several[0].lm, several[0].prompts
    queries = selection_queries(several[0])[:3]
    found = last_tokens(lm, queries, prompts.prefix, len(prompts.zero_prefix))
    for i, query in enumerate(queries):
        ids = torch.tensor([[*prompts.prefix, *query.ids]])
        outputs: list[torch.Tensor] = []
        hooks = [
            block.self_attn.o_proj.register_forward_hook(lambda _m, _i, out, kept=outputs: kept.append(out[0, -1]))
            for block in lm.model.model.layers
        ]
        with torch.no_grad():
            states = lm.model(input_ids=ids, output_hidden_states=True).hidden_states
        for hook in hooks:
            hook.remove()
        for layer in range(2):  # the last of hidden_states is after the final norm
            torch.testing.assert_close(found.blocks[layer, i], states[layer + 1][0, -1], atol=1e-9, rtol=0)
        torch.testing.assert_close(found.outputs[:, i], torch.stack(outputs), atol=1e-9, rtol=0)
    for layer, block in enumerate(lm.model.model.layers):
        written = found.heads[layer].flatten(1) @ block.self_attn.o_proj.weight.T + block.self_attn.o_proj.bias
        torch.testing.assert_close(written, found.outputs[layer], atol=1e-9, rtol=0)


def test_a_heads_effect_is_that_of_a_pass_with_its_output_replaced(several: list[Prepared]):
    lm, prompts = several[0].lm, several[0].prompts
    queries = selection_queries(several[0])[:2]
    means = [torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    found = head_effects(lm, queries, prompts.prefix, means)
    assert found.shape == (12,)

    def probability(query: Any, layer: int | None, head: int) -> float:
        scores: list[float] = []
        last = len(prompts.prefix) + len(query.ids) - 1

        def replaced(_module: Any, inputs: Any) -> Any:
            x = inputs[0].clone()
            x[0, last, 8 * head : 8 * head + 8] = means[layer or 0][head]
            return (x,)

        hooks = []
        if layer is not None:
            hooks.append(lm.model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(replaced))
        for candidate in query.candidates:
            ids = torch.tensor([[*prompts.prefix, *query.ids, *candidate]])
            with torch.no_grad():
                rows = torch.log_softmax(lm.model(input_ids=ids).logits[0], -1)
            scores.append(float(np.mean([rows[last + t, token] for t, token in enumerate(candidate)])))
        for hook in hooks:
            hook.remove()
        p = np.exp(scores)
        return float((p / p.sum())[query.gold])

    for index in (0, 5, 11):
        layer, head = divmod(index, 4)
        slow = [probability(query, layer, head) - probability(query, None, 0) for query in queries]
        assert found[index] == pytest.approx(np.mean(slow), abs=1e-9)


def test_subspaces_are_orthonormal_and_span_their_vectors(several: list[Prepared]):
    made = estimate(several, 2, 4)
    for each in made.values():
        assert each.shape == (3, 32, 2)
        np.testing.assert_allclose(np.einsum("ldr,lds->lrs", each, each), np.eye(2)[None].repeat(3, 0), atol=1e-9)
    queries = selection_queries(several[0])[:4]
    bare = last_tokens(several[0].lm, queries, several[0].prompts.zero_prefix, 0)
    for one in several:
        behind = last_tokens(one.lm, queries, one.prompts.prefix, 1)
        vector = (behind.blocks - bare.blocks).mean(1).numpy()
        inside = np.einsum("ldr,lsr,ls->ld", made["task vectors"], made["task vectors"], vector)
        np.testing.assert_allclose(inside, vector, atol=1e-9)


def test_inside_and_outside_add_up_to_the_whole():
    """cos = √(s_icl s_ft) cos_inside + √((1 − s_icl)(1 − s_ft)) cos_outside, and planted parts are found."""
    rng = np.random.default_rng(0)
    zsl, icl, ft = rng.standard_normal((3, 5, 2, 9))
    bases = basis(torch.from_numpy(rng.standard_normal((2, 3, 9))), 3)
    found = inside_and_outside(icl - zsl, ft - zsl, bases)
    both = np.sqrt(found["icl"] * found["ft"]) * found["inside"]
    both = both + np.sqrt((1 - found["icl"]) * (1 - found["ft"])) * found["outside"]
    np.testing.assert_allclose(both, sim_aou(zsl, icl, ft), atol=1e-9)
    inside = np.einsum("qlr,ldr->qld", rng.standard_normal((5, 2, 3)), bases)
    planted = inside_and_outside(inside, inside + (icl - np.einsum("qld,ldr,lsr->qls", icl, bases, bases)), bases)
    np.testing.assert_allclose(planted["icl"], 1, atol=1e-9)
    np.testing.assert_allclose(planted["inside"], 1, atol=1e-9)
    assert (planted["ft"] < 1).all()


def _options(place: Path, **more: Any) -> dict[str, Any]:
    tasks = (str(place / "task" / "tiny.yaml"), str(place / "other" / "tiny.yaml"))
    return {
        "model": str(place / "model"), "tasks": tasks, "shots": 4, "n_queries": 5, "draws": 2, "rank": 2, "rows": 4,
        "device": "cpu", **more,
    }  # fmt: skip


def test_the_lab_on_a_tiny_model(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "_write_figures", lambda _figures, _folder: [])
    first = task_vectors(out=place / "out", **_options(place))
    again = dualview.lab.task_vectors(**_options(place))
    assert again.results == first.results
    read = LabResult.load(place / "out" / "task-vectors.json")
    assert read.lab == "task-vectors" and not list((place / "out").glob(".state-*"))
    assert read.provenance["command"].startswith("dualview lab task-vectors --seed 1 --device cpu")
    assert "\n\n".join(t.markdown() for t in tables(read)) in (place / "out" / "task-vectors.md").read_text()
    assert len(tables(read)[0].rows) == 12 and set(figures(read)) == {"task-vectors"}
    draws = next(iter(read.results["tasks"].values()))
    table = np.array([draw["split"]["whole"]["whole"]["queries"] for draw in draws], dtype=float)
    assert over(draws, "whole", "whole")["mean"] == pytest.approx(table.mean(), abs=1e-9)
    layers = np.array([draw["split"]["whole"]["whole"]["layers"] for draw in draws], dtype=float)
    assert overall_mean(table[0].T) == pytest.approx(layers[0].mean(), abs=1e-5)


def test_killed_between_draws_it_resumes(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "_write_figures", lambda _figures, _folder: [])
    split, done, estimated = lab_run._split, [], []

    def stopped(job: Any, lm: Any, task: str, seed: int, known: Any) -> dict[str, Any]:
        done.append(seed)
        if len(done) == 2:
            raise KeyboardInterrupt
        return split(job, lm, task, seed, known)

    monkeypatch.setattr(lab_run, "_split", stopped)
    monkeypatch.setattr(lab_run, "estimate", lambda *given: (estimated.append(1), estimate(*given))[1])
    with pytest.raises(KeyboardInterrupt):
        task_vectors(out=place / "stopped", **_options(place))
    resumed = task_vectors(out=place / "stopped", **_options(place))
    assert done == [1, 2, 2, 1, 2] and len(estimated) == 2
    assert resumed.results == task_vectors(**_options(place)).results


def test_reported_and_estimating_draws_are_disjoint(place: Path):
    settings = lab_run.TaskVectorsSettings.make(**_options(place, draws=3, seed=4))
    assert settings.all_seeds == [4, 5, 6] and settings.other_draws == [7, 8]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tasks": "movie"}, "--tasks"),
        ({"rank": 5, "rows": 4}, "--rank: 5 needs as many selection rows; --rows is 4"),
        ({"rank": 500, "rows": 500}, "selection rows; a rank of 500"),
        ({"tasks": ("nothing", "movie")}, "nothing"),
        ({"rank": 0}, "--rank"),
    ],
)
def test_mistakes_are_one_sentence(place: Path, given: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        task_vectors(out=place / "wrong", **_options(place, **given))
    assert not (place / "wrong").exists()
