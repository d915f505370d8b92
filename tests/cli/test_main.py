"""The command line as a person uses it: what it prints, what it writes, and what it says to mistakes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import dualview
from dualview.cli import main as cli
from dualview.comparison.prepare import prepare
from equivalence import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_task(tmp_path_factory.mktemp("task"))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `dualview …`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["dualview", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


SMALL = ("--shots", 4, "--n-queries", 8, "--lr", 0.01, "--dtype", "float64", "--device", "cpu")


def test_run_prints_and_writes(
    model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "new" / "out", tmp_path / "r.json"
    given = ("--model", model, "--task", task, *SMALL, "--out", out, "--json", file, "--save-records")
    assert call(monkeypatch, "run", *given) == 0
    printed = capsys.readouterr().out
    for word in ("SimAOU raw", "Rec2FTP", "highest floor", "ceiling", "Kendall"):
        assert word in printed
    result = json.loads(file.read_text())
    assert result == json.loads((out / "result.json").read_text())
    for key in ("schema", "provenance", "task", "accuracy", "rec2ftp", "sim_aou", "sim_am", "update_norm", "ft"):
        assert key in result
    assert set(result["provenance"]["run"]) == {"date", "host", "device_name", "seconds"}
    assert result["verdict"]["overall"] in (*("supported", "partial", "not supported", "contradicted", "not testable"),)
    assert set(result["controls"]["sim_aou"]) >= {"ci", "floors", "ceiling", "p"}
    assert call(monkeypatch, "metrics", out / "records.safetensors", "--json", tmp_path / "m.json") == 0
    again = json.loads((tmp_path / "m.json").read_text())
    assert {"kendall_released", "kendall_dual_k", "kendall_dual_v", "token_overlap"} <= set(result["controls"])
    assert set(again) >= {"accuracy", "rec2ftp", "sim_aou", "sim_am", "kendall", "overlap", "controls", "verdict"}
    for key, value in again.items():
        assert value == result[key]


def test_dry_run_writes_nothing(
    model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", model, "--task", task, *SMALL, "--out", tmp_path / "out", "--dry-run")
    assert call(monkeypatch, "run", *given) == 0
    out = capsys.readouterr().out
    assert "prefix tokens" in out and "(controls: " in out
    assert list(tmp_path.iterdir()) == []


def test_prompt_shows_every_token(
    model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", model, "--task", task, *SMALL, "--json", tmp_path / "p.json")
    assert call(monkeypatch, "prompt", *given) == 0
    spans = {token["span"] for token in json.loads((tmp_path / "p.json").read_text())}
    assert spans == {"bos", "template", "label", "separator", "query", "candidate"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("\t")[:3] == ["0", "1", "bos"] and len(lines[1].split("\t")) == 5


def test_tasks_are_listed_and_checked(
    task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "tasks") == 0
    assert "movie5" in capsys.readouterr().out
    assert call(monkeypatch, "tasks", task) == 0
    assert "selection" in capsys.readouterr().out


def test_a_prompt_does_not_wait_for_model_classes(model: Path, task: Path) -> None:
    """Importing them takes as long as importing torch, and a prompt needs a tokenizer alone."""
    code = (
        "import sys; from dualview.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "assert not {'transformers.modeling_utils', 'scipy.optimize'} & set(sys.modules)"
    )
    given = ["prompt", "--model", str(model), "--task", str(task), *map(str, SMALL)]
    subprocess.run([sys.executable, "-c", code, *given], check=True, capture_output=True)


def test_a_prompt_is_that_of_the_run(model: Path, task: Path, tmp_path: Path) -> None:
    """With every option that decides tokens; a model without weights gives the same."""
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    for more in ({}, {"calibrate": True, "max_context": 60}, {"bos": "no", "separator": "eos"}):
        options = {"task": str(task), "shots": 2, "n_queries": 4, **more}
        whole = prepare(dualview.RunOptions.make(model=str(model), **options)).prompts
        assert dualview.prompt(model=str(bare), **options).prompts == whole


@pytest.mark.parametrize("verb", ["tasks", "tasks TASK", "assets", "report RUN", "export"])
def test_json_of_the_verbs_that_list_and_write(
    verb: str,
    model: Path,
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To a file next to the table, with - in place of it; a place that cannot be written is refused first."""
    run, cells = tmp_path / "run", tmp_path / "cells.csv"
    words = [{"TASK": str(task), "RUN": str(run)}.get(word, word) for word in verb.split()]
    if verb.startswith("report"):
        call(monkeypatch, "run", "--model", model, "--task", task, *SMALL, "--controls", "none", "--out", run)
    if verb == "export":
        (tmp_path / "store" / "cells").mkdir(parents=True)
        words += [str(cells), "--store", str(tmp_path / "store")]
    capsys.readouterr()
    assert call(monkeypatch, *words, "--json", tmp_path / "found.json") == 0
    table = capsys.readouterr().out
    assert table and not table.startswith(("[", "{"))
    assert call(monkeypatch, *words, "--json", "-") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    if verb == "tasks":
        assert {"movie", "agnews"} <= {each["name"] for each in shown} and all(each["template"] for each in shown)
    elif verb == "tasks TASK":
        assert shown[0]["splits"]["train"]["rows"] == sum(shown[0]["splits"]["train"]["label_counts"])
    elif verb == "assets":
        assert {"assets", "conversions"} == set(shown) and all(each["sha256"] for each in shown["assets"])
    else:
        assert shown["written"] and all(Path(path).is_file() for path in shown["written"])
    cells.unlink(missing_ok=True)
    assert call(monkeypatch, *words, "--json", tmp_path) == 2
    assert "is a folder" in capsys.readouterr().err and not cells.exists()


