"""The regression lab: models against slow loops, references against formulas, a training that finds descent, a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualview.lab
from dualview.duality.theory.regression import LinearSelfAttention, gd_layer
from dualview.duality.theory.regression import gd_plus_plus as descend_plus_plus
from dualview.io.errors import UserError
from dualview.lab.harness import LabResult
from dualview.lab.problems import LinearTasks, SineTasks, Tasks, named_generator
from dualview.lab.regression.linear import schedule_of
from dualview.lab.regression.measure import (
    Spectrum,
    best_plus_plus,
    best_rate,
    first_guess,
    losses,
    mean_loss,
    paired,
    shifts_of,
    similarity,
)
from dualview.lab.regression.models import (
    InContext,
    SelfAttention,
    gd_layers,
    gd_plus_plus,
    gradient_descent,
    interpolated,
    plus_plus_layers,
)
from dualview.lab.regression.report import figures, tables
from dualview.lab.regression.settings import RegressionSettings
from dualview.lab.regression.sine import MetaLearner, function_similarity

PROPERTY = settings(max_examples=15, deadline=None)
small = st.integers(1, 4)


def problems(seed: int, count: int = 6, n_x: int = 3, n_demos: int = 5) -> Tasks:
    drawn = LinearTasks(n_x, n_demos).draw(named_generator(seed, "test"), count)
    return Tasks(drawn.x.double(), drawn.y.double(), drawn.x_query.double(), drawn.y_query.double())


# ------------------------------------------------------------------------------------------------------------- tasks


def test_problems_are_what_they_say():
    tasks = LinearTasks(4, 50_000 // 4, 3.0, weight_scale=2.0).draw(named_generator(0, "x"), 40)
    assert tasks.x.abs().max() <= 1.5 and tasks.x.var() == pytest.approx(9 / 12, rel=0.02)
    for t in range(5):  # the labels are linear in the inputs, the query's too
        w = np.linalg.lstsq(tasks.x[t].numpy(), tasks.y[t].numpy(), rcond=None)[0]
        assert float(tasks.x_query[t] @ torch.tensor(w)) == pytest.approx(float(tasks.y_query[t]), abs=1e-4)
    several = LinearTasks(4, 4, weight_scale=2.0).draw(named_generator(1, "x"), 20_000)
    assert several.y_query.var() == pytest.approx(4 * 4 / 12, rel=0.05)


def test_noise_and_corruption_reach_labels_only():
    def drawn(**more):
        return LinearTasks(3, 8, **more).draw(named_generator(0, "x"), 5_000)

    plain, noisy, corrupted = drawn(), drawn(noise=0.5), drawn(corrupted=3)
    for other in (noisy, corrupted):
        assert torch.equal(plain.x, other.x) and torch.equal(plain.y_query, other.y_query)
    assert (noisy.y - plain.y).std() == pytest.approx(0.5, rel=0.05)
    assert torch.equal(plain.y[:, 3:], corrupted.y[:, 3:])
    assert corrupted.y[:, :3].std() == pytest.approx(1, rel=0.05)
    assert abs(np.corrcoef(plain.y[:, :3].flatten(), corrupted.y[:, :3].flatten())[0, 1]) < 0.05


def test_sine_amplitude_and_phase_are_not_tied():
    tasks = SineTasks(400).draw(named_generator(0, "x"), 300)
    phases, sizes = [], []
    for x, y in zip(tasks.x[..., 0].numpy(), tasks.y.numpy(), strict=True):
        a, b = np.linalg.lstsq(np.stack([np.sin(x), np.cos(x)], 1), y, rcond=None)[0]
        phases.append(np.arctan2(b, a))
        sizes.append(np.hypot(a, b))
    assert min(sizes) >= 0.099 and max(sizes) <= 0.501 and min(phases) >= -1e-4 and max(phases) <= np.pi + 1e-4
    assert abs(np.corrcoef(phases, sizes)[0, 1]) < 0.2


def test_every_named_draw_is_its_own():
    firsts = {float(torch.rand((), generator=named_generator(s, n))) for s in (0, 1, 11) for n in ("a", "b", "1/a")}
    assert len(firsts) == 9


# ------------------------------------------------------------------------------------------------------------ models


def slow_attention(layer: SelfAttention, tokens: np.ndarray, context: np.ndarray) -> np.ndarray:
    """One problem, token by token, head by head."""
    weights = [w.detach().numpy() for w in (layer.w_k, layer.w_q, layer.w_v, layer.p)]
    out = tokens.copy()
    for t, token in enumerate(tokens):
        for k, q, v, p in zip(*weights, strict=True):
            scores = np.array([(k @ c) @ (q @ token) for c in context])
            if layer.softmax:
                scores = np.exp(scores / np.sqrt(len(token)))
                scores = scores / scores.sum()
            out[t] += p @ sum(s * (v @ c) for s, c in zip(scores, context, strict=True))
    return out


@PROPERTY
@given(seed=st.integers(0, 99), depth=small, heads=st.integers(1, 3), softmax=st.booleans(), recurrent=st.booleans())
def test_the_model_is_the_equation(seed, depth, heads, softmax, recurrent):
    tasks = problems(seed)
    layers = [
        SelfAttention(4, heads, softmax, 0.5, named_generator(seed + i, "w")).double()
        for i in range(1 if recurrent else depth)
    ]
    model = InContext(layers, depth, clamp=1.5)
    found = model(tasks).detach().numpy()
    for t in range(len(tasks)):
        tokens = np.concatenate([tasks.x[t], tasks.y[t][:, None]], 1)
        tokens = np.concatenate([tokens, [[*tasks.x_query[t], 0.0]]])
        for n in range(depth):
            tokens = np.clip(slow_attention(layers[n % len(layers)], tokens, tokens[:-1]), -1.5, 1.5)
        assert found[t] == pytest.approx(-tokens[-1, -1], rel=1e-9, abs=1e-12)


@PROPERTY
@given(seed=st.integers(0, 99), steps=small, rate=st.floats(0.1, 3))
def test_gradient_descent_and_the_constructed_weights(seed, steps, rate):
    tasks = problems(seed)
    found = gradient_descent(rate, steps)(tasks).numpy()
    by_hand = InContext.constructed(gd_layers(rate, steps, tasks.x[0].mT))(tasks).detach().numpy()
    for t in range(len(tasks)):
        x, y, w = tasks.x[t].numpy(), tasks.y[t].numpy(), np.zeros(3)
        for _ in range(steps):
            w = w - rate * x.T @ (x @ w - y) / len(y)
        assert found[t] == pytest.approx(w @ tasks.x_query[t].numpy(), rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(by_hand, found, rtol=1e-9, atol=1e-12)


@PROPERTY
@given(seed=st.integers(0, 99), steps=small)
def test_gd_plus_plus_is_the_recursion(seed, steps):
    tasks = problems(seed)
    found = gd_plus_plus([1.3] * steps, [0.02] * steps)(tasks)
    for t in range(len(tasks)):
        slow = descend_plus_plus(tasks.x[t].T, tasks.y[t][None], tasks.x_query[t][:, None], 1.3, 0.02, steps)
        torch.testing.assert_close(found[t], slow[0, 0])


def random_layer(seed: int, d: int) -> LinearSelfAttention:
    generator = named_generator(seed, "layer")
    return LinearSelfAttention(*(torch.randn(d, d, generator=generator, dtype=torch.float64) for _ in range(4)))


@PROPERTY
@given(seed=st.integers(0, 99), scale=st.sampled_from([-2.0, 0.3, 5.0]))
def test_half_way_to_itself_is_itself_whatever_the_scale(seed, scale):
    """(M, U) and (M/s, sU) are one layer: half way between them lies the same layer."""
    tasks = problems(seed)
    one = gd_layer(torch.zeros(1, 3, dtype=torch.float64), 0.7, 5)
    other = LinearSelfAttention(one.w_k * scale, one.w_q, one.w_v / scale, one.p)
    middle = interpolated(other, one, 3)
    torch.testing.assert_close(InContext.constructed([middle])(tasks), InContext.constructed([one])(tasks))
    strange = random_layer(seed, 4)
    there = InContext.constructed([interpolated(strange, one, 3)])(tasks)
    assert not torch.allclose(there, InContext.constructed([one])(tasks))


# ---------------------------------------------------------------------------------------------------------- measures


def test_the_best_rate_of_one_step_is_the_projection():
    """One step's prediction is η times a number, so the best η is a quotient of sums."""
    tasks = problems(3, 500)
    unit = gradient_descent(1.0, 1)(tasks).numpy()
    exact = (unit * tasks.y_query.numpy()).sum() / (unit**2).sum()
    found = best_rate(tasks, 1, first_guess(LinearTasks(3, 5)))
    assert found == pytest.approx(exact, rel=1e-3)


