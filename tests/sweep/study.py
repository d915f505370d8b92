"""A study small enough to be run a hundred times: a tiny random model, a task of made-up rows, and grids over them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualview.store.paths import StorePaths
from dualview.store.store import Store
from dualview.store.tables import TABLES
from dualview.sweep.runner import Summary, sweep
from equivalence import tiny


def save_study(folder: Path) -> dict[str, Any]:
    """A model and a task on disk; the options every cell has in common."""
    tiny.save_model(folder / "model")
    task = tiny.save_task(folder / "task")
    return {
        "model": str(folder / "model"),
        "task": str(task),
        "shots": 3,
        "n_queries": 6,
        "lr": 0.03,
        "controls": "none",
        "device": "cpu",
    }


def grid(base: dict[str, Any], **axes: Any) -> dict[str, Any]:
    return {**base, **axes}


def rows_on_disk(store: Path) -> dict[str, bytes]:
    """Every row file of every cell, byte for byte, and its result less `provenance.run`."""
    found: dict[str, bytes] = {}
    for folder in sorted(StorePaths(store).cells.glob("*/*")):
        for table in TABLES:
            found[f"{folder.name}/{table}"] = (folder / f"{table}.parquet").read_bytes()
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        del result["provenance"]["run"]
        found[f"{folder.name}/result"] = json.dumps(result).encode()
    return found


def rows_by_query(store: Path) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table as a query gives it, sorted."""
    from dualview.store.query import table

    with Store(store) as opened:
        return {name: table(opened, name).to_pylist() for name in TABLES}


class Counter:
    """Counts calls of a function, and may put something in their way."""

    def __init__(self, function: Callable[..., Any], before: Callable[..., None] = lambda *_, **__: None) -> None:
        self.function, self.before, self.calls = function, before, 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        self.before(*args, **named)
        return self.function(*args, **named)


def cell_of(store: Path, *, controls: str = "quick", seed: int = 1) -> Path:
    with Store(store) as opened:
        frame = opened.to_frame()
        [key] = frame.loc[(frame.controls == controls) & (frame.seed == seed), "key"]
        return opened.paths.cell(key)


def truncated(cell: Path) -> str:
    path = cell / "queries.parquet"
    path.write_bytes(path.read_bytes()[:100])
    return "queries.parquet has 100 bytes instead of"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a cheap cell."""
    return save_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="session")
def finished(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished store of four cells (two with controls), not to be changed."""
    store = tmp_path_factory.mktemp("stores") / "finished"
    summary = sweep(grid(base, seed=[1, 2], controls=["none", "quick"]), store)
    assert summary.computed == 4 and not summary.failed
    return store


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished store, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "store"))


@pytest.fixture
def again(base: dict[str, Any], store: Path) -> Callable[[], Summary]:
    """Runs the finished store's grid again."""
    return lambda: sweep(grid(base, seed=[1, 2], controls=["none", "quick"]), store)
