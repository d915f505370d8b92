"""A small model and small runs for the pages and notebooks."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.small import make_small, save_cut_model


@pytest.fixture(scope="session")
def cut_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cut_model(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture
def small(cut_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(cut_model, monkeypatch.setattr)
