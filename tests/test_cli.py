"""The command line as a person uses it: what it prints, what it writes, and what it says to mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dualview import cli
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
    assert result["verdict"]["overall"] in ("supported", "indistinguishable", "contradicted")
    assert set(result["controls"]["sim_aou"]) >= {"ci", "floors", "ceiling", "p"}
    assert call(monkeypatch, "metrics", out / "records.safetensors", "--json", tmp_path / "m.json") == 0
    again = json.loads((tmp_path / "m.json").read_text())
    for key in ("rec2ftp", "sim_aou", "sim_am", "update_norm"):
        assert again[key] == result[key]


def test_dry_run_writes_nothing(
    model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", model, "--task", task, *SMALL, "--out", tmp_path / "out", "--dry-run")
    assert call(monkeypatch, "run", *given) == 0
    assert "prefix tokens" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_prompt_shows_every_token(
    model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", model, "--task", task, *SMALL, "--json", tmp_path / "p.json")
    assert call(monkeypatch, "prompt", *given) == 0
    spans = {token["span"] for token in json.loads((tmp_path / "p.json").read_text())}
    assert spans == {"bos", "template", "label", "separator", "query", "candidate"}
    assert "demonstrations" in capsys.readouterr().out


def test_tasks_are_listed_and_checked(
    task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "tasks") == 0
    assert "movie5" in capsys.readouterr().out
    assert call(monkeypatch, "tasks", task) == 0
    assert "selection" in capsys.readouterr().out


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
    "unknown task": (("--task", "nothing"), "nothing"),
    "NaN rate": (("--lr", "nan"), "learning rate"),
    "negative rate": (("--lr", "-1"), "learning rate"),
    "word for a number": (("--shots", "many"), "shots"),
    "context too short": (("--max-context", "3"), "context"),
    "no such device": (("--device", "abacus"), "abacus"),
    "seed auto with demos": (("--seed", "auto", "--demos", "x.jsonl"), "seed auto"),
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
    code = "import sys, dualview, dualview.cli; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    quickest = min(_seconds([sys.executable, "-m", "dualview.cli", "--help"]) for _ in range(5))
    assert quickest < 0.5


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start
