"""The language lab from end to end, on a made-up text: numbers, merging, resuming, mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from dualview.cli.lab import add
from dualview.io.errors import UserError
from dualview.io.progress import Silent
from dualview.lab import harness as frame
from dualview.lab.harness import LabResult
from dualview.lab.language.report import figures, percent, summarise, tables
from dualview.lab.language.run import language
from dualview.lab.language.settings import PRESETS, LanguageSettings
from dualview.lab.language.training import curve_of
from dualview.models.loading import load_model
from equivalence.tiny import save_task

WORDS = ("the", "film", "was", "a", "story", "and", "plot", "of", "it", "fine", "dull", "cold", "warm", "very")


_WRITE_FIGURES = frame._write_figures


@pytest.fixture(autouse=True, scope="module")
def without_figures():
    """Drawing takes longer than the trainings; one test draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "_write_figures", lambda _figures, _folder: [])
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    draw = np.random.default_rng(0)
    documents = [" ".join(draw.choice(WORDS, 60)) + f" {n}." for n in range(150)]
    (folder / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
    save_task(folder / "task")
    return folder


def _options(place: Path, **more: Any) -> dict[str, Any]:
    small = {"d_model": 16, "layers": 2, "heads": 2, "context": 128, "batch": 1, "steps": 40, "warmup": 4, "vocab": 280}
    small |= {"eval_tokens": 300, "shots": 3, "n_queries": 6, "draws": 2, "device": "cpu"}
    return {"text": place / "text.txt", "tasks": str(place / "task" / "tiny.yaml"), **small, **more}


def _numbers(result: LabResult) -> dict[str, Any]:
    """All that two equal runs must agree on."""
    told = result.to_json()
    told["provenance"] = {key: value for key, value in told["provenance"].items() if key != "run"}
    return told


@pytest.fixture(scope="module")
def whole(place: Path) -> LabResult:
    """Two variants with two seeds each, and one with one."""
    only = "plain,momentum,linear"
    return language(out=place / "whole", json=place / "whole.json", only=only, seeds=2, **_options(place))


def test_every_training_and_measure_is_there(whole: LabResult, place: Path):
    trainings = whole.results["trainings"]
    assert [(t["variant"], t["seed"]) for t in trainings] == [
        ("plain", 1), ("plain", 2), ("momentum", 1), ("momentum", 2), ("linear", 1),
    ]  # fmt: skip
    assert json.loads((place / "whole.json").read_text()) == json.loads((place / "whole/language.json").read_text())
    for training in trainings:
        assert training["parameters"] == trainings[0]["parameters"] and training["status"] == "ok"
        [length] = training["held_out"].values()
        assert length["perplexity"] == pytest.approx(np.exp(np.mean(length["blocks"])))
        assert training["curve"]["loss"][-1] < training["curve"]["loss"][0]
        assert [task["task"] for task in training["few_shot"]] == ["tiny"]
    assert set(whole.provenance["run"]["cost"]) == {f"{t['variant']}/{t['seed']}" for t in trainings}
    assert whole.seeds == [1, 2] and whole.results["text"]["tokens"]["train"] > 1000


def test_same_weights_and_same_order_for_every_variant(place: Path):
    """Momentum with η = 0 is plain attention: it must end where the plain model ends."""
    found = language(only="plain,momentum", eta=0.0, **_options(place, steps=6)).results["trainings"]
    plain, momentum = ({k: v for k, v in t.items() if k in ("curve", "held_out", "few_shot", "tokens")} for t in found)
    assert plain["curve"] == momentum["curve"] and plain["tokens"] == momentum["tokens"] == 6 * 128
    assert plain["held_out"] == momentum["held_out"]


def test_tables_and_figures_come_from_the_file_alone(whole: LabResult, place: Path):
    read = LabResult.load(place / "whole" / "language.json")
    shown = "\n\n".join(table.markdown() for table in tables(read))
    assert (place / "whole" / "language.md").read_text().count("| momentum") >= 2
    assert shown in (place / "whole" / "language.md").read_text()
    assert set(figures(read)) == {"language"}
    assert "one seed, so no more than a hint" in shown and "over 2 seeds" in shown


def test_the_trained_model_is_kept_and_is_the_one_measured(whole: LabResult, place: Path):
    import torch

    from dualview.lab.gpt.training import block_losses

    lm = load_model(str(place / "whole" / "checkpoints" / "momentum-seed2" / "step-000040"), device="cpu")
    [stored] = (place / "whole").glob(".tokens-*/held_out.npy")
    tokens = torch.from_numpy(np.load(stored)[:301].astype(np.int32))
    found = block_losses(lm.model, tokens, 128, 128, 2)
    expected = next(t for t in whole.results["trainings"] if (t["variant"], t["seed"]) == ("momentum", 2))
    np.testing.assert_allclose(found, expected["held_out"]["128"]["blocks"], atol=1e-6)


def test_commands_with_parts_of_the_work_are_put_together(whole: LabResult, place: Path):
    out = place / "parts"
    first = language(out=out, only="plain", **_options(place))
    assert [t["variant"] for t in first.results["trainings"]] == ["plain"] and not first.results["differences"]
    language(out=out, only="momentum,plain", seed=2, **_options(place))
    last = language(out=out, only="momentum,linear", **_options(place))
    assert _numbers(last)["results"] == _numbers(whole)["results"]
    assert last.provenance["command"].replace("parts", "whole") == whole.provenance["command"]
    assert not list(out.glob(".state-*"))
    started = time.monotonic()
    again = language(out=out, only="plain,momentum,linear", seeds=2, **_options(place))
    assert _numbers(again) == _numbers(last) and time.monotonic() - started < 30


def test_other_settings_are_not_mixed_in(whole: LabResult, place: Path):
    with pytest.raises(UserError, match="another lr; choose another --out"):
        language(out=place / "whole", only="plain", **_options(place, lr=0.1))


_RUN = """
import sys, json
from pathlib import Path
from dualview.lab import harness as frame
from dualview.lab.language.run import language
given = json.loads(sys.argv[1])
language(**given)
"""


def test_killed_and_resumed_it_ends_in_the_same_numbers(place: Path):
    more = {"only": "momentum", "steps": 140, "learnable": True, "save_every": 0.01}
    given = {k: str(v) if isinstance(v, Path) else v for k, v in _options(place, **more).items()}
    reference = language(out=place / "uncut", **given)
    out = place / "cut"
    command = [sys.executable, "-c", _RUN, json.dumps({"out": str(out), **given})]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    limit = time.monotonic() + 120
    while not list(out.glob(".state-*/state.safetensors")) and time.monotonic() < limit:
        time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "language.json").exists()
    resumed = language(out=out, **given)
    assert resumed.provenance["run"]["cost"]["momentum/1"]["resumed"]
    expected, found = _numbers(reference), _numbers(resumed)
    assert found["results"] == expected["results"]
    learnt = reference.results["trainings"][0]["learnt"]
    assert len(learnt) == 2 and all(0 < eta < 1 and eta != 0.5 for eta in learnt)


