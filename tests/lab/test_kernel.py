"""The kernel lab: estimates against explicit features, the predicted number against draws, and a small run."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dualview.duality.theory.features import (
    log10_features_needed,
    random_directions,
    random_estimates,
    random_features,
)
from dualview.duality.theory.kernel import kernel_model
from dualview.io.errors import UserError
from dualview.lab import harness as frame
from dualview.lab.harness import LabResult
from dualview.lab.kernel.heads import HeadGroup, model_groups, random_groups
from dualview.lab.kernel.measure import (
    errors,
    feature_errors,
    gram_errors,
    in_gram_features,
    loss_decreases,
    mixed,
    predictions,
    training,
)
from dualview.lab.kernel.report import figures, tables
from dualview.lab.kernel.run import _reached, kernel
from dualview.models.loading import load_model
from equivalence.tiny import save_model, save_task

MAPS = {kind: partial(random_features, kind=kind) for kind in ("positive", "trigonometric")}
_WRITE_FIGURES = frame._write_figures


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    """Drawing takes longer than the measurements; one test draws."""
    monkeypatch.setattr(frame, "_write_figures", lambda _figures, _folder: [])


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kernel")
    save_model(folder / "model")
    save_task(folder / "task")
    return folder


def a_group(seed: int, d: int = 6, n: int = 9, heads: int = 2, size: float = 0.7) -> HeadGroup:
    draw = torch.Generator().manual_seed(seed)
    keys, values, queries = (torch.randn(d, count, generator=draw, dtype=torch.float64) for count in (n, n, heads))
    return HeadGroup(size * keys, values, size * queries, range(1, n - 2))


# ------------------------------------------------------------------------------------------------------------ features


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("orthogonal", [False, True])
def test_estimates_are_those_of_explicit_features(kind, orthogonal):
    group = a_group(1, size=0.3)
    for m in (16, 48):
        count = m if kind == "positive" else m // 2
        directions = random_directions(6, count, torch.Generator().manual_seed(5), orthogonal)
        found = random_estimates(kind, group.keys, group.queries, directions, [4, 16, m] if m > 16 else [4, m])[-1]
        model = kernel_model(group.head(0), MAPS[kind](m, 5, orthogonal))
        expected = model.predict(model.step(0.3))
        torch.testing.assert_close(mixed(found, group.values)[:, 0], expected, rtol=1e-9, atol=1e-12)


def test_trigonometric_features_are_unbiased():
    points = a_group(2).keys * 0.5
    phi = random_features(400_000, 0, kind="trigonometric")(points)
    np.testing.assert_allclose((phi.T @ phi).numpy(), torch.exp(points.T @ points).numpy(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", MAPS)
def test_long_points_do_not_overflow(kind):
    group = a_group(3, size=60.0)  # exp(‖z‖²/2) and exp(kᵀq) are far beyond float64
    directions = random_directions(6, 64, torch.Generator().manual_seed(0))
    found = mixed(random_estimates(kind, group.keys, group.queries, directions, [4, 16, 64]), group.values)
    assert bool(torch.isfinite(found).all())
    assert math.isfinite(log10_features_needed(kind, group.keys, group.values, group.queries[:, 0], 0.1))


@pytest.mark.parametrize("kind", MAPS)
def test_the_predicted_number_gives_that_error(kind):
    group = a_group(4, heads=1, size=0.35)
    log = log10_features_needed(kind, group.keys, group.values, group.queries[:, 0], 0.05)
    m = round(10**log / 2) * 2
    exact = mixed(group.weights(), group.values)
    count = m if kind == "positive" else m // 2
    squares = []
    for seed in range(400):
        directions = random_directions(6, count, torch.Generator().manual_seed(seed))
        found = mixed(random_estimates(kind, group.keys, group.queries, directions, [m]), group.values)
        squares.append(float(errors(found, exact)) ** 2)
    assert math.sqrt(np.mean(squares)) == pytest.approx(0.05, rel=0.12)
    # the prediction follows the wrong kind's formula by far more than this tolerance
    other = "positive" if kind == "trigonometric" else "trigonometric"
    wrong = log10_features_needed(other, group.keys, group.values, group.queries[:, 0], 0.05)
    assert abs(wrong - log) > 0.15


def test_the_control_keeps_the_largest_weights():
    group = a_group(5)
    directions = random_directions(6, 16, torch.Generator().manual_seed(0))
    found = feature_errors(group, directions, [1, 3, 16], 0.1)
    weights = group.weights()
    for head in range(2):
        order = sorted(range(9), key=lambda t, head=head: -float(weights[t, head]))
        total = sum(float(weights[t, head]) for t in order[:3])
        kept = sum(float(weights[t, head]) / total * group.values[:, t] for t in order[:3])
        full = group.values @ weights[:, head]
        expected = float((kept - full).norm() / full.norm())
        assert found["errors"]["largest weights"][head][1] == pytest.approx(expected, rel=1e-9)
        assert found["errors"]["largest weights"][head][2] == pytest.approx(0, abs=1e-12)
        even = float((group.values.mean(1) - full).norm() / full.norm())
        assert found["uniform"][head] == pytest.approx(even, rel=1e-9)
    # centring keys changes the features, not the attention
    torch.testing.assert_close(group.centred().weights(), weights)
    assert found["errors"]["positive"] != found["errors"]["positive, centred keys"]


def test_reached_is_where_the_error_stays_below():
    assert _reached(np.array([0.05, 0.2, 0.1, 0.01]), [1, 2, 4, 8], 0.1) == 4
    assert _reached(np.array([0.05, 0.02]), [1, 2], 0.1) == 1
    assert _reached(np.array([0.05, 0.2]), [1, 2], 0.1) is None


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("seed", range(3))
def test_the_dual_model_token_by_token(seed):
    """Each ŷ_t is the theorem's own W_t φ(q) in exact features, and the last is the head's output."""
    group = random_groups(seed, 1)[0]
    n = len(group.demos)
    paths = predictions(group, torch.arange(n)[:, None])
    model = kernel_model(group.head(0))
    weights = [model.initial(), *model.token_steps(0.7)]
    assert len(weights) == n + 1
    by_theorem = torch.stack([model.predict(weight) for weight in weights])
    torch.testing.assert_close(paths[..., 0], by_theorem, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(in_gram_features(group, 0), by_theorem, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(paths[-1, :, 0], group.head(0).output(), rtol=1e-9, atol=1e-12)
    losses = torch.stack([model.loss(weight, 0.7) for weight in weights])
    expected = (losses[:-1] - losses[1:]) / (losses[0] - losses[-1])
    torch.testing.assert_close(loss_decreases(group), expected, rtol=1e-9, atol=1e-12)
    assert max(gram_errors(group)) < 1e-9


def test_orders_and_their_numbers():
    group = a_group(6)
    found = training(group, torch.Generator().manual_seed(0), 0.3)
    starts = {order: found[order]["curve"][0][0] for order in ("prompt", "shuffled", "attention")}
    assert len(set(starts.values())) == 1  # W_0 does not depend on the order
    assert all(found[order]["curve"][1][-1] == 0 for order in starts)
    n, demos = len(group.demos), group.weights()[1:7]
    largest = int(demos[:, 0].argmax()) + 1
    full = group.values @ group.weights()[:, 0]
    rest = sum(group.weights()[t, 0] * group.values[:, t] for t in range(1, 7) if t != largest)
    by_weight = predictions(group, demos.argsort(dim=0, descending=True))
    torch.testing.assert_close(by_weight[1, :, 0], full - rest)
    path = errors(predictions(group, torch.arange(n)[:, None].expand(n, 2)), full[:, None].expand(-1, 2))[0]
    until = next(t for t in range(n + 1) if bool((path[t:] <= 0.3).all()))
    assert found["prompt"]["until"][0] == pytest.approx(until / n)


# ------------------------------------------------------------------------------------------------------------- the lab


def _options(place: Path, **more):
    return {
        "model": str(place / "model"),
        "task": str(place / "task" / "tiny.yaml"),
        "device": "cpu",
        "shots": 3,
        "draws": 2,
        "features": 64,
        "layers": 4,
        **more,
    }


def test_heads_of_a_model_are_its_own(place: Path):
    lm = load_model(str(place / "model"), dtype="float64", device="cpu")
    groups = model_groups(lm, [1, 5, 6, 12, 13, 14, 15, 16], range(1, 5))
    assert len(groups) == 3 * 2 and groups[0].queries.shape[1] == 2
    for group in groups:
        assert group.output is not None
        torch.testing.assert_close(mixed(group.weights(), group.values), group.output, rtol=1e-9, atol=1e-12)
        assert max(gram_errors(group)) < 1e-9


def test_the_lab_on_a_tiny_model(place: Path, monkeypatch):
    monkeypatch.setattr(frame, "_write_figures", _WRITE_FIGURES)
    first = kernel(out=place / "out", **_options(place))
    told = json.loads((place / "out" / "kernel.json").read_text())
    again = kernel(**_options(place))
    assert again.results == first.results == told["results"] and first.seeds == [1, 2]
    assert first.results["model"]["heads"] == 12 and first.results["model"]["gram"]["largest"] < 1e-9
    assert first.results["sizes"] == [16, 32, 64]
    read = LabResult.load(place / "out" / "kernel.json")
    assert "\n\n".join(t.markdown() for t in tables(read)) in (place / "out" / "kernel.md").read_text()
    assert set(figures(read)) == {path.stem for path in (place / "out").glob("*.png")}
    assert not list((place / "out").glob(".state-*"))
    other = kernel(**_options(place, seed=2, draws=1))
    assert other.results["random"]["errors"] != first.results["random"]["errors"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"features": 8}, "--features"),
        ({"target": 1.5}, "--target"),
        ({"directions": "parallel"}, "--directions"),
        ({"model": "/nowhere"}, "no model folder"),
    ],
)
def test_mistakes_are_one_sentence(place: Path, given, said):
    with pytest.raises(UserError, match=said):
        kernel(out=place / "none", **_options(place, **given))
    assert not (place / "none").exists()
