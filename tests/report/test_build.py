"""`dualview report` on everything it takes, through the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dualview.errors import UserError
from dualview.report.build import report
from dualview.report.commands import add
from dualview.runs import sweep
from report.made import Bend, TinyRun, without_layers
from report.parsed import data_of, parse
from report.test_store_report import planted


def ask(*words: str | Path) -> str:
    app = typer.Typer()
    app.callback()(lambda: None)
    add(app)
    found = CliRunner().invoke(app, ["report", *map(str, words)])
    if found.exception is not None:
        raise found.exception
    return found.output


@pytest.fixture
def folder(run: TinyRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run.folder, tmp_path / "out"))


def kinds(path: Path) -> set[str]:
    return {chart["kind"] for chart in data_of(parse(path.read_text(encoding="utf-8")))["charts"]}


def test_a_run_s_folder_with_its_records(folder: Path) -> None:
    assert ask(folder) == f"wrote {folder / 'report.html'}\n"
    assert "boxes" in kinds(folder / "report.html")
    assert sorted(p.name for p in folder.iterdir()) == ["records.safetensors", "report.html", "result.json"]


def test_a_result_alone(bend: Bend, tmp_path: Path) -> None:
    alone = tmp_path / "other.json"
    bend(without_layers).save(alone)
    assert ask(alone) == f"wrote {tmp_path / 'other.html'}\n" and "boxes" not in kinds(tmp_path / "other.html")
    ask(alone, "--out", tmp_path / "there" / "x.html")
    assert (tmp_path / "there" / "x.html").read_bytes() == (tmp_path / "other.html").read_bytes()


def test_figures_when_asked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualview.report.figures_style.FORMATS", ("svg",))
    said = ask(folder, "--figures", tmp_path / "figures")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"accuracy.svg", "sim_aou.svg", "sim_am.svg", "demo_mass.svg"} <= names
    assert all(name in said for name in names)


def test_several_seeds(run: TinyRun, tmp_path: Path) -> None:
    results = [result.to_json() for result in planted(run.result, ("mr",), 2)]
    content = {"schema": "dualview.seeds/1", "seeds": [1, 2], "summary": {}, "verdicts": {}, "results": results}
    (tmp_path / "seeds.json").write_text(json.dumps(content), encoding="utf-8")
    assert ask(tmp_path) == f"wrote {tmp_path / 'report.html'}\n"
    page = parse((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert len(page.by_id("runs").all("tbody")[0].all("tr")) == 4


def test_a_store(run: TinyRun, tmp_path: Path) -> None:
    spec = {"model": str(run.folder.parent / "model"), "task": str(run.task), "seed": [1, 2], "shots": 3}
    sweep({**spec, "n_queries": 6, "lr": 0.05, "device": "cpu"}, tmp_path / "store")
    ask(tmp_path / "store", "--out", tmp_path / "store.html")
    page = parse((tmp_path / "store.html").read_text(encoding="utf-8"))
    rows = page.by_id("runs").all("tbody")[0].all("tr")
    assert [row.all("td")[1].text for row in rows] == ["1", "2"]


def test_mistakes_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no"):
        ask(tmp_path / "nothing")
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        ask(tmp_path / "bad.json")
    (tmp_path / "other.json").write_text('{"schema": "x"}', encoding="utf-8")
    with pytest.raises(UserError, match="not a dualview result"):
        ask(tmp_path / "other.json")
    content = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    content["controls"]["sim_aou"] = {"value": 1}
    (tmp_path / "odd.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match="lacks what a report needs"):
        ask(tmp_path / "odd.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError):
        ask(tmp_path / "empty")
    with pytest.raises(UserError, match="folder"):
        ask(folder, "--out", tmp_path)
    assert not list(tmp_path.glob("*.html"))


def test_records_of_another_run_are_refused(run: TinyRun, folder: Path) -> None:
    content = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    content["queries"][3]["zsl"][0] -= 0.5
    (folder / "result.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match="another run"):
        report(folder)


def test_help_is_light() -> None:
    code = (
        "import sys, typer\nfrom dualview.report.commands import add\nadd(typer.Typer())\n"
        "print(sorted({'torch', 'matplotlib', 'pandas', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"
