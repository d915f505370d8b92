"""The rivals lab: rules and models against slow loops, tuning against known answers, and which rule is closest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.duality.theory.regression import LinearSelfAttention, gd_plus_plus, lsa_optimum
from dualview.io.errors import UserError
from dualview.lab import harness as frame
from dualview.lab.harness import LabResult
from dualview.lab.problems import Tasks, named_generator
from dualview.lab.regression.models import InContext
from dualview.lab.rivals.measure import Answers, closest, distance
from dualview.lab.rivals.models import LinearModels, TokenModels, made, train
from dualview.lab.rivals.problems import Moments, Problems, Source, draw, eigenvalues
from dualview.lab.rivals.report import figures, tables
from dualview.lab.rivals.rules import Rule
from dualview.lab.rivals.run import rivals
from dualview.lab.rivals.small_matrices import product
from dualview.lab.rivals.tuning import best, tuned_rules
from dualview.lab.training import Schedule
from dualview.lab.units import Unit

PROPERTY = settings(max_examples=10, deadline=None)
SOURCE = Source(3, 8, 10.0, 0.3)


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    monkeypatch.setattr(frame, "_write_figures", lambda _figures, _folder: [])


def problems(seed: int = 0, models: int = 2, tasks: int = 4, source: Source = SOURCE) -> Problems:
    drawn = draw([source] * models, [named_generator(seed + at, "test") for at in range(models)], tasks)
    return Problems(*(part.double() for part in vars(drawn).values()))


def one_model(tasks: int, source: Source = SOURCE, seed: int = 0) -> Moments:
    return problems(seed, 1, tasks, source).moments().of_model(0)


# ---------------------------------------------------------------------------------------------------------- problems


def test_problems_are_what_they_say():
    values = eigenvalues(5, 100.0)
    assert float(values.mean()) == pytest.approx(1) and float(values[0] / values[-1]) == pytest.approx(100)
    torch.testing.assert_close(values[1:] / values[:-1], torch.full((4,), 100**-0.25, dtype=torch.float64))
    found = one_model(20_000)
    torch.testing.assert_close(found.inputs.mean(-1), torch.diag(SOURCE.scale), atol=0.05, rtol=0.05)
    assert float(found.truth.var()) == pytest.approx(1, rel=0.05)
    assert float(found.second[-1, -1].mean()) == pytest.approx(3 + 0.3**2, rel=0.05)  # E y² = tr Σ and the noise


def test_risk_is_the_loss_over_queries():
    """The closed form over x_q, against a mean over many of them."""
    found, draws = one_model(3), torch.Generator().manual_seed(1)
    slope = torch.randn(3, 3, generator=draws, dtype=torch.float64)
    x = torch.randn(100_000, 3, generator=draws, dtype=torch.float64) * SOURCE.scale.sqrt()
    slow = 0.5 * (x @ (slope - found.truth)).square().mean(0)
    torch.testing.assert_close(found.risk(slope), slow, rtol=0.03, atol=0)


def test_scaled_inputs_leave_labels_and_ols_as_they_are():
    found, factors = one_model(5), torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    other, rule = found.with_inputs(factors), Rule("ols", None, [])
    torch.testing.assert_close(other.predicted(rule(other)), found.predicted(rule(found)))
    torch.testing.assert_close(other.risk(rule(other)), found.risk(rule(found)))
    torch.testing.assert_close(found.first(2).labels, found.labels[:, :2])


def test_products_of_small_matrices():
    draws = torch.Generator().manual_seed(0)
    a = torch.randn(3, 2, 4, 1, generator=draws, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 5, 4, 6, generator=draws, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(product(a, b), torch.einsum("ikmt,kjmt->ijmt", a.expand(3, 2, 4, 6), b))
    assert torch.autograd.gradcheck(product, (a, b))


# ------------------------------------------------------------------------------------------------------------- rules


def slow_rule(name: str, x: np.ndarray, y: np.ndarray, theta: list[float], steps: int) -> np.ndarray:
    """∂ŷ/∂x_q of one problem, as each rule's text says."""
    s, c, one = x.T @ x / len(y), x.T @ y / len(y), np.eye(x.shape[1])
    slope = np.zeros(x.shape[1])
    if name == "ols":
        return np.linalg.lstsq(x, y, rcond=None)[0]
    if name == "ridge":
        return np.linalg.solve(s + np.exp(theta[0]) * one, c)
    if name == "newton":
        s = s + np.exp(theta[2]) * one
        size = np.linalg.norm(s, 2)
        inverse = (theta[0] * one + theta[1] * s / size) / size
        for _ in range(steps):
            inverse = 2 * inverse - inverse @ s @ inverse
        return inverse @ c
    for step in range(steps):
        rate = theta[step] * one if name == "gd" else np.diag(theta[3 * step : 3 * step + 3])
        slope = slope - rate @ (x.T @ (x @ slope - y)) / len(y)
    return slope


