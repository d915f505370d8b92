"""The exact model: its in-context learning is one gradient step, and `dualview run` sees that."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dualview
from dualview.cli.main import app
from dualview.io.errors import UserError
from dualview.models import exact as exact_module
from dualview.models.exact import ExactModel, exact

SMALL: dict[str, Any] = {"ft_loss": "label", "n_queries": 24, "device": "cpu", "controls": "none"}


@dataclass(frozen=True)
class Made:
    found: ExactModel
    lm: dualview.LanguageModel
    """In float64."""
    classes: int

    @property
    def task(self) -> str:
        return str(self.found.task)

    def features(self, ids: tuple[int, ...]) -> np.ndarray:
        """z = (u, u) of a word, from the embeddings alone: the entries that words use."""
        [word] = ids
        row = self.lm.model.get_input_embeddings().weight[word].detach().double().numpy()  # pyright: ignore
        u = row[:-1][np.abs(self.all_words()).max(0) > 0]
        return np.concatenate([u, u])

    def all_words(self) -> np.ndarray:
        weight = self.lm.model.get_input_embeddings().weight.detach().double().numpy()  # pyright: ignore
        return weight[3 + self.classes :, :-1]


def make(folder: Path, dtype: str = "float64", **options: Any) -> Made:
    found = exact(folder, **options)
    lm = dualview.load_model(str(folder), dtype=dtype, device="cpu")
    return Made(found, lm, options.get("classes", 4))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("exact") / "model")


def gradient_step(z: np.ndarray, gold: list[int], classes: int, rate: float) -> np.ndarray:
    """W after one step of gradient descent on the cross-entropy of softmax(W z), summed, by central differences."""

    def loss(w: np.ndarray) -> float:
        total = 0.0
        for row, label in zip(z, gold, strict=True):
            logits = w @ row
            total += float(np.log(np.exp(logits).sum()) - logits[label])
        return total

    w = np.zeros((classes, z.shape[1]))
    gradient = np.zeros_like(w)
    for at in np.ndindex(w.shape):
        move = np.zeros_like(w)
        move[at] = 1e-4
        # Fourth order: the error of the difference is then below 1e-14.
        gradient[at] = (8 * (loss(move) - loss(-move)) - (loss(2 * move) - loss(-2 * move))) / 12e-4
    return w - rate * gradient


def updates(case: Made, shots: int, seed: int = 1) -> tuple[Any, np.ndarray, np.ndarray]:
    """The prompts, what in-context learning adds to layer 1's output, and that output without demonstrations."""
    prompts = dualview.build_prompts(case.task, case.lm, shots=shots, seed=seed, n_queries=12)
    h = {name: dualview.ask(case.lm, prompts, name).settings[0].h for name in ("zsl", "icl")}
    assert h["zsl"] is not None and h["icl"] is not None
    assert np.array_equal(h["zsl"][:, 0], h["icl"][:, 0])  # the copying layer does nothing else
    return prompts, h["icl"][:, 1] - h["zsl"][:, 1], h["zsl"][:, 1]


@pytest.mark.parametrize(
    ("options", "shots"),
    [
        ({}, 1),
        ({}, 16),
        ({"features": 4, "classes": 4, "rate": 0.5, "seed": 3}, 7),
        ({"features": 9, "classes": 5, "rate": 1e-3}, 40),
    ],
)
def test_in_context_learning_is_one_gradient_step(options: dict[str, Any], shots: int, tmp_path: Path) -> None:
    case = make(tmp_path / "model", **options)
    prompts, changed, before = updates(case, shots)
    k, rate = case.classes, case.found.rate
    z = np.stack([case.features(demo.template) for demo in prompts.demos])
    gold = [demo.label[0] - 3 for demo in prompts.demos]
    w = gradient_step(z, gold, k, rate)
    features = z.shape[1] // 2
    for row, start, query in zip(changed, before, prompts.queries, strict=True):
        expected = w @ case.features(query.ids)
        assert np.abs(row[2 * features : 2 * features + k] - expected).max() < 1e-9 * max(1.0, rate * shots)
        assert np.abs(np.delete(row, range(2 * features, 2 * features + k))).max() < 1e-9
        assert np.linalg.norm(start) > 0.04 and not start[2 * features :].any()


