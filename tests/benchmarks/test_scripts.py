"""The benchmarks' scripts: each can be imported and has a `main`; the store's runs on a few cells."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
NEEDS = {"scoring": "lm_eval"}
"""What a script imports that the tests do not install."""


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python benchmarks/name.py` does, the scripts' folder comes first."""
    monkeypatch.syspath_prepend(FOLDER)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common"))
def test_a_script_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        return  # its numbers need the other program anyway
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    assert callable(module.main)
    monkeypatch.delitem(sys.modules, name, raising=False)