@PROPERTY
@given(seed=st.integers(0, 99), steps=st.integers(1, 4))
@pytest.mark.parametrize("name", ["ols", "ridge", "newton", "gd", "preconditioned"])
def test_a_rule_is_its_text(name, seed, steps):
    given_, drawn = problems(seed, 1), np.random.default_rng(seed)
    count = {"ols": 0, "ridge": 1, "newton": 3, "gd": steps, "preconditioned": 3 * steps}[name]
    theta = drawn.uniform(0.1, 0.6, count).tolist()
    found = Rule(name, steps, theta)(given_.moments().of_model(0)).numpy()
    for at in range(4):
        slow = slow_rule(name, given_.x[0, at].numpy(), given_.y[0, at].numpy(), theta, steps)
        np.testing.assert_allclose(found[:, at], slow, rtol=1e-8, atol=1e-10)


@PROPERTY
@given(seed=st.integers(0, 99), steps=st.integers(1, 4))
def test_plus_plus_is_the_recursion_and_its_preconditioned_form_the_same_on_other_inputs(seed, steps):
    given_ = problems(seed, 1)
    moments, n = given_.moments().of_model(0), given_.y.shape[-1]
    theta = [0.4] * steps + [0.1] * (steps - 1)
    logs = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    plain = moments.predicted(Rule("gd_plus_plus", steps, theta)(moments))
    both = moments.predicted(Rule("preconditioned_plus_plus", steps, [*logs.tolist(), *theta])(moments))
    for at in range(4):
        x, y, x_query = given_.x[0, at].T, given_.y[0, at][None], given_.x_query[0, at][:, None]
        torch.testing.assert_close(plain[at], gd_plus_plus(x, y, x_query, 0.4, 0.1 / n, steps)[0, 0])
        moved = logs.exp()[:, None]
        slow = gd_plus_plus(moved * x, y, moved * x_query, 0.4, 0.1 / n, steps)
        torch.testing.assert_close(both[at], slow[0, 0])


def test_newton_ends_at_ridge():
    found = one_model(50)
    ridge = Rule("ridge", None, [-2.0])(found)
    torch.testing.assert_close(Rule("newton", 20, [1.0, 0.0, -2.0])(found), ridge)


# ------------------------------------------------------------------------------------------------------------ tuning