def test_the_closed_form_of_the_gradient(made: Made) -> None:
    """−∂L/∂W = Σ e(y_i) z_iᵀ at W = 0, as the docstring says."""
    draw = np.random.default_rng(0)
    z, gold = draw.normal(size=(5, 3)), [0, 2, 1, 1, 3]
    e = np.eye(4)[gold] - 1 / 4
    assert np.allclose(gradient_step(z, gold, 4, 0.3), 0.3 * e.T @ z, atol=1e-10)


def test_one_demonstration_changes_w_v_as_the_closed_form_says(made: Made) -> None:
    prompts = dualview.build_prompts(made.task, made.lm, shots=1, n_queries=4)
    tuned = dualview.finetune(made.lm, prompts, lr=made.found.rate, loss="label")
    deltas: Any = tuned.patch
    change = {p.name: delta[0].numpy() for p, delta in zip(deltas.projections, deltas.weights, strict=True)}
    [demo] = prompts.demos
    z = made.features(demo.template)
    d, k = len(z) // 2, made.classes
    e = np.eye(k)[demo.label[0] - 3] - 1 / k
    values = change.pop("model.layers.1.self_attn.v_proj")
    assert np.abs(values[d : d + k, : 2 * d] - made.found.rate * np.outer(e, z)).max() < 1e-9
    values[d : d + k, : 2 * d] = 0
    for name, other in {"the rest of W_V": values, **change}.items():
        assert np.abs(other).max() < 1e-12, name


def test_norms_are_the_identity(made: Made) -> None:
    inner: Any = made.lm.model.model
    token = inner.embed_tokens.weight
    assert torch.equal(inner.layers[1].input_layernorm(token)[:, :-1], token[:, :-1])
    assert torch.equal(inner.norm(token), torch.cat([token[:, :-1], torch.ones_like(token[:, -1:])], 1))


def test_similarity_tends_to_1_with_the_rate(made: Made) -> None:
    gaps: list[float] = []
    for rate in (0.5, 0.02, 0.001):
        result = dualview.run(model=made.lm, task=made.task, lr=rate, **SMALL)
        assert result.sim_aou.raw is not None
        gaps.append(1 - result.sim_aou.raw)
    assert gaps[1] < 1e-4
    assert gaps[1] < gaps[0] / 10 and gaps[2] < gaps[1] / 10


@pytest.mark.parametrize(
    ("options", "shots", "seed"),
    [({}, 32, 1), ({"seed": 7}, 16, 2), ({"features": 8, "classes": 5}, 40, 1), ({"features": 6, "classes": 6}, 64, 3)],
)
def test_a_run_sees_the_same_learning(options: dict[str, Any], shots: int, seed: int, tmp_path: Path) -> None:
    case = make(tmp_path / "model", "float32", **options)
    result = dualview.run(model=case.lm, task=case.task, lr=case.found.rate, shots=shots, seed=seed, **SMALL)
    chance = 1 / case.classes
    assert result.sim_aou.raw is not None and result.sim_aou.raw > 0.99
    assert result.sim_aou.normalised is not None and result.sim_aou.normalised > 0.99
    assert result.sim_aou.raw_per_layer[0] is None  # copying is the same with and without demonstrations
    assert abs(result.accuracy.zsl - chance) < 0.15
    assert min(result.accuracy.icl, result.accuracy.ft) > chance + 0.3
    assert result.update_norm.icl == pytest.approx(result.update_norm.ft, rel=0.1)


