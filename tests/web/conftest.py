from __future__ import annotations

from pathlib import Path

import pytest

from equivalence import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and its tokenizer, as a folder."""
    return tiny.save_model(tmp_path_factory.mktemp("web-model"))