def test_tuned_rules_reach_known_answers():
    found = one_model(2000)
    tuned = tuned_rules(SOURCE, found, [1, 3])
    exact = lsa_optimum(torch.diag(SOURCE.scale), 8, noise=0.3)
    assert tuned["preconditioned"][0].loss == pytest.approx(exact.loss, rel=0.12)
    searched = best("preconditioned", 1, [[0.3, 0.3, 0.3]], found)  # without the closed form
    np.testing.assert_allclose(searched.rule.theta, exact.matrix.diagonal(), rtol=0.1)
    assert searched.loss <= tuned["preconditioned"][0].loss
    bayes = np.log(0.3**2 / 8)
    assert tuned["ridge"][0].rule.theta[0] == pytest.approx(bayes, abs=0.3)
    assert tuned["ridge"][0].loss <= tuned["ols"][0].loss
    for name in ("gd", "preconditioned", "newton"):
        losses = [each.loss for each in tuned[name]]
        assert losses == sorted(losses, reverse=True) and [each.rule.steps for each in tuned[name]] == [1, 3]
    assert [each.rule.steps for each in tuned["gd_plus_plus"]] == [3]
    for less, more in (("gd", "preconditioned"), ("gd_plus_plus", "preconditioned_plus_plus")):
        assert tuned[more][-1].loss <= tuned[less][-1].loss * (1 + 1e-6)
    assert tuned["gd_plus_plus"][-1].loss <= tuned["gd"][-1].loss


def test_two_steps_of_plus_plus_are_nearly_the_best_cubic():
    """They are a cubic of S; the best of all cubics is a least-squares problem, and a poorer minimum is far from it."""
    source = Source(3, 12, 1.0, 0.2)
    found = one_model(1000, source)
    powers = torch.stack([found.spectrum.slope(found.spectrum.values**power).flatten() for power in range(4)], -1)
    cubic = powers @ torch.linalg.lstsq(powers, found.truth.flatten()[:, None]).solution
    lowest = float(found.risk(cubic.reshape(3, -1)).mean())
    assert lowest * (1 - 1e-9) <= tuned_rules(source, found, [2])["gd_plus_plus"][0].loss < 1.2 * lowest


# ------------------------------------------------------------------------------------------------------------ models


@PROPERTY
@given(seed=st.integers(0, 99), depth=st.integers(1, 4), shared=st.booleans())
def test_linear_models_are_attention_on_tokens(seed, depth, shared):
    """By the regression lab's model, which attends token by token."""
    given_ = problems(seed)
    models = LinearModels(3, depth, shared, [named_generator(seed + at, "w") for at in range(2)]).double()
    with torch.no_grad():
        models.u.mul_(0.1)  # far from the clamp
    predicted, slope = models.answer(given_)
    one = torch.eye(4, dtype=torch.float64)
    for number in range(2):
        layers = [
            LinearSelfAttention(w_k=one, w_q=models.m[number, at % own], w_v=models.u[number, at % own], p=one / 8)
            for own in [models.m.shape[1]]
            for at in range(depth)
        ]
        slow = InContext.constructed(layers)
        tasks = Tasks(given_.x[number], given_.y[number], given_.x_query[number], given_.y_query[number])
        torch.testing.assert_close(predicted[number], slow(tasks))
        at = tasks.x_query.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(slow(tasks.with_query(at)).sum(), at)
        torch.testing.assert_close(slope[:, number].mT, gradient)


@pytest.mark.parametrize(("separate", "heads"), [(False, 2), (True, 1)])
def test_token_models_are_the_equation(separate, heads):
    given_ = problems(5)
    models = TokenModels(3, 2, heads, separate, [named_generator(at, "w") for at in range(2)]).double()
    found = models.predicted(given_, given_.x_query).detach()
    for number in range(2):
        for at in range(4):
            tokens = models.tokens(given_, given_.x_query)[number, at].numpy()
            assert len(tokens) == (17 if separate else 9)
            for layer, softmax in enumerate(models.softmax):
                context, moved = tokens[:-1], tokens.copy()
                for head in range(heads):
                    m, u = (weight.detach()[number, layer, head].numpy() for weight in (models.m, models.u))
                    for t, token in enumerate(tokens):
                        scores = np.array([c @ m @ token for c in context])
                        weights = np.exp(scores) / np.exp(scores).sum() if softmax else scores / len(context)
                        moved[t] += u @ sum(w * c for w, c in zip(weights, context, strict=True))
                tokens = moved
            assert float(found[number, at]) == pytest.approx(-tokens[-1, 3], rel=1e-9, abs=1e-12)


