"""The benchmarks' scripts: each can be imported and has a `main`; that of packing runs on a tiny model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from equivalence import tiny

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python benchmarks/name.py` does, the scripts' folder comes first."""
    monkeypatch.syspath_prepend(FOLDER)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common"))
def test_a_script_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    assert callable(module.main)
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_packing_is_measured_and_a_difference_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packing = importlib.import_module("packing")
    model, task = tiny.save_model(tmp_path / "model"), tiny.save_task(tmp_path / "task")
    given = ["--model", str(model), "--task", str(task), "--shots", "3", "--queries", "6", "--device", "cpu"]
    packing.main(given)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["benchmark"].split(", ")[-1] for line in found] == ["float32", "bfloat16"]
    assert [(line["shots"], line["queries"]) for line in found] == [(3, 6)] * 2
    assert float(found[0]["largest_difference"]) < 1e-4 < float(found[1]["whole_from_first_dtype"])
    packed = packing.packed
    monkeypatch.setattr(packing, "packed", lambda *asked: packed(*asked) + 2e-3)
    with pytest.raises(SystemExit, match=r"differ by 0\.002"):
        packing.main([*given, "--dtypes", "float32"])