def _kept(out: Path) -> set[str]:
    return {path.name for path in out.glob("checkpoints/plain-seed1/step-*")}


def test_models_to_keep_of_steps_already_passed_start_the_training_anew(place: Path, monkeypatch):
    class Stopped(Exception):
        pass

    def stop(*_given):
        raise Stopped

    out, given = place / "keep", _options(place, only="plain", save_every=1e-6)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("dualview.lab.language.training.perplexities", stop)
        language(out=out, **given)
    assert list(out.glob(".state-*/state.safetensors")) and _kept(out) == {"step-000040"}
    parts: list[str] = []

    class Listening(Silent):
        def part(self, description, total):
            parts.append(description)
            return super().part(description, total)

    found = language(out=out, progress=Listening(), keep_checkpoints=4, **given)
    assert _kept(out) == {"step-000000", "step-000001", "step-000004", "step-000040"}
    assert any("training again" in part for part in parts)
    assert not found.provenance["run"]["cost"]["plain/1"]["resumed"]


def test_a_training_that_the_time_limit_stops_keeps_its_model(place: Path):
    out, given = place / "short", _options(place, only="plain", steps=60, time_limit=1e-6, keep_checkpoints=3)
    found = language(out=out, **given)
    assert found.results["trainings"][0]["status"] == "time limit"
    assert _kept(out) == {"step-000000", "step-000001", "step-000020"}
    marked = out / "checkpoints/plain-seed1/step-000020/marked"
    marked.touch()
    language(out=out, **given)
    assert marked.is_file(), "it was trained again"


def test_through_the_command_line(place: Path, monkeypatch):
    monkeypatch.setattr(frame, "_write_figures", _WRITE_FIGURES)
    app = typer.Typer()
    add(app)
    words = [
        "lab",
        "language",
        "--only",
        "alibi",
        "--only",
        "plain",
        "--out",
        str(place / "cli"),
        "--json",
        str(place / "c.json"),
    ]
    for name, value in _options(place, steps=4, warmup=1).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "ALiBi" in done.output and "wrote" in done.output
    assert (place / "cli" / "language.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((place / "c.json").read_text())
    assert set(told) == {"lab", "settings", "seeds", "results", "provenance"} and told["lab"] == "language"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"only": "plain,moment"}, "no variant moment"),
        ({"d_model": 10, "heads": 4}, "even multiple"),
        ({"only": "plain,plain"}, "--only: plain is given twice"),
        ({"lr": "inf"}, "--lr: inf is not a finite number"),
        ({"eta": 1.0}, r"\[0, 1\)"),
        ({"eta": 0.0, "learnable": True}, "start above 0"),
        ({"warmup": 50, "steps": 10}, "longer than"),
        ({"preset": "huge"}, "--preset"),
        ({"data": "/nowhere", "tasks": ()}, "There is no folder"),
        ({"steps": 0}, "--steps"),
        ({"text": "/nowhere.txt"}, "no text file"),
        ({"context": 500_000, "eval_tokens": 500_000}, "are needed"),
        ({"eval_tokens": 127}, "--eval-tokens 127 is less than one block of --context 128"),
        ({"context": 32}, "Task tiny: .* give a larger --context"),
    ],
)
def test_mistakes_are_one_sentence_before_any_work(place: Path, given, said):
    with pytest.raises(UserError, match=said):
        language(**{**_options(place), **given})