def test_separate_tokens_alternate():
    given_ = problems(2, 1, 1)
    tokens = made("separate", 3, 1, 1, [named_generator(0, "w")]).tokens(given_, given_.x_query)[0, 0]  # pyright: ignore
    torch.testing.assert_close(tokens[0:16:2, :3], given_.x[0, 0])
    torch.testing.assert_close(tokens[1:16:2, 3], given_.y[0, 0])
    torch.testing.assert_close(tokens[16, :3], given_.x_query[0, 0])
    assert not tokens[1:16:2, :3].any() and not tokens[0::2, 3].any()


def test_copying_is_the_weight_of_each_partner():
    given_ = problems(3, 2, 2)
    models = TokenModels(3, 1, 1, True, [named_generator(at, "w") for at in range(2)]).double()
    tokens, found = models.tokens(given_, given_.x_query).numpy(), models.copying(given_).detach().numpy()
    for number in range(2):
        m = models.m.detach()[number, 0, 0].numpy()
        for way, (of, to) in enumerate([(0, 1), (1, 0)]):
            seen: list[float] = []
            for each in tokens[number]:
                for i in range(8):
                    scores = np.exp([c @ m @ each[2 * i + of] for c in each[:-1]])
                    seen.append(scores[2 * i + to] / scores.sum())
            assert found[way, number] == pytest.approx(np.mean(seen), rel=1e-9)


def test_one_trained_layer_is_the_best_preconditioned_step():
    """A training with a known answer: the loss and the rule of Ahn et al.'s closed form."""
    sources = [SOURCE] * 2
    models = made("linear", 3, 1, 1, [named_generator(seed, "w") for seed in (1, 2)])
    generators = [named_generator(seed, "t") for seed in (1, 2)]
    train(models, sources, generators, Schedule(250, 64, 0.03, 0.1, warm_up=12), Unit(None, {}), lambda _: None)
    found = problems(9, 2, 2000)
    exact = lsa_optimum(torch.diag(SOURCE.scale), 8, noise=0.3)
    moments = found.moments()
    slope = models.double().answer(found)[1].detach()
    rule = Rule("preconditioned", 1, exact.matrix.diagonal().tolist())
    for number in range(2):
        own = moments.of_model(number)
        assert float(own.risk(slope[:, number]).mean()) == pytest.approx(float(own.risk(rule(own)).mean()), rel=0.03)
        answer = Answers(own, own.predicted(slope[:, number]), slope[:, number])
        near, far = distance(answer, rule), distance(answer, Rule("ols", None, []))
        assert near["prediction"] < 0.01 < far["prediction"] and near["cosine"] > 0.99


def test_a_bad_step_is_left_out_for_its_model_alone():
    models = made("linear", 3, 2, 1, [named_generator(seed, "w") for seed in (1, 2)])
    with torch.no_grad():
        models.m[0] *= 1e30
    before = models.m.detach().clone()
    generators = [named_generator(seed, "t") for seed in (1, 2)]
    train(models, [SOURCE] * 2, generators, Schedule(2, 8, 0.01, 0.1), Unit(None, {}), lambda _: None)
    assert torch.equal(models.m[0], before[0]) and not torch.equal(models.m[1], before[1])


