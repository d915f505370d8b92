from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualview.sweep.runner import Summary, sweep
from runs.study import grid, save_study


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
