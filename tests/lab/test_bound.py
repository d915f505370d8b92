"""The bound lab: losses against the explicit dual model, the slopes, and a run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dualview.duality.theory.kernel import Head, generalisation_bound, kernel_model
from dualview.io.errors import UserError
from dualview.lab import harness as frame
from dualview.lab.bound.report import figures, slope, tables
from dualview.lab.bound.run import bound, measured
from dualview.lab.harness import LabResult
from dualview.lab.kernel.heads import HeadGroup, random_groups
from equivalence.tiny import save_model, save_task


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    monkeypatch.setattr(frame, "_write_figures", lambda _figures, _folder: [])


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bound")
    save_model(folder / "model")
    save_task(folder / "task")
    return folder


@pytest.mark.parametrize("shuffled", [False, True])
def test_losses_are_those_of_the_dual_model(shuffled):
    """By explicit features: one step on the sampled tokens, its loss there and on all that no sample has."""
    group = random_groups(3, 1, demos=40)[0]
    sizes, delta = [4, 8, 16], 0.1
    found = measured(group, sizes, torch.Generator().manual_seed(7), delta, shuffled=shuffled)
    draw, keys, values = torch.Generator().manual_seed(7), group.keys[:, :40], group.values[:, :40]
    if shuffled:
        values = values[:, torch.randperm(40, generator=draw)]
    order = torch.randperm(40, generator=draw)
    for at, n in enumerate(sizes):
        s, fresh = order[:n], order[16:]
        nothing = keys[:, :0]
        # Own tokens with values of 0 leave W as it is and give features to the fresh tokens; D is then corrected.
        head = Head(keys[:, s], values[:, s], keys[:, fresh], 0 * values[:, fresh], group.queries[:, 0])
        model = kernel_model(head)
        weight = model.step(1.0) * model.normaliser / (model.query @ model.demo_features.sum(1))
        empirical = -(values[:, s] * (weight @ model.demo_features)).sum(0).mean()
        expected = -(values[:, fresh] * (weight @ model.own_features)).sum(0).mean()
        assert found["empirical"][at] == pytest.approx(float(empirical), rel=1e-9)
        assert found["expected"][at] == pytest.approx(float(expected), rel=1e-9)
        assert found["gap"][at] == pytest.approx(float(expected - empirical), rel=1e-7)
        said = generalisation_bound(Head(keys[:, s], values[:, s], nothing, values[:, :0], group.queries[:, 0]), delta)
        assert said.empirical == pytest.approx(found["empirical"][at], rel=1e-9)
        assert found["slack"][at] == pytest.approx(said.bound - said.empirical, rel=1e-9)


def test_signal_carries_over_and_shuffled_values_do_not():
    draw = torch.Generator().manual_seed(0)
    keys = 0.5 * torch.randn(3, 600, generator=draw, dtype=torch.float64)
    group = HeadGroup(keys, keys.clone(), keys[:, :1], range(600))  # the value is the key
    plain, control = (measured(group, [4, 256], draw, 0.05, shuffled=shuffled) for shuffled in (False, True))
    assert plain["share"][1] == pytest.approx(plain["expected"][1] / plain["empirical"][1]) and plain["share"][1] > 0.7
    assert abs(control["share"][1]) < 0.4
    assert control["gap"][0] > control["gap"][1] > 0


def test_a_bound_beyond_float64_is_missing():
    group = random_groups(1, 1, demos=20)[0]
    long = HeadGroup(40 * group.keys, group.values, 40 * group.queries, group.demos)
    found = measured(long, [4, 8], torch.Generator().manual_seed(0), 0.05)
    assert all(value != value for value in found["slack"])  # NaN


def test_slopes():
    assert slope([4, 8, 16], [1.0, 0.5, 0.25]) == pytest.approx(-1)
    assert slope([4, 8, 16], [1.0, 0.5, -0.1]) is None


def _options(place: Path, **more):
    where = {"model": str(place / "model"), "task": str(place / "task" / "tiny.yaml"), "device": "cpu"}
    return {**where, "shots": 4, "draws": 2, "most": 8, "population": 32, "layers": 3, **more}


def test_the_lab_on_a_tiny_model(place: Path):
    first = bound(out=place / "out", **_options(place))
    told = json.loads((place / "out" / "bound.json").read_text())
    assert bound(**_options(place)).results == first.results == told["results"]
    assert first.results["sizes"] == [4, 8] and first.results["kv_heads"] == 6
    read = LabResult.load(place / "out" / "bound.json")
    assert "\n\n".join(t.markdown() for t in tables(read)) in (place / "out" / "bound.md").read_text()
    assert set(figures(read)) == {"bound"} and not list((place / "out").glob(".state-*"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"most": 64}, "some of which must stay fresh"),
        ({"delta": 1.0}, "--delta"),
        ({"draws": 1}, "--draws"),
    ],
)
def test_mistakes_are_one_sentence(place: Path, given, said):
    with pytest.raises(UserError, match=said):
        bound(out=place / "none", **_options(place, **given))
    assert not (place / "none").exists()
