"""`dualview report` on everything it takes, through the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dualview.cli.report import report as verb
from dualview.io.errors import UserError
from dualview.report.build import report
from dualview.sweep import sweep
from report.made import Bend, TinyRun, without_layers
from report.parsed import data_of, parse
from report.test_store_report import planted


def ask(*words: str | Path) -> str:
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command()(verb)
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
    monkeypatch.setattr("dualview.report.figures.style.FORMATS", ("svg",))
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
    with pytest.raises(UserError, match=r"lacks what a report needs .controls.sim_aou.ci"):
        ask(tmp_path / "odd.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty holds neither result.json nor seeds.json and is no store; give"):
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
        "import sys, typer\nfrom dualview.cli.report import report\ntyper.Typer().command()(report)\n"
        "print(sorted({'torch', 'matplotlib', 'pandas', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


Change = Callable[[dict[str, Any]], object]


def bent(folder: Path, change: Change) -> Path:
    path = folder / "result.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_later_schema_is_refused(folder: Path) -> None:
    bent(folder, lambda content: content.update(schema="dualview.result/99"))
    with pytest.raises(UserError, match=r"is of schema dualview.result/99 and this dualview reads dualview.result/1"):
        ask(folder)


LACKING: list[tuple[Change, str]] = [
    (lambda c: c["provenance"].pop("weights_hash"), "provenance.weights_hash"),
    (lambda c: c["provenance"].pop("seeds"), "provenance.seeds"),
    (lambda c: c.update(queries=[]), "queries"),
    (lambda c: c["queries"][1].update(gold=9), "queries.1"),
    (lambda c: c["queries"][1]["ft"].pop(), "queries.1"),
    (lambda c: c["verdict"].pop("sentence"), "verdict.sentence"),
    (lambda c: c["verdict"]["levels"]["labels"].pop("outcome"), "verdict.levels.labels.outcome"),
    (lambda c: c["demo_mass"].update(per_head=[]), "demo_mass"),
    (lambda c: c["controls"]["sim_aou"]["per_layer"]["quantiles"]["q50"].pop(), "controls.sim_aou.per_layer"),
    (lambda c: c["controls"]["sim_aou"]["floors_p"].clear(), "controls.sim_aou"),
]


@pytest.mark.parametrize(("change", "said"), LACKING)
def test_what_a_file_lacks_is_named(folder: Path, change: Change, said: str) -> None:
    bent(folder, change)
    with pytest.raises(UserError, match=f"lacks what a report needs .{said}"):
        ask(folder)


def test_a_mistake_of_ours_is_not_told_as_the_file_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_given: object, **_named: object) -> None:
        raise IndexError("ours")

    monkeypatch.setattr("dualview.report.html.run.render", broken)
    with pytest.raises(IndexError, match="ours"):
        report(folder)
    monkeypatch.setattr("dualview.report.html.store.render_store", broken)
    with pytest.raises(IndexError, match="ours"):
        report(seeds_file(folder))


def seeds_file(folder: Path, **changes: Any) -> Path:
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    content = {
        "schema": "dualview.seeds/1",
        "seeds": [1],
        "summary": {},
        "verdicts": {},
        "results": [result],
        **changes,
    }
    (folder / "several.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "several.json"


def test_mistakes_in_a_file_of_seeds_are_one_sentence(folder: Path) -> None:
    with pytest.raises(UserError, match="holds no results"):
        report(seeds_file(folder, results=[]))
    with pytest.raises(UserError, match="result 0, is not a dualview result"):
        report(seeds_file(folder, results=[{}]))
    with pytest.raises(UserError, match=r"dualview.seeds/2"):
        report(seeds_file(folder, schema="dualview.seeds/2"))


def test_a_stored_result_that_lacks_something_is_named(
    run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneCell:
        """A store of a cell that another version wrote."""

        def __init__(self, _path: Path) -> None:
            pass

        def __enter__(self) -> OneCell:
            return self

        def __exit__(self, *_given: object) -> None:
            pass

        def results(self) -> list[Any]:
            content = run.result.to_json()
            content["queries"][0]["gold"] = 99
            return [SimpleNamespace(key="ab" * 32, result=type(run.result).model_validate(content))]

    (tmp_path / "cells").mkdir()
    monkeypatch.setattr("dualview.store.store.Store", OneCell)
    with pytest.raises(UserError, match=r"cell abababababab, lacks what a report needs .queries.0"):
        report(tmp_path)