def test_zero_shot_has_no_preference(made: Made) -> None:
    prompts = dualview.build_prompts(made.task, made.lm, shots=1, n_queries=16)
    log_probs = dualview.ask(made.lm, prompts, "zsl").settings[0].log_probs
    assert np.abs(log_probs + np.log(4)).max() < 1e-12


def test_all_tokens_are_the_label_when_the_text_is_one_token(made: Made) -> None:
    """The default loss gives the same: a training sequence is a word and its label, without BOS."""
    prompts = dualview.build_prompts(made.task, made.lm, shots=4, n_queries=4)
    assert prompts.bos is None and {len(s.ids) for s in prompts.training_sequences} == {2}


def test_the_same_seed_is_the_same_model(made: Made, tmp_path: Path) -> None:
    other = exact(tmp_path / "again")
    for file in ("model.safetensors", "train.jsonl", "tokenizer.json"):
        assert (other.folder / file).read_bytes() == (made.found.folder / file).read_bytes()
    third = exact(tmp_path / "third", seed=1)
    assert (third.folder / "train.jsonl").read_bytes() != (made.found.folder / "train.jsonl").read_bytes()


def test_its_task_is_sound(made: Made) -> None:
    [check] = dualview.tasks([made.task])
    assert check.warnings == ()  # pyright: ignore
    counts = {name: split.label_counts for name, split in check.splits.items()}  # pyright: ignore
    assert counts == {"train": (64,) * 4, "selection": (16,) * 4, "validation": (64,) * 4}


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(app, ["exact", "my model"])
    assert made.exit_code == 0, made.output
    command = shlex.split(made.stdout.splitlines()[-1])
    assert command[0] == "dualview" and "my model/task.yaml" in command
    ran = CliRunner().invoke(app, [*command[1:], "--n-queries", "40", "--device", "cpu", "--out", "out"])
    assert ran.exit_code == 0, ran.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["sim_aou"]["raw"] > 0.99
    control = result["controls"]["sim_aou"]
    assert max(floor for floor in control["floors"].values() if floor is not None) < 0.9  # a class shares much
    assert control["ceiling"] == pytest.approx(1)
    assert result["rec2ftp"]["value"] > result["rec2ftp"]["chance"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"classes": 3}, "4 to 26 classes, not 3: with fewer, the updates"),
        ({"classes": 27}, "4 to 26 classes, not 27"),
        ({"features": 3}, "with 4 classes takes 4 to 1024 features, not 3"),
        ({"features": 5000}, "4 to 1024 features, not 5000"),
        ({"rate": 0.0}, "a number above 0, not 0.0"),
        ({"rate": float("nan")}, "a number above 0, not nan"),
        ({"seed": -1}, "at least 0, not -1"),
        ({"spread": -0.1}, "from 0 on, not -0.1"),
        ({"spread": float("inf")}, "from 0 on, not inf"),
    ],
)
def test_what_it_does_not_take(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        exact(tmp_path / "model", **options)
    assert not (tmp_path / "model").exists()


def test_where_it_does_not_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not an empty folder"):
        exact(tmp_path / "file")
    with pytest.raises(UserError, match="not an empty folder"):
        exact(tmp_path)
    with pytest.raises(UserError, match="cannot be written"):
        exact(tmp_path / "file" / "model")
    (tmp_path / "empty").mkdir()
    assert exact(tmp_path / "empty").task.is_file()


def test_the_defaults_are_one_number() -> None:
    command: Any = app.registered_commands
    [verb] = [each.callback for each in command if each.callback.__name__ == "exact"]
    assert verb.__defaults__[2] == exact_module.RATE
    assert verb.__defaults__[4] == exact_module.SPREAD


def test_words_without_spread_are_their_class() -> None:
    made = exact_module.MadeUp.draw(features=5, classes=4, spread=0.0, seed=0)
    gold = np.concatenate(list(made.gold.values()))
    same = gold[:, None] == gold[None, :]
    assert np.abs(2 * made.known @ made.known.T - same).max() < 1e-12
