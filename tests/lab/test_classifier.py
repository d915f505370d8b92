"""The classifier lab: rules against slow computations, the model against its prompts, and a training that learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualview
from close import assert_close
from dualview.io.errors import UserError
from dualview.lab import harness as frame
from dualview.lab.classifier.report import closest, figures, tables
from dualview.lab.classifier.rules import RULES, centred, class_means, closeness, measure, ridge, step
from dualview.lab.classifier.run import ARMS, ClassifierSettings, classifier, folder_of, write
from dualview.lab.classifier.training import ATTENTIONS, WARM_UP, Problems, ProblemShape, fresh_model, predict, train
from dualview.lab.harness import LabResult
from dualview.lab.problems import named_generator
from dualview.lab.training import Schedule
from dualview.models.exact import MadeUp

SHAPE = ProblemShape(features=5, classes=4, spread=0.7, words=9)
MADE = MadeUp.draw(features=5, classes=4, spread=0.7, seed=1)


def drawn(count: int, seed: int = 0) -> Problems:
    found = SHAPE.draw(named_generator(seed, "x"), count)
    return Problems(found.u.double(), found.y)


# ------------------------------------------------------------------------------------------------------------- rules


def test_one_step_is_the_gradient_of_a_linear_classifier():
    problems = drawn(3)
    found = step(problems, 4)
    for at in range(3):
        weight = torch.zeros(4, 5, dtype=torch.float64, requires_grad=True)
        shown = problems.u[at, :-1]
        loss = torch.nn.functional.cross_entropy(shown @ weight.T, problems.y[at, :-1], reduction="sum")
        [gradient] = torch.autograd.grad(loss, weight)
        assert_close(found[at], -gradient @ problems.u[at, -1])


def test_the_other_rules_by_hand():
    problems = drawn(4, 1)
    shifted, means, solved = step(problems, 4, 0.3), class_means(problems, 4), ridge(problems, 4, 0.1)
    for at in range(4):
        u, y = problems.u[at].numpy(), problems.y[at].numpy()
        near = [float(u[i] @ u[-1]) for i in range(8)]
        by_class = [[near[i] for i in range(8) if y[i] == c] for c in range(4)]
        counted = np.array([sum(value - 0.3 for value in each) for each in by_class])
        assert shifted[at].numpy() == pytest.approx(counted - counted.mean(), abs=1e-12)
        average = np.array([np.mean(each) if each else 0.0 for each in by_class])
        assert means[at].numpy() == pytest.approx(average - average.mean(), abs=1e-12)
        # Ridge in the space of features: (UᵀU + λ)⁻¹ Uᵀ E
        shown = u[:-1]
        weight = np.linalg.solve(shown.T @ shown + 0.1 * np.eye(5), shown.T @ (np.eye(4)[y[:-1]] - 0.25))
        fitted = u[-1] @ weight
        assert solved[at].numpy() == pytest.approx(fitted - fitted.mean(), abs=1e-10)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.1, 50), st.floats(-5, 5))
def test_closeness_knows_neither_scale_nor_what_all_labels_share(scale, shared):
    answers = step(drawn(6), 4)
    assert closeness(centred(scale * answers + shared), answers) == pytest.approx(1)
    assert closeness(-answers, answers) == pytest.approx(-1)
    assert closeness(0 * answers, answers) is None


def test_a_rule_is_closest_to_itself():
    problems = drawn(60)
    for name, (rule, values) in RULES.items():
        found = measure(rule(problems, 4, values[-1]), problems, 4, 30)
        assert found["closeness"][name] == pytest.approx(1) and found["parameter"][name] == values[-1]
        assert found["right"]["model"] == found["right"][name]
        assert closest([found])[0] == name or found["closeness"][closest([found])[0]] == pytest.approx(1)


# ---------------------------------------------------------------------------------------------------------- problems


def test_nothing_but_demonstrations_tells_what_a_label_means():
    problems = SHAPE.draw(named_generator(3, "x"), 4000)
    by_class = torch.stack([problems.u[problems.y == c].mean(0) for c in range(4)])
    assert float(by_class.abs().max()) < 0.04  # without random signs of the centres it is about 0.2
    assert problems.u.square().sum(-1).numpy() == pytest.approx(0.5, rel=1e-5)


def test_classes_are_around_orthogonal_centres():
    tight = ProblemShape(5, 4, 0.0, 12).draw(named_generator(0, "x"), 10)
    same = tight.y[:, :, None] == tight.y[:, None, :]
    products = 2 * tight.u @ tight.u.mT
    assert products.flatten().tolist() == pytest.approx(same.float().flatten().tolist(), abs=1e-5)


# -------------------------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_saved_model_answers_its_prompts_as_in_training(attention, tmp_path: Path):
    model = train(fresh_model(MADE, attention, 0), SHAPE, Schedule(2, 4, 0.01), 0, lambda _: None)
    task = MADE.save(tmp_path / "model", model, "classifier")
    lm = dualview.load_model(str(tmp_path / "model"), dtype="float64", device="cpu")
    prompts = dualview.build_prompts(str(task), lm, shots=8, n_queries=4)
    asked = dualview.ask(lm, prompts, "icl").settings[0].log_probs
    table = lm.model.get_input_embeddings().weight[:, :5].detach()  # pyright: ignore
    for query, said in zip(prompts.queries, asked, strict=True):
        ids = [*(demo.template[0] for demo in prompts.demos), query.ids[0]]
        labels = [demo.label[0] - 3 for demo in prompts.demos]
        problems = Problems(table[ids][None], torch.tensor([[*labels, 0]]))
        with torch.no_grad():
            logits = predict(lm.model, problems, 4)[0, -1]  # pyright: ignore
        assert centred(logits).numpy() == pytest.approx(said - said.mean(), abs=1e-6)


def test_training_is_seeded_and_leaves_the_rest_as_it_is():
    def trained(seed: int) -> dict[str, torch.Tensor]:
        model = train(fresh_model(MADE, "linear", seed), SHAPE, Schedule(3, 4, 0.01), seed, lambda _: None)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    start, first, again, other = fresh_model(MADE, "linear", 1).state_dict(), trained(1), trained(1), trained(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    moved = {name for name in first if not torch.equal(first[name], start[name])}
    attention = {f"model.layers.{n}.self_attn.{role}_proj.weight" for n in (0, 1) for role in "qkvo"}
    assert moved == attention | {"model.embed_tokens.weight", "lm_head.weight"}
    words = slice(MADE.label_tokens.stop, None)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(first[name][words], start[name][words])
        assert not torch.equal(first[name], other[name])


def test_it_learns_from_demonstrations():
    shape = ProblemShape(5, 4, 0.7, 17)
    model = train(fresh_model(MADE, "linear", 1), shape, Schedule(350, 24, 0.01, warm_up=WARM_UP), 1, lambda _: None)
    problems = shape.draw(named_generator(5, "test"), 300)
    with torch.no_grad():
        right = (predict(model, problems, 4).argmax(-1) == problems.y).double().mean(0)
    assert right[0] < 0.4 and right[-1] > 0.6


def test_the_exact_model_takes_one_step(tmp_path: Path):
    chosen = ClassifierSettings.make(device="cpu")
    write(tmp_path / "exact", chosen, "exact", 2, lambda _: None)
    lm = dualview.load_model(str(tmp_path / "exact"), dtype="float64", device="cpu")
    problems = drawn(8)
    with torch.no_grad():
        answers = predict(lm.model, problems, 4)[:, -1]  # pyright: ignore
    assert closeness(centred(answers), step(problems, 4)) == pytest.approx(1, abs=1e-9)


# ---------------------------------------------------------------------------------------------------------------- lab

TINY = {"train_steps": 2, "train_batch": 4, "shots": 6, "n_queries": 12, "seeds": 2, "device": "cpu"}


def test_the_lab_and_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(frame, "_write_figures", lambda _figures, _folder: [])
    result = classifier(out=tmp_path, only=("exact", "linear"), **TINY)
    read = LabResult.load(tmp_path / "classifier.json")
    assert read.results == result.results and result.seeds == [1, 2]
    for run in result.results["arms"]["exact"]:
        assert run["closeness"]["one step"] == pytest.approx(1, abs=1e-5)
        assert run["sim_aou"] == pytest.approx(1, abs=1e-3)
    assert all((folder_of(tmp_path, arm, 2) / "task.yaml").is_file() for arm in ("exact", "linear"))
    answers, learning = tables(read)
    assert [row[0] for row in answers.rows] == [row[0] for row in learning.rows] == ["exact", "linear"]
    assert "Trained linear attention" in answers.note and set(figures(read)) == {"classifier"}
    assert not list(tmp_path.glob(".state-*"))


def test_the_closest_rule_is_by_paired_differences():
    runs = [{"closeness": dict.fromkeys(RULES, 0.1) | {"ridge": 0.8 + s, "one step": 0.7 + s}} for s in (0, 0.1, 0.15)]
    first, second, ci = closest(runs)
    assert (first, second) == ("ridge", "one step") and ci == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"only": "exakt"}, f"there are {', '.join(ARMS)}"),
        ({"features": 3}, "4 classes need at least as many features, not 3"),
        ({"seeds": 1}, "--seeds"),
        ({"train_lr": 0}, "--train-lr"),
    ],
)
def test_mistakes_are_one_sentence(wrong, said):
    with pytest.raises(UserError, match=said):
        classifier(**{**TINY, **wrong})


def test_a_diverged_training_is_reported():
    with pytest.raises(UserError, match="diverged at step"):
        train(fresh_model(MADE, "linear", 0), SHAPE, Schedule(40, 4, 1e12), 0, lambda _: None)
