"""Comparisons through a training: which checkpoints, whose numbers, what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dualview
from dualview.io.errors import UserError
from dualview.lab import harness as frame
from dualview.lab.dynamics.report import figures, summarise, tables
from dualview.lab.dynamics.run import dynamics, find_checkpoints
from dualview.lab.harness import LabResult
from equivalence.tiny import save_model, save_task


@pytest.fixture(autouse=True, scope="module")
def without_figures():
    """Drawing takes longer than the comparisons."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "_write_figures", lambda _figures, _folder: [])
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dynamics")
    save_task(folder / "task")
    for step in (0, 100):
        save_model(folder / "checkpoints" / "plain-seed1" / f"step-{step:06d}", seed=step)
    return folder


def _options(place: Path, **more: Any) -> dict[str, Any]:
    asked = {"shots": 4, "n_queries": 8, "draws": 2, "lr": 0.01, "device": "cpu"}
    return {"checkpoints": place, "task": str(place / "task" / "tiny.yaml"), **asked, **more}


def test_every_checkpoint_is_compared_as_run_would(place: Path):
    result = dynamics(out=place / "out", json=place / "d.json", **_options(place))
    told = json.loads((place / "d.json").read_text())
    assert set(told) == {"lab", "settings", "seeds", "results", "provenance"}
    points = told["results"]["points"]
    assert [point["step"] for point in points] == [0, 100] and told["seeds"] == [1, 2]
    folder = place / "checkpoints" / "plain-seed1" / "step-000100"
    asked = {"task": str(place / "task" / "tiny.yaml"), "shots": 4, "n_queries": 8, "lr": 0.01, "device": "cpu"}
    ours, singles = points[1], [dualview.compare(model=str(folder), seed=seed, **asked) for seed in (1, 2)]
    for index, single in enumerate(singles):
        draw = ours["draws"][index]
        assert draw["sim_aou"]["raw"] == pytest.approx(single.sim_aou.raw)
        assert draw["accuracy"]["icl"] == single.accuracy.icl and draw["lr"] == 0.01
        assert ours["numbers"]["sim_aou.raw"]["values"][index] == pytest.approx(single.sim_aou.raw)
        assert draw["verdict"] == single.verdict.overall
    floors = [single.to_json()["controls"] for single in singles]
    for name, value in ours["floors"]["sim_aou"].items():
        known = [each["sim_aou"]["floors"][name] for each in floors if each["sim_aou"]["floors"][name] is not None]
        assert value == (pytest.approx(np.mean(known)) if known else None)
    assert not list((place / "out").glob(".state-*"))
    read = LabResult.load(place / "out" / "dynamics.json")
    assert "\n\n".join(t.markdown() for t in tables(read)) in (place / "out" / "dynamics.md").read_text()
    assert set(figures(read)) == {"dynamics-plain-seed1"}
    likeness = tables(read)[0]
    assert {row[4] for row in likeness.rows} <= {"0 of 2", "1 of 2", "2 of 2"}
    assert f"{likeness.columns[4]}: draws in which".capitalize() in likeness.note
    assert dynamics(**_options(place)).results == result.results


def test_it_trains_first_where_there_are_no_checkpoints(place: Path, monkeypatch):
    """The language lab's training, made tiny, of a variant: its prompts are run whole."""
    from dualview.lab.language import settings as language_settings

    tiny = {"d_model": 16, "layers": 2, "heads": 2, "context": 256, "vocab": 300, "eval_tokens": 300, "batch": 1}
    monkeypatch.setitem(language_settings.PRESETS, "small", tiny)
    (place / "text.txt").write_text("\n\n".join(f"the film was fine {n} " * 30 for n in range(150)), encoding="utf-8")
    options = _options(place, checkpoints=None, text=place / "text.txt", steps=4, points=3, draws=1, variant="momentum")
    result = dynamics(out=place / "first", **options)
    assert [point["step"] for point in result.results["points"]] == [0, 1, 4]
    assert len({point["weights_hash"] for point in result.results["points"]}) == 3
    assert result.results["points"][0]["numbers"]["sim_aou.raw"]["ci"] is None
    assert (place / "first" / "training" / "language.json").is_file()
    assert tables(result)


def _point(step: int, above: list[bool], verdict: str = "indistinguishable") -> dict[str, Any]:
    numbers = {"accuracy.icl": {"mean": 0.6}, "accuracy.zsl": {"mean": 0.5}}
    draws = [{"sim_aou": {"above_every_floor": each}} for each in above]
    return {"training": "t", "step": step, "numbers": numbers, "draws": draws, "verdicts": {verdict: len(above)}}


@pytest.mark.parametrize(
    ("above", "since", "said"),
    [
        ([False, False, False], None, "is not above"),
        ([False, True, True], 10, "from step 10 of 100 on"),
        ([True, False, True], 100, "from step 100 of 100 on"),
        ([True, True, True], 0, "before any learning"),
        ([True, True, False], None, "at step 100 raw SimAOU is not above"),
    ],
)
def test_when_it_appears(above, since, said):
    points = [_point(step, [each, True]) for step, each in zip((0, 10, 100), above, strict=True)]
    found = summarise(points)["trainings"]["t"]
    assert found["above_floors_from"] == since and said in found["sentence"]
    assert found["above_floors_at"] == [p["step"] for p, each in zip(points, above, strict=True) if each]


def test_checkpoints_are_found_from_any_level_and_in_order(place: Path, tmp_path: Path):
    levels = (place, place / "checkpoints", place / "checkpoints" / "plain-seed1")
    assert len({tuple(find_checkpoints(level)) for level in levels}) == 1
    assert [each.step for each in find_checkpoints(place)] == [0, 100]
    with pytest.raises(UserError, match="holds no checkpoints"):
        find_checkpoints(tmp_path)
    with pytest.raises(UserError, match="There is no folder"):
        find_checkpoints(tmp_path / "none")


@pytest.mark.parametrize(
    ("given", "said"),
    [({"variant": "nope"}, "no variant nope"), ({"lr": -1}, "--lr"), ({"task": "nope"}, "not in the library")],
)
def test_mistakes_are_one_sentence(place: Path, given, said):
    with pytest.raises(UserError, match=said):
        dynamics(**_options(place, **given))