def test_more_steps_and_gd_plus_plus_do_better():
    tasks = LinearTasks(4, 6).draw(named_generator(0, "x"), 1_000)
    guess = first_guess(LinearTasks(4, 6))
    rates = [best_rate(tasks, k, guess) for k in (1, 2, 4)]
    reached = [mean_loss(gradient_descent(rate, k), tasks) for rate, k in zip(rates, (1, 2, 4), strict=True)]
    assert reached == sorted(reached, reverse=True)
    for rate in (0.9 * rates[1], 1.1 * rates[1]):
        assert mean_loss(gradient_descent(rate, 2), tasks) > reached[1]
    shared = best_plus_plus(tasks, 2, rates[1], shared=True)
    own = best_plus_plus(tasks, 2, rates[1], shared=False)
    assert len(set(shared.rates)) == 1
    assert mean_loss(own.predictor, tasks) < mean_loss(shared.predictor, tasks) < reached[1]
    layers = InContext.constructed(plus_plus_layers(shared.rates, shared.gammas, tasks.x[0].mT))
    torch.testing.assert_close(layers(tasks), shared.predictor(tasks), rtol=1e-4, atol=1e-5)


@PROPERTY
@given(seed=st.integers(0, 99), steps=small, n_x=st.integers(1, 6), noise=st.sampled_from([0.0, 0.5]))
def test_the_spectrum_has_gd_plus_plus_s_loss(seed, steps, n_x, noise):
    tasks = LinearTasks(n_x, 4, noise=noise).draw(named_generator(seed, "x"), 20)
    rates, gammas = (named.tolist() for named in torch.rand(2, steps, generator=named_generator(seed, "rates")))
    exact = Tasks(tasks.x.double(), tasks.y.double(), tasks.x_query.double(), tasks.y_query.double())
    expected = mean_loss(gd_plus_plus(rates, gammas), exact)
    assert Spectrum.of(tasks).loss(rates, gammas) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shared", [True, False])
