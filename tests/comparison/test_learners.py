"""Patches and adapters judged as fine-tuning is: an adapter that is fine-tuning's update gets fine-tuning's numbers."""

from __future__ import annotations

import html
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import dualview
from dualview.cli import main as cli
from dualview.comparison.controls.training import CLOSE, update_size
from dualview.duality.on_model.shared_patch import load_patch, load_twin
from dualview.io.errors import UserError
from dualview.learning.adapter_reading import load_adapter
from dualview.models.language_model import LanguageModel
from dualview.options import RunOptions
from dualview.report.html.run import render
from dualview.report.terminal import result_table
from dualview.store.cell_key import Fingerprints, canonical
from dualview.tasks.sampling import sample_demos
from equivalence import tiny

SMALL: dict[str, Any] = {"shots": 5, "n_queries": 12, "lr": 0.05, "device": "cpu", "dtype": "float64"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its task, an adapter that PEFT made, one that dualview trained, and a patch also as an adapter."""
    folder = tmp_path_factory.mktemp("learners")
    tiny.save_model(folder / "model")
    tiny.save_model(folder / "gpt2", learnt_positions=True)
    tiny.save_task(folder, train=40, selection=24, validation=20)
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["k_proj", "v_proj"], r=4)
    get_peft_model(peft_base(folder), config).save_pretrained(str(folder / "lora"))
    lm = dualview.load_model(str(folder / "model"), dtype="float64", device="cpu")
    dualview.finetune(out=folder / "own", model=lm, task=str(folder / "tiny.yaml"), **SMALL)
    for name, kind in (("patch.safetensors", "patch"), ("compiled", "peft")):
        how: dict[str, Any] = {"out": folder / name, "format": kind, "fit_rows": 6, "baselines": False}
        dualview.compile(model=lm, task=str(folder / "tiny.yaml"), **how, **SMALL)
    return folder


def peft_base(place: Path, name: str = "model") -> Any:
    return AutoModelForCausalLM.from_pretrained(place / name, dtype=torch.float64)


@pytest.fixture(scope="module")
def lm(place: Path) -> LanguageModel:
    return dualview.load_model(str(place / "model"), dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def result(place: Path, lm: LanguageModel) -> dualview.Result:
    before = {name: value.clone() for name, value in lm.model.state_dict().items()}
    given = {"adapter": [place / "own", place / "lora", place / "compiled"], "patch": place / "patch.safetensors"}
    task = str(place / "tiny.yaml")
    found = dualview.run(model=lm, task=task, controls="full", lr_grid=(0.01, 0.05), **given, **SMALL)
    after = lm.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return found


def records_of(result: dualview.Result) -> dualview.Records:
    assert result.records is not None
    return result.records


def test_the_setting_scores_as_peft_does(place: Path, lm: LanguageModel, result: dualview.Result) -> None:
    model = PeftModel.from_pretrained(peft_base(place), str(place / "lora")).eval()
    prompts = dualview.build_prompts(str(place / "tiny.yaml"), lm, shots=5, n_queries=12)
    scores = records_of(result)["adapter:lora"].log_probs
    for i, query in enumerate(prompts.queries):
        for j, candidate in enumerate(query.candidates):
            ids = [*prompts.zero_prefix, *query.ids, *candidate]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            at = range(len(ids) - len(candidate), len(ids))
            expected = np.mean([float(logits[t - 1, ids[t]]) for t in at])
            assert scores[i, j] == pytest.approx(expected, abs=1e-5)


def test_fine_tuning_as_an_adapter_gets_fine_tuning_s_numbers(result: dualview.Result) -> None:
    own, found = result.learners["adapter:own"], result.number
    for key in ("accuracy.ft", "rec2ftp.value", "agreement.value", "sim_aou.raw", "sim_aou.normalised", "sim_am.delta"):
        assert own.number(key) == pytest.approx(found(key), abs=1e-6), key
    assert own.number("update_norm.ft") == pytest.approx(found("update_norm.ft"), abs=1e-6)
    assert own.number("overlap.ft.token_overlap") == pytest.approx(found("overlap.ft.token_overlap"))
    for name, floor in (result.controls or {})["sim_aou"].floors.items():
        if name not in ("ft_sign_flipped", "untrained", "untrained_but_embeddings"):  # these are scaled, not trained
            assert (own.controls or {})["sim_aou"].floors[name] == pytest.approx(floor, abs=1e-6), name
    assert result.verdict is not None and own.verdict is not None
    for level in ("learning", "predictions", "representations", "attention"):
        assert own.verdict.levels[level].value == pytest.approx(result.verdict.levels[level].value, abs=1e-6)
    assert own.kendall is None


def test_the_twin_gives_the_label_contrast_of_fine_tuning(result: dualview.Result) -> None:
    """Its floors, too: they know of the heads' spans, and the twin is as large as it was trained."""
    own, records = result.learners["adapter:own"], records_of(result)
    for key in ("label_contrast.value", "label_contrast.specific", "label_contrast.log_odds.value"):
        assert own.number(key) == pytest.approx(result.number(key), abs=1e-6), key
    floors = [(each.controls or {})["label_contrast"].floors for each in (own, result)]
    assert "head_span" in floors[0] and floors[0] == pytest.approx(floors[1], abs=1e-6)
    assert own.verdict is not None and result.verdict is not None
    levels = [each.verdict.levels["labels"] for each in (own, result)]
    assert levels[0].clause == levels[1].clause.replace("FT", "adapter own")
    fields = [records[name].off_contrast for name in ("adapter:own", "ft", "adapter:lora")]
    assert fields[2] is None
    np.testing.assert_allclose(fields[0], fields[1], atol=1e-6)  # pyright: ignore
    lora = result.learners["adapter:lora"]
    assert lora.label_contrast is None and lora.verdict is not None
    clause = "adapter lora has no twin that learnt from flipped labels (train one and put it in its folder"
    assert lora.verdict.levels["labels"].outcome == "not testable" and clause in lora.verdict.levels["labels"].clause


@pytest.fixture(scope="module")
def by_hand(place: Path) -> Path:
    """The run's demonstrations with the next label each, typed into a file."""
    rows = sample_demos(dualview.load_task(str(place / "tiny.yaml")), 1, 5)
    after = {0: 1, 1: 2, 2: 0}
    lines = [json.dumps({"text": row.fields["text"], "label": after[row.label]}) for row in rows]
    (place / "by_hand.jsonl").write_text("\n".join(lines) + "\n")
    return place / "by_hand.jsonl"


def test_a_patch_s_twin_is_compiled_from_flipped_demonstrations(
    place: Path, lm: LanguageModel, result: dualview.Result, by_hand: Path, tmp_path: Path
) -> None:
    ridge = json.loads(_header(place / "patch.safetensors"))["ridge"]
    how: dict[str, Any] = {"fit_rows": 6, "baselines": False, "ridges": (ridge,), "out": tmp_path / "twin"}
    given = {name: value for name, value in SMALL.items() if name != "shots"}
    dualview.compile(model=lm, task=str(place / "tiny.yaml"), demos=by_hand, **how, **given)
    prompts = dualview.build_prompts(str(place / "tiny.yaml"), lm, shots=5, n_queries=12)
    asked = dualview.ask(lm, prompts, "zsl", patch=load_patch(tmp_path / "twin", lm)).settings[0]
    twin = records_of(result)["patch/ft_flipped_labels"]
    np.testing.assert_allclose(twin.log_probs, asked.log_probs, atol=1e-9)
    np.testing.assert_allclose(twin.h, asked.h, atol=1e-9)  # pyright: ignore
    adapter = records_of(result)["adapter:compiled/ft_flipped_labels"]
    np.testing.assert_allclose(adapter.log_probs, asked.log_probs, atol=1e-5)
    patch = result.learners["patch"]
    assert patch.verdict is not None and patch.label_contrast is not None and patch.label_contrast.value is not None
    assert "no twin" not in patch.verdict.sentence and "ft_flipped_labels" in (patch.controls or {})["sim_aou"].others


def _header(path: Path) -> str:
    with safe_open(path, framework="pt") as file:  # pyright: ignore
        return file.metadata()["dualview"]


def test_an_adapter_s_twin_is_trained_on_flipped_demonstrations(
    place: Path, lm: LanguageModel, result: dualview.Result, by_hand: Path, tmp_path: Path
) -> None:
    given = {name: value for name, value in SMALL.items() if name != "shots"}
    dualview.finetune(out=tmp_path / "twin", model=lm, task=str(place / "tiny.yaml"), demos=by_hand, **given)
    prompts = dualview.build_prompts(str(place / "tiny.yaml"), lm, shots=5, n_queries=12)
    asked = dualview.ask(lm, prompts, "zsl", patch=load_adapter(tmp_path / "twin", lm)).settings[0]
    records = records_of(result)
    for name in ("adapter:own/ft_flipped_labels", "ft_flipped_labels"):
        np.testing.assert_allclose(records[name].log_probs, asked.log_probs, atol=1e-6)
        np.testing.assert_allclose(records[name].h, asked.h, atol=1e-6)  # pyright: ignore


def test_a_patch_without_a_twin_says_what_to_do(place: Path, lm: LanguageModel, tmp_path: Path) -> None:
    """A file of an earlier version: its header does not know twins."""
    with safe_open(place / "patch.safetensors", framework="pt") as file:  # pyright: ignore
        tensors = {name: file.get_tensor(name) for name in file.keys() if "/" not in name}  # noqa: SIM118
    header = {
        key: value for key, value in json.loads(_header(place / "patch.safetensors")).items() if "twin" not in key
    }
    save_file(tensors, tmp_path / "old.safetensors", {"dualview": json.dumps(header)})
    assert load_twin(tmp_path / "old.safetensors", lm) is None
    found = dualview.run(model=lm, task=str(place / "tiny.yaml"), patch=tmp_path / "old.safetensors", **SMALL)
    patch = found.learners["patch"]
    assert patch.verdict is not None and patch.label_contrast is None
    labels = patch.verdict.levels["labels"]
    assert labels.outcome == "not testable"
    assert labels.clause == "patch has no twin that learnt from flipped labels (compile it again)"


def test_a_patch_and_the_same_patch_as_an_adapter(result: dualview.Result) -> None:
    patch, adapter = result.learners["patch"], result.learners["adapter:compiled"]
    for key in ("accuracy.ft", "sim_aou.raw", "sim_am.delta", "update_norm.ft", "agreement.value"):
        assert adapter.number(key) == pytest.approx(patch.number(key), abs=1e-5), key
    assert patch.verdict is not None and " FT " not in patch.verdict.sentence


def test_own_controls_are_as_large_and_drawn_several_times(result: dualview.Result) -> None:
    records = records_of(result)
    for learner in result.learners:
        size = update_size(records["zsl"], records[learner])
        for control in ("ft_random_directions", "ft_random_directions@5", "ft_random_labels@2"):
            ratio = update_size(records["zsl"], records[f"{learner}/{control}"]) / size
            assert 1 / CLOSE <= ratio <= CLOSE, (learner, control)
        controls = (result.learners[learner].controls or {})["sim_aou"]
        assert len(controls.floors_draws["ft_random_directions"]) == 5
        assert {"untrained", "ft_sign_flipped", "icl_random_labels", "zsl_shifted"} <= set(controls.floors)
        assert set(controls.ceilings) == {"icl_reordered", "icl_other_demos"}
    # What was there before does not change.
    assert "ft_random_directions" not in (result.controls or {})["sim_aou"].floors


def test_everything_is_recomputed_from_saved_records(result: dualview.Result, tmp_path: Path) -> None:
    path = dualview.save_records(records_of(result), tmp_path / "records.safetensors")
    again = dualview.metrics(path)
    assert again.to_json()["learners"] == result.to_json()["learners"]
    judged = dualview.judge(dualview.load_records(path), learner="adapter:lora")
    assert judged.sentence == result.learners["adapter:lora"].verdict.sentence  # pyright: ignore
    several = dualview.judge([records_of(result)] * 3, learner="patch")
    assert several.unit == "3 draws"
    with pytest.raises(UserError, match="no learner adapter;"):
        dualview.judge(records_of(result), learner="adapter")


def test_the_result_is_typed_and_shown(result: dualview.Result, tmp_path: Path) -> None:
    result.save(tmp_path / "result.json")
    loaded = dualview.load_result(tmp_path / "result.json")
    assert loaded.learners == result.learners and loaded.adapters is not None
    about = loaded.adapters["adapter:lora"]
    assert (about.rank, about.modules, about.targets) == (4, 6, ["k_proj", "v_proj"]) and about.norm > 0
    frame = loaded.to_frame()
    assert "accuracy.adapter:lora" in frame.index
    row, learner = frame.loc["learners.adapter:lora.sim_aou.raw"], loaded.learners["adapter:lora"]
    control = (learner.controls or {})["sim_aou"]
    assert row["value"] == learner.number("sim_aou.raw") and (row["floor_name"], row["floor"]) == control.highest_floor
    assert not frame.index.duplicated().any() and "learners.patch.rec2ftp.value" in frame.index
    assert {"learners.patch.label_contrast.value", "accuracy.patch/ft_flipped_labels"} <= set(frame.index)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(result_table(result))
    shown = loaded._repr_html_() or ""  # pyright: ignore[reportPrivateUsage]
    for name, learner in loaded.learners.items():
        assert learner.verdict is not None and f"{name.replace(':', ' ', 1)} in the place of fine-tuning" in shown
        assert learner.verdict.sentence in html.unescape(shown)
    for text in (console.export_text(), render(result)):
        assert "accuracy, adapter lora" in text and "rank 4 on 6 modules" in text
        assert text.count("label contrast beyond the mean") >= 4  # of FT and of the three that have a twin
        assert result.learners["patch"].verdict.sentence in text.replace("\n", " ").replace("&#39;", "'")  # pyright: ignore


def test_one_adapter_and_no_controls(place: Path, lm: LanguageModel) -> None:
    given = {**SMALL, "controls": "none", "calibrate": True}
    found = dualview.run(model=lm, task=str(place / "tiny.yaml"), adapter=[place / "lora"], **given)
    assert list(found.learners) == ["adapter"] and found.learners["adapter"].verdict is None
    assert set(found.records.settings) == {"zsl", "icl", "ft", "adapter"}  # pyright: ignore
    assert found.learners["adapter"].sim_aou.raw is not None
    assert found.calibrated is not None and "adapter" in found.calibrated.accuracy
    assert "learners" not in dualview.run(model=lm, task=str(place / "tiny.yaml"), **given).to_json()


def test_seeds_judge_every_learner_over_draws(place: Path, lm: LanguageModel) -> None:
    given = {**SMALL, "adapter": [place / "lora"]}
    found = dualview.run(model=lm, task=str(place / "tiny.yaml"), seeds="1:2", **given)
    assert found.learners["adapter"].unit == "2 draws"


def test_a_sweep_stores_one_adapter_after_another(place: Path, tmp_path: Path) -> None:
    """Given as a list, adapters are an axis; tables, files and a second start know them."""
    adapters = [str(place / name) for name in ("lora", "own")]
    spec = {**SMALL, "model": str(place / "model"), "task": str(place / "tiny.yaml"), "adapter": adapters}
    spec["controls"] = "none"
    done = dualview.sweep(spec, tmp_path / "store")
    assert (done.computed, done.failed) == (2, ()) and dualview.sweep(spec, tmp_path / "store").computed == 0
    with dualview.Store(tmp_path / "store") as opened:
        frame = opened.to_frame()
        kept = [opened.result(key).learners["adapter"].number("update_norm.ft") for key in opened.keys()]  # noqa: SIM118
    assert sorted(list(each) for each in frame["adapter"]) == sorted([each] for each in adapters)
    assert len(set(kept)) == 2
    for name in ("cells.csv", "cells.json", "cells.parquet", "cells.nc"):
        assert dualview.export(tmp_path / name, tmp_path / "store").stat().st_size


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The sentence with which the command line refuses."""
    monkeypatch.setattr(sys, "argv", ["dualview", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_bad_adapters_leave_nothing_behind(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--task", place / "tiny.yaml", "--shots", 2, "--n-queries", 4, "--lr", 0.01, "--out", tmp_path / "out"]
    for model, adapter, sentence in (
        ("model", "nothing", "--adapter: there is no"),
        ("gpt2", "lora", "is of another model"),
        ("model", "model", "no adapter_config.json"),
    ):
        said = call(monkeypatch, capsys, "run", "--model", place / model, "--adapter", place / adapter, *common)
        assert sentence in said and said.startswith("dualview: ")
    twice = ["--adapter", place / "lora", "--adapter", place / "lora"]
    assert "twice" in call(monkeypatch, capsys, "run", "--model", place / "model", *twice, *common)
    assert not (tmp_path / "out").exists()


def test_bad_twins_are_told_before_the_work(
    place: Path, lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "lora", tmp_path / "lora")
    (tmp_path / "lora" / "flipped_labels").mkdir()
    common = ["--adapter", tmp_path / "lora", "--task", place / "tiny.yaml", "--shots", 2, "--n-queries", 4]
    said = call(monkeypatch, capsys, "run", "--model", tmp_path / "no-such-model", *common)
    assert "flipped_labels: it has no adapter_config.json" in said
    # Without controls no twin is asked, and none is looked at.
    given = {**SMALL, "controls": "none", "adapter": [tmp_path / "lora"]}
    found = dualview.run(model=lm, task=str(place / "tiny.yaml"), **given)
    assert set(found.records.settings) == {"zsl", "icl", "ft", "adapter"}  # pyright: ignore
    shutil.rmtree(tmp_path / "lora" / "flipped_labels")
    shutil.copytree(place / "own", tmp_path / "lora" / "flipped_labels")
    monkeypatch.setattr("dualview.comparison.run.ask", lambda *_given: pytest.fail("the work began"))
    assert "is of another model" in call(monkeypatch, capsys, "run", "--model", place / "gpt2", *common)


def test_what_finetune_and_compile_write(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", place / "gpt2", "--task", place / "tiny.yaml", "--shots", 3, "--n-queries", 4]
    common = [*common, "--dtype", "float64", "--lr", 0.02]
    for verb, more in (("finetune", ["--rank", 3]), ("compile", ["--format", "peft", "--rank", 2])):
        out = tmp_path / verb
        monkeypatch.setattr(sys, "argv", ["dualview", verb, *map(str, [*common, *more, "--out", out, "--json", "-"])])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == 0
        found = json.loads(capsys.readouterr().out)
        about = found if verb == "finetune" else found["adapter"]
        assert about["rank"] == more[-1] and 0 < about["error"] <= about["largest_error"]
        assert found["twin"]["error"] > 0 and found["twin"]["rank"] == more[-1] and found["twin"]["why_not"] is None
        for folder in (out, out / "flipped_labels"):
            model = PeftModel.from_pretrained(peft_base(place, "gpt2"), str(folder))
            assert model.peft_config["default"].r == more[-1]
        assert "holds an adapter already" in call(monkeypatch, capsys, verb, *common, *more, "--out", out)
    for more, sentence in (
        (["finetune", "--rank", 0], "rank of at least 1"),
        (["finetune", "--ft-params", "all"], "cannot hold it"),
        (["finetune", "--ft-rule", "linearised"], "cannot hold it"),
        (["finetune", "--lr", 1e300], "diverged"),
        (["compile", "--rank", 2], "--format peft"),
    ):
        verb, *rest = more
        said = call(monkeypatch, capsys, verb, *common, "--out", tmp_path / "none", *rest)
        assert sentence in said and not (tmp_path / "none").exists()


def test_a_cell_s_key_follows_the_adapter_s_files(place: Path, tmp_path: Path) -> None:
    assert "adapter" not in canonical(RunOptions.make())
    options = RunOptions.make(model=str(place / "model"), task=str(place / "tiny.yaml"), adapter=[place / "lora"])
    plain = RunOptions.make(model=str(place / "model"), task=str(place / "tiny.yaml"))
    keys = [Fingerprints(auto="cpu").plan_key(each) for each in (options, plain)]
    assert None not in keys and keys[0] != keys[1]
    config = place / "lora" / "adapter_config.json"
    before = config.read_text()
    config.write_text(before.replace('"lora_alpha": 8', '"lora_alpha": 9'))
    assert Fingerprints(auto="cpu").plan_key(options) not in keys
    config.write_text(before)
    shutil.copytree(place / "own", place / "lora" / "flipped_labels")
    assert Fingerprints(auto="cpu").plan_key(options) not in keys
    shutil.rmtree(place / "lora" / "flipped_labels")
    assert Fingerprints(auto="cpu").plan_key(options) == keys[0]