def test_presets_lie_under_what_is_given():
    chosen = LanguageSettings.make(preset="h200", steps="7", warmup=2, only="plain")
    assert (chosen.d_model, chosen.steps, chosen.only, chosen.precision) == (512, 7, ("plain",), "bfloat16")
    assert len(LanguageSettings.make(preset="h200").trainings) == 17
    assert LanguageSettings.make().trainings == [(name, 1) for name in ("plain", "momentum", "token_shift", "alibi")]
    assert set(PRESETS["h200"]) <= set(vars(chosen))
    assert chosen.lengths == [256, 512, 1024] and LanguageSettings.make(context=512).lengths == [256, 512]


def test_the_h200_preset_has_the_parameters_it_says():
    chosen = LanguageSettings.make(preset="h200")
    d, width = chosen.d_model, -(-8 * chosen.d_model // 24) * 8
    count = chosen.vocab * d + chosen.layers * (4 * d * d + 3 * d * width + 2 * d) + d
    assert 35e6 < count < 36.5e6


@pytest.mark.parametrize(("keep", "steps"), [(0, []), (1, [400]), (2, [0, 400]), (4, [0, 4, 40, 400])])
def test_checkpoints_come_ever_less_often(keep, steps):
    assert LanguageSettings.make(keep_checkpoints=keep, steps=400).keep_at == steps


def test_curves_average_and_leave_out_what_is_not_finite():
    assert curve_of([3.0, float("nan"), 1.0, 1.0], points=2) == {"step": [4], "loss": [1.0]}
    assert curve_of([1.0, 2.0], points=100) == {"step": [1, 2], "loss": [1.0, 2.0]}
    assert curve_of([]) == {"step": [], "loss": []}


def _made_up(name: str, seed: int, shift: float, blocks: int = 40) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    losses = 4 + draw.standard_normal(blocks) + shift + 0.01 * np.random.default_rng(99).standard_normal(blocks)
    return {
        "variant": name, "seed": seed, "parameters": 10, "status": "ok", "steps": 2, "saved_bytes": 5,
        "curve": {"step": [1, 2], "loss": [5.0, 4.0]}, "few_shot": [],
        "held_out": {"256": {"loss": float(losses.mean()), "perplexity": 50.0, "blocks": losses.tolist()}},
    }  # fmt: skip


def test_differences_are_paired_by_seed_and_block():
    """Noise shared by both sides is a hundred times the shift, and the shift is found all the same."""
    trainings = [_made_up(n, s, d) for s in (1, 2, 3) for n, d in (("plain", 0.0), ("momentum", -0.02), ("alibi", 0.0))]
    found = summarise(trainings, [256])
    by = {(each["variant"], each["against"]): each["loss"]["256"] for each in found["differences"]}
    assert set(by) == {("momentum", "plain"), ("alibi", "plain"), ("momentum", "alibi")}
    assert by["momentum", "plain"]["mean"] == pytest.approx(-0.02)
    assert by["momentum", "plain"]["ci"][1] < 0 and by["momentum", "plain"]["over"] == "seeds"
    assert by["alibi", "plain"]["mean"] == pytest.approx(0.0, abs=1e-12)
    assert found["sentences"][0].startswith("momentum is better than plain softmax: -1.98 %")
    assert "cannot be distinguished from" in found["sentences"][1]


def test_a_diverged_training_is_told_and_leaves_the_others_whole():
    broken = {**_made_up("linear", 1, 0.0), "held_out": None, "status": "diverged", "curve": {"step": [], "loss": []}}
    found = summarise([_made_up("plain", 1, 0.0), broken], [256])
    assert found["sentences"] == ["linear cannot be compared with plain softmax: a training diverged."]
    text = {"source": ["x"], "tokens": {"train": 1, "held_out": 1}, "tokenizer": "", "vocab": 1, "held_out": ""}
    more = {"lengths": [256], "held_out_tokens": 1, "trainings": [], "text": text}
    keys = ("seconds_per_step", "processor_seconds_per_step", "peak_bytes")
    costs = {f"{name}/1": {**dict.fromkeys(keys), "machine": "cpu"} for name in ("plain", "linear")}
    where = {"run": {"cost": costs}}
    result = LabResult(lab="language", settings={}, seeds=[1], results={**found, **more}, provenance=where)
    assert "linear (diverged)" in tables(result)[0].markdown()


def test_percent():
    assert percent(0.0) == 0.0 and percent(-0.02) == pytest.approx(-1.98, abs=0.01)
