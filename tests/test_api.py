"""The public functions: every verb by its name and arguments, and the pieces that a notebook needs."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main

import dualview
from dualview.cli.main import app
from equivalence import tiny

SMALL: dict[str, Any] = {"shots": 4, "n_queries": 8, "lr": 0.01, "dtype": "float64", "device": "cpu"}


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> dualview.LanguageModel:
    folder = tiny.save_model(tmp_path_factory.mktemp("model"))
    return dualview.load_model(str(folder), dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_task(tmp_path_factory.mktemp("task")))


@pytest.fixture(scope="module")
def result(lm: dualview.LanguageModel, task: str) -> dualview.Result:
    return dualview.run(model=lm, task=task, **SMALL)


def test_every_public_name_is_there_and_known_to_type_checkers() -> None:
    assert dir(dualview) == sorted(dualview.__all__) == list(dualview.__all__)
    for name in dualview.__all__:
        assert getattr(dualview, name) is not None
    stub = ast.parse(Path(str(dualview.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    for node in ast.walk(stub):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                declared = getattr(importlib.import_module(str(node.module)), alias.name)
                found = getattr(dualview, str(alias.asname))
                assert found is declared or inspect.ismodule(found)  # a package that can be called is both


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    heavy = "{'torch', 'transformers', 'pydantic', 'numpy', 'pandas', 'matplotlib', 'scipy'}"
    code = (
        f"import sys, dualview, dualview.verbs, dualview.cli.main; dir(dualview)\nassert not {heavy} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


SHOWN_ONLY = {"limit"}
"""Options that only change what is printed."""


@pytest.mark.parametrize("verb", sorted(typer.main.get_command(app).commands.keys() - {"lab"}))  # pyright: ignore
def test_every_verb_is_a_function_with_its_arguments(verb: str) -> None:
    command: Any = typer.main.get_command(app).commands[verb]  # pyright: ignore
    function: Any = getattr(dualview, verb)
    if inspect.ismodule(function):
        assert callable(function)
        homes = {"metrics": "recompute.recompute", "report": "build.report", "sweep": "runner.sweep"}
        module, _, name = {**homes, "tasks": "task.tasks"}[verb].partition(".")
        function = getattr(__import__(f"dualview.{verb}.{module}", fromlist=[name]), name)
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        options = set(dualview.RunOptions.__dataclass_fields__)
    else:
        options = set()
    own = {each.name for each in command.params} - options - SHOWN_ONLY
    assert own <= set(parameters) | ({"json"} if verb == "sweep" else set())  # a sweep's summary is what it returns


def test_the_pieces_make_the_run(lm: dualview.LanguageModel, task: str, result: dualview.Result) -> None:
    prompts = dualview.build_prompts(task, lm, shots=4, n_queries=8)
    tuned = dualview.finetune(lm, prompts, lr=0.01)
    asked = {name: dualview.ask(lm, prompts, name) for name in ("zsl", "icl")}
    records = dualview.gather(prompts, **asked, ft=dualview.ask(lm, prompts, "zsl", patch=tuned))
    measured = dualview.metrics(records)
    for key in ("accuracy.icl", "rec2ftp.value", "sim_aou.raw", "sim_am.delta", "update_norm.ft"):
        assert measured.number(key) == result.number(key)


def test_metrics_recompute_a_run(result: dualview.Result, tmp_path: Path) -> None:
    again = dualview.metrics(result, json=tmp_path / "m.json")
    assert json.loads((tmp_path / "m.json").read_text()) == again.to_json()
    assert again.sim_aou == result.sim_aou and again.verdict is not None and result.verdict is not None
    assert again.verdict.sentence == result.verdict.sentence


def test_several_seeds(lm: dualview.LanguageModel, task: str, tmp_path: Path) -> None:
    given = {**SMALL, "controls": "none"}
    found = dualview.run(model=lm, task=task, seeds="1:2", out=tmp_path, **given)
    assert found.seeds == [1, 2] and (tmp_path / "seed-2" / "result.json").is_file()
    assert dualview.run(model=lm, task=task, seeds=[1, 2], **given).summary == found.summary
    with pytest.raises(dualview.UserError, match="--seed and --seeds"):
        dualview.run(model=lm, task=task, seeds="1:2", seed=1, **given)
    for few in (3, 0, "3", [3], []):
        with pytest.raises(dualview.UserError, match="--seeds"):
            dualview.run(model=lm, task=task, seeds=few, **given)  # pyright: ignore[reportArgumentType, reportCallIssue]
    found.save(str(tmp_path / "again.json"))
    assert json.loads((tmp_path / "again.json").read_text()) == found.to_json()


def test_a_result_is_saved_by_a_path_as_text(result: dualview.Result, tmp_path: Path) -> None:
    """As a script does after the work: a path that is no `Path` must not cost the result."""
    path = str(tmp_path / "result.json")
    result.save(path)
    assert dualview.Result.load(path).to_json() == result.to_json()


def test_a_result_as_a_frame(result: dualview.Result, tmp_path: Path) -> None:
    result.save(tmp_path / "result.json")
    frame = dualview.load_result(tmp_path).to_frame()
    assert list(frame.columns) == ["value", "low", "high", "floor", "floor_name", "ceiling", "p"]
    assert frame.loc["accuracy.icl", "value"] == result.accuracy.icl
    control = (result.controls or {})["sim_aou"]
    row = frame.loc["sim_aou.raw"]
    assert (row["low"], row["high"]) == control.ci and (row["floor_name"], row["floor"]) == control.highest_floor
    assert row["ceiling"] == control.ceiling and row["p"] == control.p


def test_records_with_named_dimensions(result: dualview.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    records = result.records
    assert records is not None
    arrays = records.to_xarray()
    assert arrays["h"].dims == ("setting", "query", "layer", "d_model")
    assert arrays["m"].dims == ("setting", "query", "layer", "head", "key")
    for name in ("zsl", "icl", "ft"):
        assert np.array_equal(arrays["log_probs"].sel(setting=name), records[name].log_probs)
    monkeypatch.setitem(sys.modules, "xarray", None)  # importing it then fails
    with pytest.raises(dualview.UserError, match=r"dualview\[xarray\]"):
        records.to_xarray()


def test_a_run_is_exported(result: dualview.Result, tmp_path: Path) -> None:
    import pandas
    import polars
    import xarray

    assert result.records is not None
    result.save(tmp_path / "result.json")
    dualview.save_records(result.records, tmp_path / "records.safetensors")
    frame = result.to_frame()
    again = polars.from_pandas(frame.reset_index())
    assert again["number"].to_list() == list(frame.index)
    np.testing.assert_array_equal(again["value"].to_numpy(), frame["value"])
    for path in (dualview.export(tmp_path / f"numbers.{ending}", run=tmp_path) for ending in ("csv", "parquet")):
        read = pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)
        assert list(read["number"]) == list(frame.index)
        np.testing.assert_allclose(read["value"], frame["value"], rtol=1e-15)
    rows = json.loads(dualview.export(tmp_path / "numbers.json", run=tmp_path).read_text())
    assert [row["floor_name"] for row in rows] == [None if name != name else name for name in frame["floor_name"]]
    with xarray.open_dataset(dualview.export(tmp_path / "records.nc", run=tmp_path)) as read:
        xarray.testing.assert_equal(read.load(), result.records.to_xarray().astype(read.dtypes))


def test_every_figure_of_a_run_is_a_function(result: dualview.Result) -> None:
    from matplotlib.figure import Figure

    for name in dualview.plot.run_figures(result):
        assert isinstance(getattr(dualview.plot, name)(result), Figure)


def test_verify_without_a_model() -> None:
    checks = dualview.verify(None)
    assert checks and {check.status for check in checks} == {"passed"}
    assert all(check.status == "failed" for check in dualview.verify("none", wrong=True))


def test_prompt_and_tasks(lm: dualview.LanguageModel, task: str) -> None:
    shown = dualview.prompt(query=1, model=lm, task=task, **SMALL)
    assert shown.query == 1 and {token["span"] for token in shown.tokens} >= {"template", "label", "query"}
    assert "movie" in {each.name for each in dualview.tasks()}  # pyright: ignore
    (check,) = dualview.tasks([task])
    assert check.splits["train"].rows > 0  # pyright: ignore


def test_json_to_standard_output(lm: dualview.LanguageModel, task: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = dualview.run(model=lm, task=task, json="-", controls="none", **SMALL)
    assert json.loads(capsys.readouterr().out) == found.to_json()


def test_words_that_mean_nothing_are_refused(lm: Any, task: str) -> None:
    prompts = dualview.build_prompts(task, lm, shots=2, n_queries=2)
    wrong = (
        lambda: dualview.ask(lm, prompts, "ft"),
        lambda: dualview.ask(lm, prompts, at="nowhere"),
        lambda: dualview.finetune(lm, prompts, lr=0.01, rule="bogus"),
        lambda: dualview.finetune(lm, prompts, lr=0.01, loss="bogus"),
        lambda: dualview.finetune(lm, prompts, lr=0.01, params="bogus"),
        lambda: dualview.assets("bogus"),
        lambda: dualview.load_model(3),
    )
    for call in wrong:
        with pytest.raises(dualview.UserError):
            call()


def test_a_model_is_shown_in_one_line(lm: Any) -> None:
    assert "\n" not in repr(lm) and "parameters" in repr(lm)
