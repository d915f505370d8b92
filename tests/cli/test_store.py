"""The verbs as a person uses them: what they print, what they write, and their exit codes."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dualview.cli import main as cli
from dualview.io.hashing import sha256_of
from dualview.store.cell import ROWS, FileNote, stamp_of
from dualview.store.store import Store
from dualview.store.tables import TABLES
from sweep.study import grid


@pytest.fixture
def study(base: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(grid(base, seed=[1, 2], lr=[0.01, 0.03])), encoding="utf-8")
    return path


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "finished"))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `dualview …`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["dualview", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.mark.parametrize("verb", [["ls"], ["query", "SELECT task, sim_aou_raw FROM cells JOIN runs USING (key)"]])
def test_reading_a_store_does_not_wait_for_what_only_runs_need(finished: Path, verb: list[str]) -> None:
    """These take longer to import than a query of a million cells takes."""
    code = (
        "import sys; from dualview.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "assert not {'torch', 'transformers', 'scipy', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *verb, "--store", str(finished)], check=True, capture_output=True)


def test_a_sweep_and_its_resumption(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert call(monkeypatch, "sweep", study, "--store", store, "--dry-run") == 0
    assert "4 cells (2 seed × 2 lr): 0 done, 4 to do" in capsys.readouterr().err and not store.exists()
    assert call(monkeypatch, "sweep", study, "--store", store, "--shard", "1/2", "--threads", 1) == 0
    said = capsys.readouterr()
    assert "2 cells (2 seed × 2 lr): 0 done, 2 to do" in said.err and "2 computed" in said.out
    assert call(monkeypatch, "sweep", study, "--store", store, "--json", "-") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["cells"], summary["done_before"], summary["computed"], summary["failed"]) == (4, 2, 2, [])


def test_failed_cells_are_told_and_counted(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, store = tmp_path / "study.yaml", tmp_path / "store"
    path.write_text(yaml.safe_dump(grid(base, model=["./nowhere", base["model"]], seed=[1, 2])), encoding="utf-8")
    assert call(monkeypatch, "sweep", path, "--store", store) == 1
    said = capsys.readouterr()
    assert "failed: model ./nowhere, seed 1: There is no model folder ./nowhere" in said.err
    assert "failed: 2 cells: There is no model folder" in said.out and "2 failed" in said.out
    assert call(monkeypatch, "ls", "--store", store) == 0
    assert "failed: 2 × ./nowhere" in capsys.readouterr().out
    assert call(monkeypatch, "ls", "--store", store, "--json", "-") == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed["cells"]) == 2 and listed["failures"][0]["options"]["model"] == "./nowhere"
    assert (
        call(monkeypatch, "query", "SELECT count(*) AS n, reason FROM failures GROUP BY reason", "--store", store) == 0
    )
    assert "There is no model" in capsys.readouterr().out


def test_ls_show_diff(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "ls", "--store", store) == 0
    listed = capsys.readouterr().out
    for word in ("SimAOU raw", "its floor", "chance", "verdict", "tiny"):
        assert word in listed
    assert call(monkeypatch, "ls", "--store", store, "--limit", 1) == 0
    assert "… and 3 more" in capsys.readouterr().out
    assert call(monkeypatch, "ls", "--store", store, "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)["cells"]
    quick = [row for row in rows if row["controls"] == "quick"]
    assert len(rows) == 4 and len(quick) == 2
    assert call(monkeypatch, "show", quick[0]["key"][:10], "--store", store) == 0
    shown = capsys.readouterr().out
    assert quick[0]["key"] in shown and "highest floor" in shown
    assert call(monkeypatch, "show", quick[0]["key"], "--store", store, "--json", "-") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["key"] == quick[0]["key"] and content["accuracy"]["icl"] == quick[0]["accuracy_icl"]
    pair = [row["key"] for row in quick]
    assert call(monkeypatch, "diff", *pair, "--store", store, "--json", "-") == 1
    differing = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert {"seed", "prompts_hash"} <= set(differing) and "model" not in differing
    assert (differing["seed"]["left"], differing["seed"]["right"]) == (quick[0]["seed"], quick[1]["seed"])
    assert call(monkeypatch, "diff", *pair, "--store", store) == 1
    assert "seed" in capsys.readouterr().out
    assert call(monkeypatch, "diff", pair[0], pair[0], "--store", store) == 0


def test_diff_of_stores(
    store: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "diff", store, finished) == 0
    assert "4 cells are the same in both" in capsys.readouterr().out
    lost = next(iter(sorted(store.glob("cells/*/*"))))
    shutil.rmtree(lost)
    assert call(monkeypatch, "diff", store, finished, "--json", "-") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["only_left"], found["only_right"]) == (3, [], [lost.name])


def test_query_and_export(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sql = "SELECT controls, count(*) AS n FROM cells GROUP BY controls ORDER BY controls"
    assert call(monkeypatch, "query", sql, "--store", store) == 0
    assert capsys.readouterr().out.split() == ["controls", "n", "none", "2", "quick", "2"]
    assert call(monkeypatch, "query", sql, "--store", store, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == [{"controls": "none", "n": 2}, {"controls": "quick", "n": 2}]
    assert call(monkeypatch, "export", tmp_path / "layers.csv", "--store", store, "--table", "layers") == 0
    assert (tmp_path / "layers.csv").read_text().startswith("key,layer,sim_aou_raw")


def test_columns_of_one_name(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT 1 AS a, 2 AS b, 3 AS a"
    assert call(monkeypatch, "query", sql, "--store", store) == 0
    titles, values = capsys.readouterr().out.splitlines()
    assert len(titles.split()) == 3 and values.split() == ["1", "2", "3"]
    assert call(monkeypatch, "query", sql, "--store", store, "--json", "-") == 0
    assert [list(row.values()) for row in json.loads(capsys.readouterr().out)] == [[1, 2, 3]]


def test_brackets_are_text(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To rich, which draws the tables, they would be markup."""
    monkeypatch.chdir(tmp_path)
    models = ["m[v2]", "x[/y]"]
    Path(shutil.copytree(base["model"], tmp_path / models[0]))
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(grid(base, model=models)), encoding="utf-8")
    assert call(monkeypatch, "sweep", "study.yaml", "--store", "s[/s]") == 1
    for verb in (("ls",), ("query", "SELECT model AS \"[red]\", '[/y]' AS b FROM cells")):
        capsys.readouterr()
        assert call(monkeypatch, *verb, "--store", "s[/s]") == 0
        said = capsys.readouterr().out
        assert "m[v2]" in said and "[/y]" in said
    [cell] = sorted(Path("s[/s]").glob("cells/*/*"))
    shutil.copytree("s[/s]", "other[/s]")
    shutil.rmtree(Path("other[/s]") / cell.relative_to("s[/s]"))
    assert call(monkeypatch, "diff", "s[/s]", "other[/s]") == 1
    assert "1 only in s[/s]" in capsys.readouterr().out
    assert call(monkeypatch, "show", cell.name, "--store", "s[/s]") == 0
    assert "m[v2]" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["{", '{"schema": "dualview.cell/1"}', ""])
