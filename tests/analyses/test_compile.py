"""Patches compiled from demonstrations: what is written is what was fitted, and only its own model may wear it."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from dualview.analyses.compile import _rows, best_patch, compile_patch
from dualview.analyses.finetune import finetune_adapter
from dualview.analyses.scores import divergence, score_setting
from dualview.cli import main as cli
from dualview.comparison.controls.settings import flipped_labels
from dualview.comparison.prepare import prepare
from dualview.duality.on_model.block_patches import BlockPatch, BlockPatches, LowRank
from dualview.duality.on_model.feed_forward import feed_forwards
from dualview.duality.on_model.shared_patch import load_patch, load_twin, read_metadata, save_patch
from dualview.io.errors import UserError
from dualview.models.loading import adopt, load_model
from dualview.models.scoring import PassPlan, ask
from dualview.options import RunOptions
from dualview.tasks.prompts import Query
from equivalence import tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compile")
    tiny.save_model(folder / "model")
    tiny.save_model(folder / "other", seed=5)
    tiny.save_model(folder / "gpt2", learnt_positions=True)
    tiny.save_task(folder, selection=24, validation=14)
    return folder


@pytest.fixture(scope="module")
def lm(place):
    return load_model(str(place / "model"), dtype="float64")


@pytest.fixture(scope="module")
def compiled(place, lm):
    return compile_patch(
        out=place / "out" / "patch.safetensors",
        model=lm,
        task=str(place / "tiny.yaml"),
        shots=5,
        fit_rows=10,
        lr=0.05,
        ridges=(1e-6, 0.1, 10.0),
    )


def test_the_file_is_worn_as_it_was_fitted(compiled, place, lm):
    patch = load_patch(compiled.path, lm)
    query = [Query((5, 6, 7, 8), ((9,), (10, 11)), 0)]
    again = compile_patch(
        out=place / "again.safetensors",
        model=lm,
        task=str(place / "tiny.yaml"),
        shots=5,
        fit_rows=10,
        lr=0.05,
        ridges=(compiled.ridge,),
        baselines=False,
    )
    assert again.path.read_bytes() == compiled.path.read_bytes()
    how = PassPlan((1,), 1, record=False)
    worn = ask(lm, query, how, patch).settings[0].log_probs
    assert np.isfinite(worn).all() and not np.allclose(worn, ask(lm, query, how).settings[0].log_probs)
    assert set(again.settings) == {"zsl", "icl", "patch"} and again.lr is None and again.task_vector_layer is None
    np.testing.assert_allclose(again.settings["patch"].log_probs, compiled.settings["patch"].log_probs)


def test_the_report(compiled):
    assert list(compiled.settings) == ["zsl", "icl", "ft", "task_vector", "patch"]
    assert compiled.fitted == 10 and compiled.n_queries == 14 and compiled.lr == 0.05
    assert compiled.settings["icl"].agreement == 1.0 and compiled.settings["icl"].divergence == 0.0
    best = min(compiled.trials, key=lambda trial: trial.divergence)
    assert compiled.ridge == best.ridge and len(compiled.trials) == 3
    content = json.loads(json.dumps(compiled.to_json(), allow_nan=False))
    assert content["settings"]["patch"]["accuracy"] == compiled.settings["patch"].accuracy
    assert content["bytes"] == compiled.path.stat().st_size
    assert content["provenance"]["weights_hash"] and set(content["provenance"]["run"]["seconds"]) >= {"fit", "showings"}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(compiled.table())
    text = console.export_text()
    assert "compiled patch" in text and "task vector" in text and "same answer as ICL" in text


def test_the_patch_is_nearer_to_in_context_than_zero_shot_is(compiled):
    assert compiled.settings["patch"].divergence < compiled.settings["zsl"].divergence


def test_the_metadata_says_what_it_was_made_of(compiled, lm):
    header = read_metadata(compiled.path)
    assert header["weights_hash"] == lm.weights_hash and header["task"] == "tiny" and header["shots_used"] == 5
    assert header["ridge"] == compiled.ridge and header["seed"] == 1 and len(header["demos_hash"]) == 64
    assert header["carriers"] == [f"model.layers.{i}.mlp.down_proj" for i in range(3)]


def test_other_weights_are_refused(compiled, place):
    for name, dtype in (("other", "float64"), ("model", "float32"), ("gpt2", "float64")):
        with pytest.raises(UserError, match="was made for the weights of"):
            load_patch(compiled.path, load_model(str(place / name), dtype=dtype))


def test_biased_carriers_go_to_disk_and_back(place):
    lm = load_model(str(place / "gpt2"), dtype="float64")
    found = compile_patch(
        out=place / "gpt2.safetensors", model=lm, task=str(place / "tiny.yaml"), shots=3, fit_rows=6, baselines=False
    )
    patch = load_patch(found.path, lm)
    assert len(patch.blocks) == 3 and found.settings["patch"].accuracy >= 0


def test_norms_at_the_end_go_to_disk_and_back(tmp_path):
    from equivalence.cases import lm as zoo_lm

    lm = zoo_lm("gemma2-softcap")
    places = feed_forwards(lm)
    draw = torch.Generator().manual_seed(0)
    blocks = tuple(
        BlockPatch(
            place,
            LowRank(*(torch.randn(2, 32, generator=draw, dtype=torch.float64) for _ in range(2))),
            torch.randn(32, generator=draw, dtype=torch.float64),
        )
        for place in places
    )
    header = {"weights_hash": lm.weights_hash, "model": "gemma2"}
    path = save_patch(tmp_path / "p.safetensors", BlockPatches(blocks), lm, header)
    back = load_patch(path, lm)
    for one, two in zip(back.blocks, blocks, strict=True):
        assert one.readers is not None and two.readers is not None
        assert torch.equal(one.readers.left, two.readers.left) and torch.equal(one.carrier, two.carrier)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"not safetensors at all", "not a readable patch"),
        (None, "no patch file"),
        ({}, "not a patch of schema"),
        ({"dualview": "[]"}, "not a patch of schema"),
        ({"dualview": "{"}, "not a readable patch"),
    ],
)
def test_bad_files_are_told(tmp_path, lm, content, sentence):
    path = tmp_path / "bad.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file({"x": torch.zeros(1)}, path, content)
    with pytest.raises(UserError, match=sentence):
        load_patch(path, lm)


def test_a_file_without_its_tensors_is_told(tmp_path, compiled, lm):
    path = tmp_path / "torn.safetensors"
    header = {"schema": "dualview.patch/1", **read_metadata(compiled.path)}
    save_file({"x": torch.zeros(1)}, path, {"dualview": json.dumps(header)})
    with pytest.raises(UserError, match="lacks a part of block 0;"):
        load_patch(path, lm)
    own = {name: tensor for name, tensor in load_file(compiled.path).items() if "/" not in name}
    save_file(own, path, {"dualview": json.dumps(header)})
    assert torch.equal(
        load_patch(path, lm).blocks[0].carrier.left, load_patch(compiled.path, lm).blocks[0].carrier.left
    )
    with pytest.raises(UserError, match="lacks a part of block 0 of its twin;"):
        load_twin(path, lm)


def same(one, two):
    """Whether two patches have the same numbers."""
    parts = [[(b.readers, b.carrier) for b in each.blocks] for each in (one, two)]
    pairs = [(a, b) for own, other in zip(*parts, strict=True) for a, b in zip(own, other, strict=True)]
    return all(torch.equal(a.left, b.left) and torch.equal(a.right, b.right) for a, b in pairs)


def test_a_patch_goes_to_disk_and_back_with_its_twin_and_without(tmp_path, compiled, lm):
    patch, twin = load_patch(compiled.path, lm), load_twin(compiled.path, lm)
    header = read_metadata(compiled.path)
    assert twin is not None and not same(patch, twin) and header["twin"] is True and header["no_twin"] is None
    kept = {name: header[name] for name in ("weights_hash", "model")}
    both = save_patch(tmp_path / "both", patch, lm, kept, twin)
    assert same(load_patch(both, lm), patch) and same(load_twin(both, lm), twin)
    alone = save_patch(tmp_path / "alone", patch, lm, kept)
    assert same(load_patch(alone, lm), patch) and load_twin(alone, lm) is None
    assert both.stat().st_size > 1.9 * alone.stat().st_size


def test_the_twin_is_fitted_on_the_same_rows_with_the_same_ridge(tmp_path, place, lm):
    """Rows that do not fit behind the flipped labels, which are longer here, are in neither fit."""
    texts = {"demos": "the film was a", "queries": "a film"}
    for name, text in texts.items():
        tiny.write_rows(tmp_path / f"{name}.jsonl", [{"text": text, "label": 1}, {"text": f"{text} plot", "label": 1}])
    given = {name: tmp_path / f"{name}.jsonl" for name in texts} | {"task": str(place / "tiny.yaml"), "lr": 0.01}
    wide = prepare(RunOptions.make(model=str(place / "model"), dtype="float64", **given), lm)
    own, flipped = len(wide.prompts.prefix), len(flipped_labels(wide).prefix)
    assert flipped == own + 2  # Positive, and Mixed feelings
    longest = max(query.longest for part in _rows(wide, 12) for query in part)
    tight = replace(wide, options=replace(wide.options, max_context=own + longest))
    assert flipped_labels(tight).shots_used == 2
    kept = [query.longest for part in _rows(tight, 12) for query in part]
    assert max(kept) == longest - 2
    how = {**given, "max_context": own + longest, "fit_rows": 12, "baselines": False, "ridges": (0.1, 1.0, 10.0)}
    found = compile_patch(out=tmp_path / "p", model=lm, **how)
    patch, twin = load_patch(found.path, lm), load_twin(found.path, lm)
    assert found.twin.why_not is None and twin is not None and found.fitted == len(kept) // 2
    # What the first block's readers read does not depend on the demonstrations: it tells the rows.
    assert torch.equal(patch.blocks[0].readers.right, twin.blocks[0].readers.right)


def test_the_certificate_s_patch_is_the_one_that_is_written(tmp_path, place, lm):
    given = {"task": str(place / "tiny.yaml"), "shots": 5, "lr": 0.05}
    found = compile_patch(out=tmp_path / "p", model=lm, baselines=False, **given)
    prepared = prepare(RunOptions.make(model=str(place / "model"), dtype="float64", **given), lm)
    assert same(best_patch(prepared), load_patch(found.path, lm))


def test_without_labels_to_flip_there_is_no_twin(tmp_path, place, lm, monkeypatch):
    def no_other(_prepared):
        raise UserError("A task with a single label has no other to flip it to.")

    monkeypatch.setattr("dualview.analyses.scores.flipped_labels", no_other)
    given = {"model": lm, "task": str(place / "tiny.yaml"), "shots": 3, "lr": 0.01}
    patch = compile_patch(out=tmp_path / "p", fit_rows=4, baselines=False, **given)
    peft = compile_patch(out=tmp_path / "peft", fit_rows=4, baselines=False, format="peft", **given)
    tuned = finetune_adapter(out=tmp_path / "own", **given)
    assert load_twin(patch.path, lm) is None and "single label" in read_metadata(patch.path)["no_twin"]
    for found in (patch, peft, tuned):
        assert "single label" in found.to_json()["twin"]["why_not"] and "! no twin of flipped labels" in shown(found)
        assert not (found.path / "flipped_labels").exists()


def test_a_twin_that_diverges_is_left_out(tmp_path, place, lm, monkeypatch):
    from dualview.analyses import finetune

    train = finetune.train
    monkeypatch.setattr(finetune, "train", lambda *given: [replace(train(*given)[0], status="diverged")])
    found = finetune_adapter(out=tmp_path / "own", model=lm, task=str(place / "tiny.yaml"), shots=3, lr=0.01)
    assert found.path.is_dir() and not (found.path / "flipped_labels").exists()
    assert "diverged at learning rate 0.01" in shown(found)


def test_bad_settings_are_refused_before_the_work(place, lm):
    common = {"model": lm, "task": str(place / "tiny.yaml"), "out": place / "never.safetensors"}
    for wrong, sentence in (
        ({"fit_rows": 0}, "fit_rows"),
        ({"ridges": ()}, "ridges"),
        ({"ridges": (-1.0,)}, "ridges"),
        ({"ridges": (float("nan"),)}, "ridges"),
    ):
        with pytest.raises(UserError, match=sentence):
            compile_patch(**common, **wrong)
    with pytest.raises(UserError, match="cannot be written"):
        compile_patch(**{**common, "out": place / "tiny.yaml" / "x"}, shots=2, fit_rows=2, baselines=False)
    assert not (place / "never.safetensors").exists()


def test_nothing_is_written_before_the_baselines_have_run(place, lm, monkeypatch):
    def broken(*_given):
        raise UserError("the baseline broke")

    monkeypatch.setattr("dualview.analyses.compile.fine_tune", broken)
    out = place / "early.safetensors"
    with pytest.raises(UserError, match="the baseline broke"):
        compile_patch(out=out, model=lm, task=str(place / "tiny.yaml"), shots=2, fit_rows=2, lr=0.01)
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_told_before_the_work(place, lm, monkeypatch):
    monkeypatch.setattr("dualview.analyses.compile.begin", lambda *_given: pytest.fail("the work began"))
    with pytest.raises(UserError, match="is a folder"):
        compile_patch(out=place, model=lm, task=str(place / "tiny.yaml"))


def test_a_diverged_baseline_is_warned_of(place, lm):
    found = compile_patch(
        out=place / "wild.safetensors", model=lm, task=str(place / "tiny.yaml"), shots=3, fit_rows=4, lr=1e300
    )
    content = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert found.ft_status == content["ft_status"] == "diverged"
    assert "diverged: its row is not a baseline" in shown(found)


def shown(found):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(found.table())
    return " ".join(console.export_text().split())


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dualview", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def test_the_patch_and_its_report_need_a_file_each(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "compile", "--out", "p", "--json", tmp_path / "p") == 2
    assert "each its own file" in capsys.readouterr().err and not (tmp_path / "p").exists()


@pytest.mark.parametrize("name", ["at", "calibrate", "controls", "patch", "save_records"])
def test_options_that_would_change_nothing_are_refused(place, lm, tmp_path, name, monkeypatch, capsys):
    with pytest.raises(UserError, match=f"does not take the option {name}"):
        compile_patch(out=tmp_path / "x", model=lm, task=str(place / "tiny.yaml"), **{name: "x"})
    assert call(monkeypatch, "compile", "--out", tmp_path / "x", f"--{name.replace('_', '-')}", "x") == 2
    assert "No such option" in capsys.readouterr().err


def test_a_run_prints_the_patchs_row(compiled, place, monkeypatch, capsys):
    given = (
        "--model",
        place / "model",
        "--task",
        place / "tiny.yaml",
        "--dtype",
        "float64",
        "--shots",
        5,
        "--lr",
        0.01,
    )
    arguments = ("run", *given, "--n-queries", 6, "--controls", "none", "--patch", compiled.path)
    assert call(monkeypatch, *arguments, "--json", place / "run.json") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("accuracy")]
    assert [line[1] for line in lines] == ["zero-shot", "in-context", "fine-tuned", "patched"]
    assert float(lines[3][2]) == pytest.approx(
        json.loads((place / "run.json").read_text())["accuracy"]["patch"], abs=1e-3
    )
    assert call(monkeypatch, *arguments[:-2]) == 0
    assert "patched" not in capsys.readouterr().out


def test_a_single_selection_row_is_not_enough(tmp_path, lm):
    path = tiny.save_task(tmp_path, selection=1)
    with pytest.raises(UserError, match="needs at least two"):
        compile_patch(out=tmp_path / "x", model=lm, task=str(path), shots=2)


def test_divergence_and_agreement_by_hand():
    icl = np.log(np.array([[0.8, 0.2, 0.0], [0.5, 0.25, 0.25]]) + 1e-300)
    icl[0, 2] = -np.inf
    other = np.log(np.array([[0.4, 0.1, 0.0], [0.25, 0.5, 0.25]]) + 1e-300)
    other[0, 2] = -np.inf
    expected = (0.0 + 0.5 * np.log(2) - 0.25 * np.log(2)) / 2
    assert divergence(icl, other) == pytest.approx(expected)
    queries = [Query((1,), ((2,), (3,)), 0), Query((1,), ((2,), (3,), (4,)), 1)]
    shown = score_setting(other, icl, queries)
    assert shown.accuracy == 1.0 and shown.agreement == 0.5
    assert score_setting(icl, icl, queries).accuracy == 0.5


def test_models_that_cannot_be_packed_are_refused(place, tmp_path):
    from equivalence.cases import model

    hybrid = adopt(model("lfm2-hybrid"), load_model(str(place / "model")).tokenizer, "hybrid")
    with pytest.raises(UserError, match="packed"):
        compile_patch(out=tmp_path / "x", model=hybrid, task=str(place / "tiny.yaml"), shots=2, fit_rows=2)