def test_a_model_does_not_depend_on_its_neighbours():
    def trained(seeds: list[int]) -> torch.Tensor:
        models = made("linear", 3, 2, 1, [named_generator(seed, "w") for seed in seeds])
        generators = [named_generator(seed, "t") for seed in seeds]
        train(models, [SOURCE] * len(seeds), generators, Schedule(5, 8, 0.01, 0.1), Unit(None, {}), lambda _: None)
        return models.m.detach()[-1]

    torch.testing.assert_close(trained([1, 2]), trained([2]), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- measures


def test_distances():
    found = one_model(300)
    rule = Rule("ols", None, [])
    slope = rule(found)
    same = distance(Answers(found, found.predicted(slope), slope), rule)
    assert same["prediction"] == same["slope"] == 0 and same["cosine"] == pytest.approx(1)
    nothing = torch.zeros_like(found.y_query)
    truth = distance(Answers(found, nothing, 2 * slope), rule)
    assert truth["slope"] == pytest.approx(float(slope.square().sum(0).mean() / found.truth.square().sum(0).mean()))
    assert truth["prediction"] == pytest.approx(1, abs=0.1) and truth["cosine"] == pytest.approx(1)


def test_one_exploding_problem_in_a_thousand_does_not_decide():
    found = one_model(1000)
    rule = Rule("ols", None, [])
    slope = rule(found)
    slope[:, 7] = 1e100
    assert distance(Answers(found, found.predicted(slope), slope), rule)["prediction"] == 0
    slope[:, 8] += 1.0  # the second is not left out
    assert distance(Answers(found, found.predicted(slope), slope), rule)["slope"] > 0


def rows(**values: list[float]) -> dict[str, dict[str, list[float]]]:
    return {name: {"prediction": row, "cosine": row} for name, row in values.items()}


def test_the_closest_rule_wins_by_interval():
    clear = closest(rows(a=[1.0, 1.1, 0.9], b=[2.0, 2.1, 1.95], c=[5.0, 5.0, 9.0]), "prediction")
    assert clear["rule"] == "a" and clear["next"] == "b" and clear["ties"] == ["c"]  # c's interval includes 0
    assert clear["gap"] == pytest.approx(1.01667, abs=1e-4) and clear["ci"][0] > 0
    paired = closest(rows(a=[1.0, 5.0, 9.0], b=[1.1, 5.1, 9.11]), "prediction")
    assert paired["rule"] == "a" and paired["ties"] == []  # close, but in every seed
    assert closest(rows(a=[1.0, 2.0], b=[2.0, 1.1]), "prediction")["ties"] == ["b"]
    assert closest(rows(a=[0.9, 0.91, 0.9], b=[0.5, 0.52, 0.5]), "cosine")["rule"] == "a"
    alone = closest(rows(a=[1.0], b=[2.0]), "prediction")
    assert alone["ties"] == ["b"] and alone["ci"] is None  # one seed has no interval


# --------------------------------------------------------------------------------------------------------------- lab

TINY = {"depths": (1, 2), "conditions": (1.0, 10.0), "variant_depths": (2,), "dims": 2, "demos": 5, "steps": 2}
TINY |= {"batch_size": 4, "tuning_tasks": 100, "eval_tasks": 20, "seeds": 2, "device": "cpu"}


def test_the_lab(tmp_path: Path):
    first = rivals(out=tmp_path, **TINY)
    stored = json.loads((tmp_path / "rivals.json").read_text())
    assert rivals(**TINY).results == first.results == stored["results"]
    kinds = [(row["kind"], row["condition"], row["depth"]) for row in first.results["trained"]]
    others = [(kind, 10, 2) for kind in ("shared", "softmax", "separate")]
    assert kinds == [("linear", c, d) for d in (1, 2) for c in (1.0, 10.0)] + others
    assert set(first.results["tuned"]) == {"1", "10"}
    read = LabResult.load(tmp_path / "rivals.json")
    assert "\n\n".join(t.markdown() for t in tables(read)) in (tmp_path / "rivals.md").read_text()
    assert set(figures(read)) == {"rivals"} and not list(tmp_path.glob(".state-*"))


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"variants": ("wide",)}, "there is no 'wide'"),
        ({"demos": 2}, "there is no OLS"),
        ({"conditions": (0.5,)}, "--conditions"),
        ({"depths": (0,)}, "--depths"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, given_, said):
    with pytest.raises(UserError, match=said):
        rivals(out=tmp_path / "none", **{**TINY, **given_})
    assert not (tmp_path / "none").exists()