def test_gd_plus_plus_is_at_its_best_on_all_the_problems(shared):
    """What is left to gain nearby is far below the interval of a loss difference over problems (1e-4 on 20,000)."""
    tasks = LinearTasks(4, 6).draw(named_generator(0, "x"), 20_000)
    found = best_plus_plus(tasks, 2, 5.0, shared=shared)
    problems_ = Spectrum.of(tasks)
    reached = problems_.loss(found.rates, found.gammas)
    for rate in (0.99, 1.0, 1.01):
        for gamma in (0.99, 1.0, 1.01):
            near = problems_.loss([rate * r for r in found.rates], [gamma * g for g in found.gammas])
            assert near > reached - 1e-7


def test_similarity_knows_equality_direction_and_scale():
    tasks = problems(1, 30)
    descent = gradient_descent(2.0, 1)
    same = similarity(descent, descent, tasks)
    assert same["prediction_difference"] == 0 and same["model_difference"] == 0
    assert same["model_cosine"] == pytest.approx(1)
    twice = similarity(descent, gradient_descent(4.0, 1), tasks)
    slope = 2.0 / 5 * torch.einsum("tn,tnd->td", tasks.y, tasks.x)
    assert twice["model_cosine"] == pytest.approx(1)
    assert twice["model_difference"] == pytest.approx(float(slope.norm(dim=1).mean()))
    assert twice["prediction_difference"] == pytest.approx(float((slope * tasks.x_query).sum(1).abs().mean()))
    assert similarity(descent, lambda t: -descent(t), tasks)["model_cosine"] == pytest.approx(-1)


def test_paired_takes_the_problems_in_pairs():
    rng = np.random.default_rng(0)
    other = rng.exponential(size=4000)
    found = paired(other + 0.01, other)
    assert found["difference"] == pytest.approx(0.01)
    assert found["difference_ci"] == pytest.approx([0.01, 0.01])
    assert found["ratio"] == pytest.approx(1 + 0.01 / other.mean())