@pytest.mark.parametrize("option", ["--patch", "--demos", "--queries", "--data", "--task"])
@pytest.mark.parametrize("verb", ["run", "prompt"])
def test_a_file_that_is_not_there_is_found_before_the_model_loads(
    verb: str,
    option: str,
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dualview.comparison.prepare.load_model", pytest.fail)
    monkeypatch.setattr("dualview.models.reader.load_reader", pytest.fail)
    missing = tmp_path / "missing.yaml"
    given = ("--model", tmp_path, "--task", task, *SMALL, option, missing)
    assert call(monkeypatch, verb, *given) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("dualview: ") and str(missing) in said[0]


def test_a_query_is_read_before_the_model_loads(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dualview.comparison.prepare.load_model", pytest.fail)
    given = ("--model", tmp_path, "--task", task, "--shots", 2, "--query", '{"txt": "a film"}')
    assert call(monkeypatch, "explain", *given) == 2
    assert "needs --query as a JSON object with text" in capsys.readouterr().err


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


BAD_ROWS = {
    "empty": ("", "empty"),
    "no_field": ('{"txt": "a film", "label": 0}\n', "text"),
    "label_out_of_range": ('{"text": "a film", "label": 7}\n', "label"),
    "not_json": ("{oh no\n", "line 1"),
}


@pytest.mark.parametrize("mistake", BAD_ROWS)
def test_bad_rows_are_one_sentence(
    mistake: str,
    model: Path,
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, named = BAD_ROWS[mistake]
    rows = write(tmp_path / f"{mistake}.jsonl", text)
    given = ("--model", model, "--task", task, *SMALL, "--queries", rows, "--out", tmp_path / "out")
    assert call(monkeypatch, "run", *given) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("dualview: ") and f"{mistake}.jsonl" in said[0] and named in said[0]
    assert not (tmp_path / "out").exists()


BAD_OPTIONS = {
    "unknown model": (("--model", "./nowhere"), "nowhere"),
    "no model": (("--model", ""), "empty"),
    "unknown dtype": (("--dtype", "int8"), "--dtype"),
    "unknown protocol": (("--protocol", "foo"), "--protocol"),
    "odd grid": (("--lr-grid", "0.1,nan"), "--lr-grid"),
    "unknown task": (("--task", "nothing"), "nothing"),
    "NaN rate": (("--lr", "nan"), "learning rate"),
    "negative rate": (("--lr", "-1"), "learning rate"),
    "word for a number": (("--shots", "many"), "--shots"),
    "context too short": (("--max-context", "3"), "context"),
    "no such device": (("--device", "abacus"), "abacus"),
    "seed auto with demos": (("--seed", "auto", "--demos", "x.jsonl"), "eed auto"),
    "records without a place": (("--save-records",), "--out"),
}


@pytest.mark.parametrize("mistake", BAD_OPTIONS)
def test_bad_options_are_one_sentence(
    mistake: str, model: Path, task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, named = BAD_OPTIONS[mistake]
    assert call(monkeypatch, "run", "--model", model, "--task", task, *SMALL, *options) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("dualview: ") and named in said


def test_a_file_that_cannot_be_written_is_told_before_the_work(
    model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = write(tmp_path / "file", "in the way")
    given = ("--model", model, "--task", task, *SMALL, "--out", blocked / "out")
    assert call(monkeypatch, "run", *given) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_template_without_a_field(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tiny.save_task(tmp_path / "task", template="Review: Sentiment:")
    assert call(monkeypatch, "run", "--model", model, "--task", bad, *SMALL) == 2
    assert "template" in capsys.readouterr().err


def test_a_truncated_gguf(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert call(monkeypatch, "run", "--model", cut, "--task", task, *SMALL) == 2
    assert "cut.gguf" in capsys.readouterr().err


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys, dualview, dualview.cli.main; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    quickest = min(_busy_seconds([sys.executable, "-m", "dualview", "--help"]) for _ in range(5))
    assert quickest < 0.5


def _busy_seconds(command: list[str]) -> float:
    """Of a processor: what else the machine does is not counted."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_diverged_run_is_reported_and_written(
    model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", model, "--task", task, *SMALL, "--lr", 1e300, "--json", tmp_path / "r.json")
    assert call(monkeypatch, "run", *given) == 0
    assert "diverged" in capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["ft"]["status"] == "diverged" and result["ft"]["final_loss"] is None


def test_weights_that_are_not_whole_are_refused(
    model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "part")
    weights = load_file(tmp_path / "part" / "model.safetensors")
    weights.pop("model.layers.1.self_attn.v_proj.weight")
    save_file(weights, tmp_path / "part" / "model.safetensors", {"format": "pt"})
    assert call(monkeypatch, "run", "--model", tmp_path / "part", "--task", task, *SMALL) == 2
    assert "layers.1.self_attn.v_proj.weight" in capsys.readouterr().err


def test_reported_queries_never_choose(
    model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Queries that are selection rows are left out of the selection; if that leaves none, it is said."""
    rows = (task.parent / "selection.jsonl").read_text().splitlines(keepends=True)
    some = write(tmp_path / "some.jsonl", "".join(rows[:4]))
    given = ("--model", model, "--task", task, *SMALL, "--lr", "auto", "--lr-grid", "0.001,0.01", "--controls", "none")
    assert call(monkeypatch, "run", *given, "--queries", some, "--json", tmp_path / "r.json") == 0
    texts = {json.loads(row)["text"] for row in rows[:4]}
    left = sum(json.loads(row)["text"] not in texts for row in rows)
    assert json.loads((tmp_path / "r.json").read_text())["selection"]["rows"] == left
    whole = write(tmp_path / "all.jsonl", "".join(rows))
    assert call(monkeypatch, "run", *given, "--queries", whole) == 2
    assert "selection" in capsys.readouterr().err


def test_calibration_fits_the_context_too(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With room for the query behind a demonstration but not for "N/A", the demonstrations are cut once more."""
    short = tiny.save_model(tmp_path / "short", context=26, learnt_positions=True)
    rows = write(tmp_path / "q.jsonl", '{"text": "film", "label": 0}\n')
    given = ("--model", short, "--task", task, *SMALL, "--queries", rows, "--calibrate", "--json", tmp_path / "r.json")
    assert call(monkeypatch, "run", *given) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- --help


def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *verb: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    assert call(monkeypatch, *verb, "--help") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("group", [(), ("lab",)])
def test_every_summary_is_whole(
    group: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = help_of(monkeypatch, capsys, *group).partition("Commands:")[2]
    assert len(said.splitlines()) > 4
    assert "..." not in said and "…" not in said
    assert all(len(line) <= 80 for line in said.splitlines())


TAKEN = {
    "--shots": "<int>",
    "--seed": "<int>|auto",
    "--lr": "<float>|auto",
    "--lr-grid": "<float>,…",
    "--batch-size": "<int>",
    "--data": "<path>",
    "--patch": "<path>",
    "--ft-loss": "all|label",
    "--model": "<str>",
}


def test_help_says_what_an_option_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = help_of(monkeypatch, capsys, "run")
    for option, kind in TAKEN.items():
        assert f"  {option} {kind} " in said
    text = {"--model", "--task", "--separator", "--device"}
    assert {line.split()[0] for line in said.splitlines() if " <str>" in line} == text


@pytest.mark.parametrize("verb", ["prompt", "sweep", "ls", "serve", "verify", "heads", "lab regression", "lab sign"])
def test_no_option_takes_a_type_of_python(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = help_of(monkeypatch, capsys, *verb.split())
    assert "range>" not in said and "list[" not in said and "<union" not in said


def test_a_number_that_is_none_is_one_sentence(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "run", "--model", model, "--shots", "few") == 2
    assert "Option --shots: Input should be a valid integer" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [None, "ACTIVE"])
def test_waiting_threads_sleep_unless_they_are_asked_to_spin(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", asked or "")  # set, so that it is put back
    if asked is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert call(monkeypatch, "tasks") == 0
    assert os.environ["OMP_WAIT_POLICY"] == (asked or "PASSIVE")


@pytest.mark.parametrize("verb", [("run", "--model"), ("run", "--out"), ("metrics",), ("exact",), ("report",)])
def test_a_name_that_no_file_system_takes_is_one_sentence(
    verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *verb, "m" * 300) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("dualview: mmm") and len(said) < 200