def test_a_damaged_cell_is_one_sentence(
    damage: str,
    store: Path,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cell = sorted(store.glob("cells/*/*"))[0]
    assert call(monkeypatch, "ls", "--store", store) == 0
    (cell / "manifest.json").write_text(damage)
    (cell / "result.json").write_text(damage)
    stamp = stamp_of(str(cell))
    with Store(store) as opened:  # as if no one had looked yet
        opened.index.restamp(cell.name, stamp)
    for verb in (("diff", store, finished), ("show", cell.name, "--store", store)):
        capsys.readouterr()
        assert call(monkeypatch, *verb) == 2
        error = capsys.readouterr().err.strip()
        assert "cannot be read" in error and cell.name in error and "run the sweep again" in error
        assert len(error.splitlines()) == 1


def test_cells_of_another_model_are_not_the_same(
    store: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal rows under another key: the keys say that something else was measured, and diff says what."""
    cell = sorted(store.glob("cells/*/*"))[0]
    key = cell.name[:-8] + "00000000"
    with Store(store) as opened:
        manifest = opened.manifest(cell.name)
        for name in TABLES:
            rows = pq.read_table(cell / f"{name}.parquet")
            rows = rows.set_column(0, "key", pa.array([key] * len(rows), pa.string()))
            pq.write_table(rows, cell / f"{name}.parquet")
        notes = {name: FileNote(size=(cell / name).stat().st_size, sha256=sha256_of(cell / name)) for name in ROWS}
        changed: dict[str, Any] = {"key": key, "files": {**manifest.files, **notes}}
        changed["identity"] = {**manifest.identity, "tokenizer": "another"}
        (cell / "manifest.json").write_text(manifest.model_copy(update=changed).model_dump_json(by_alias=True))
        cell.rename(cell.with_name(key))
    assert call(monkeypatch, "diff", store, finished, "--json", "-") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], list(found["differing"])) == (3, [key])
    assert [each["name"] for each in found["differing"][key]] == ["identity.tokenizer"]


def test_how_to_go_on_is_a_command_for_a_shell(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dualview.sweep.runner.sweep", interrupted)
    options = ("--engine", "ray", "--address", "a b", "--workers", "2", "--cpus", "0.5", "--gpus", "0.0")
    options += ("--retries", "0", "--threads", "3", "--shard", "1/2", "--track", "wandb", "--track", "trackio")
    given = ("sweep", "my study.yaml", "--store", "a $store", *options)
    assert call(monkeypatch, *given) == 130
    said = capsys.readouterr().err
    assert "nothing was written" not in said and "dualview: interrupted" not in said
    assert shlex.split(said.partition("Continue with: ")[2]) == ["dualview", *given]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ls", "--store", "nowhere"), "There is no store nowhere"),
        (("show", "zz", "--store", "{store}"), "No cell begins with 'zz'"),
        (("show", "", "--store", "{store}"), "4 cells begin with ''"),
        (("query", "DROP VIEW cells", "--store", "{store}"), "A query is one SELECT"),
        (("export", "rows.txt", "--store", "{store}"), "must end in"),
        (("sweep", "none.yaml", "--store", "{store}"), "none.yaml cannot be read"),
        (("diff", "a", "b"), "There is no store a"),
        *(
            (
                (*verb, "empty"),
                "empty is not a store: the folder is empty; name a folder that `dualview sweep` wrote to",
            )
            for verb in (
                ("ls", "--store"),
                ("show", "ab", "--store"),
                ("query", "SELECT 1", "--store"),
                ("export", "rows.csv", "--store"),
                ("diff", "empty"),
            )
        ),
        (("report", "empty"), "empty holds neither result.json nor seeds.json and is no store"),
        (("serve", "--no-browser", "--store", "empty"), "empty is not a store; --store takes a folder that"),
        (
            ("sweep", "{study}", "--store", "other"),
            "other is not a store: it has no store.json; name a store or an empty",
        ),
        (("ls", "--store", "other"), "other is not a store: it has no store.json; name a folder that"),
        (("sweep", "zero.yaml", "--store", "new", "--dry-run"), "seeds is 0, which is not a draw"),
        (("sweep", "many.yaml", "--store", "new", "--dry-run"), "--shots is 500 but task"),
        (("sweep", "many.yaml", "--store", "new"), "--shots is 500 but task"),
        (("sweep", "{study}", "--store", "{store}", "--retries", "3"), "--retries is for Ray"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[str, ...],
    said: str,
    store: Path,
    study: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "other"):
        Path(folder).mkdir()
    Path("other", "notes.txt").touch()
    given = yaml.safe_load(study.read_text(encoding="utf-8"))
    Path("many.yaml").write_text(yaml.safe_dump({**given, "shots": [4, 500]}), encoding="utf-8")
    Path("zero.yaml").write_text("seeds: 0", encoding="utf-8")
    assert call(monkeypatch, *(part.format(store=store, study=study) for part in arguments)) == 2
    assert not list(Path("new").glob("cells/*/*"))
    error = capsys.readouterr().err.strip()
    assert error.startswith("dualview: ") and said in error and "\n" not in error