def test_losses_do_not_depend_on_the_chunks(monkeypatch):
    tasks = problems(1, 30)
    whole = losses(gradient_descent(1.0, 2), tasks)
    monkeypatch.setattr("dualview.lab.regression.measure.CHUNK", 7)
    np.testing.assert_allclose(losses(gradient_descent(1.0, 2), tasks), whole, rtol=1e-12)


def test_the_meta_learner_takes_one_step_on_its_head():
    tasks = SineTasks(7).draw(named_generator(0, "x"), 5)
    meta = MetaLearner(named_generator(0, "w"))
    with torch.no_grad():
        meta.head.normal_(generator=named_generator(1, "w"))
    for t in range(5):
        head = meta.head.detach().clone().requires_grad_()
        loss = 0.5 * (meta.features(tasks.x[t]) @ head - tasks.y[t]).square().mean()
        (slope,) = torch.autograd.grad(loss, head)
        stepped = head - meta.rate * slope
        torch.testing.assert_close(meta(tasks)[t], stepped @ meta.features(tasks.x_query[t]))
    assert function_similarity(meta, meta, tasks, 5.0) == pytest.approx(
        {"prediction_difference": 0, "function_cosine": 1}, abs=1e-6
    )


# ---------------------------------------------------------------------------------------------------------- training

TINY = {"dims": 2, "demos": 6, "steps": 4, "batch_size": 16, "eval_tasks": 200, "device": "cpu"}


def test_training_finds_gradient_descent():
    """The default's claim, on problems small enough for a test: 2 % of the loss, model cosine above .99."""
    found = dualview.lab.regression(
        dims=4, demos=6, steps=700, batch_size=512, lr=3e-3, eval_tasks=20_000, shifts=False, device="cpu", seed=11
    ).results
    own = found["by_seed"]["11"]
    assert own["gd"]["ratio"] == pytest.approx(1, abs=0.02)
    assert own["gd"]["model_cosine"] > 0.99
    assert own["interpolated"]["loss"] == pytest.approx(found["references"]["gd"]["loss"], rel=0.02)
    assert found["references"]["gd"]["loss"] == pytest.approx(found["references"]["closed_form"]["loss"], rel=0.05)
    assert found["references"]["constructed"]["largest_difference_from_gd"] < 1e-5
    assert own["curve"]["step"][0] == 0 and own["curve"]["step"][-1] == 700
    assert own["curve"]["model_cosine"][-1] > own["curve"]["model_cosine"][0]


KINDS = {
    "default": {},
    "two recurrent layers": {"layers": 2},
    "two layers": {"layers": 2, "recurrent": False},
    "four layers": {"layers": 4, "eval_tasks": 50},
    "softmax, two heads": {"softmax": True, "heads": 2},
    "noise": {"noise": 0.3},
    "range": {"input_range": 4.0},
    "seeds": {"seeds": 3},
    "sine": {"task": "sine", "steps": 2},
    "sine, softmax": {"task": "sine", "steps": 2, "softmax": True, "heads": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_works(kind):
    given = {**TINY, **KINDS[kind]}
    if given.get("task") == "sine":
        given.pop("dims")
    result = dualview.lab.regression(**given)
    if kind in ("default", "sine"):  # bit for bit
        assert result.results == dualview.lab.regression(**given).results
    own, settings_ = result.results["by_seed"][str(result.seeds[0])], RegressionSettings.make(**given)
    assert (
        (own["interpolated"] is None) == (kind in ("two layers", "softmax, two heads")) if "sine" not in kind else True
    )
    if settings_.task == "linear":
        deep = settings_.layers > 1
        assert ("gd_plus_plus" in own) == deep == (result.results["references"]["gd_plus_plus"] is not None)
        assert (result.results["references"]["closed_form"] is None) == (deep or settings_.noise > 0)
        for shift in shifts_of(LinearTasks(2, 6)):
            assert len(own["shifts"][shift.name]) == len(result.results["shifts"][shift.name]["at"]) == len(shift.at)
    read = LabResult.model_validate_json(result.model_dump_json())
    shown = [table.markdown() for table in tables(read)]
    assert all("nan" not in text for text in shown) and set(figures(read)) == {"regression"}


def test_seeds_differ_and_share_their_problems():
    several = dualview.lab.regression(**TINY, seed=4, seeds=2, shifts=False).results["by_seed"]
    alone = dualview.lab.regression(**TINY, seed=5, shifts=False).results["by_seed"]
    assert several["5"] == alone["5"] and several["4"] != several["5"]


def test_the_papers_hyper_parameters():
    def plan(**given):
        return schedule_of(RegressionSettings.make(**given))

    assert plan().clip == plan(layers=2).clip == 1e-3 and plan(layers=3).clip == 10
    assert plan().lr == 1e-3 and plan(layers=4).lr == 5e-4 and plan().batch_size == 2048
    assert plan(softmax=True).clip == 10 and plan(softmax=True).lr == 3e-3
    assert plan(layers=2).steps == 5_000 and plan(layers=2, recurrent=False).steps == 50_000


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"noise": float("inf")}, "--noise: inf is not a finite number"),
        ({"noise": "nan"}, "--noise"),
        ({"input_range": "inf"}, "--input-range: inf is not a finite number"),
        ({"lr": "inf"}, "--lr: inf is not a finite number"),
        ({"input_range": 1e30}, "numbers are too large; .* --input-range"),
        ({"noise": 1e38}, "numbers are too large; give a smaller --noise"),
        ({"task": "sine", "noise": 1e38, "dims": 10}, "Before any training .* give a smaller --noise"),
        ({"task": "sine"}, "--dims and --input-range belong to the linear task"),
        ({"task": "sine", "dims": 10, "input_range": 2.0}, "--dims and --input-range belong to the linear task"),
    ],
)
def test_what_cannot_be_trained_on_is_told_before(given_, said):
    with pytest.raises(UserError, match=said):
        dualview.lab.regression(**{**TINY, **given_})


def test_a_diverged_training_says_so():
    with pytest.raises(UserError, match="diverged"):
        dualview.lab.regression(**{**TINY, "steps": 60}, lr=1e6, clip=1e12)


# ------------------------------------------------------------------------------------------------------------ a kill

LONG = {"dims": 3, "demos": 4, "steps": 1_500, "batch_size": 16, "eval_tasks": 300, "device": "cpu", "shifts": False}


def numbers(path: Path) -> dict[str, object]:
    content = json.loads(path.read_text())
    content["provenance"].pop("run")
    return content


def killed(code: str, out: Path) -> None:
    """Run some Python, and kill -9 it once it has written a second state."""
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until, seen = time.monotonic() + 90, set[int]()
    try:
        while len(seen) < 2:
            assert child.poll() is None and time.monotonic() < until, "it ended before it could be killed"
            seen |= {path.stat().st_mtime_ns for path in out.glob(".state-*/state.safetensors")}
            time.sleep(0.005)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert not (out / "regression.json").exists()


def test_killed_and_resumed_is_uninterrupted_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "dualview.lab.harness._write_figures", lambda figures, folder: []
    )  # seconds, and tested elsewhere
    out = tmp_path / "out"
    code = f"import dualview.lab; dualview.lab.regression(out={str(out)!r}, save_every=0.05, **{LONG!r})"
    killed(code, out)
    assert len(list(out.glob(".state-*"))) == 1
    other = dualview.lab.regression(**{**LONG, "steps": 20}, out=tmp_path / "out")  # another setting starts afresh
    assert other.results["by_seed"]["1"]["curve"]["step"][0] == 0
    assert len(list(out.glob(".state-*"))) == 1
    (out / "regression.json").unlink()
    parts: list[int] = []

    class Counting:
        def part(self, description, total):
            from contextlib import contextmanager

            @contextmanager
            def opened():
                yield lambda steps: parts.append(steps) if "training" in description else None

            return opened()

    dualview.lab.regression(**LONG, out=out, progress=Counting())
    assert parts[0] > 0, "it did not resume"
    dualview.lab.regression(**LONG, json=tmp_path / "whole.json")
    assert numbers(out / "regression.json") == numbers(tmp_path / "whole.json")
    assert not list(out.glob(".state-*"))
