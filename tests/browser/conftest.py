"""A real Chromium. Where there is none these tests are skipped and say so; under CI that is a failure."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from browser.explorer import Reference
from browser.watched import NAMES, executable, missing
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from equivalence import tiny
from web.live import cache_of, serving


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    found = executable()
    if found is None:
        missing(f"no Chromium on the path ({', '.join(NAMES)})")
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        missing("playwright is not installed")
        raise
    expect.set_options(timeout=30_000)
    # Not even a name is looked up: whatever asked for another machine would fail and be seen.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=arguments)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("browser-model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for two of the library's tasks: one field and two."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("sst2", "cb"):
        (folder / name).mkdir()
        for split, seed in (("train", 1), ("validation", 2)):
            rows = tiny.rows(12, seed)
            if name == "sst2":
                made = [{**row, "label": row["label"] % 2} for row in rows]
            else:
                made = [{"premise": row["text"], "hypothesis": "it was fine", "label": row["label"]} for row in rows]
            tiny.write_rows(folder / name / f"{split}.jsonl", made)
    return folder


@pytest.fixture(scope="module")
def address(model: Path, data: Path) -> Generator[str]:
    with serving(cache_of(model, data=data)) as found:
        yield found


@pytest.fixture(scope="module")
def lm(model: Path) -> LanguageModel:
    return load_model(str(model), dtype="float64", device="cpu")


@pytest.fixture
def reference(lm: LanguageModel, tmp_path: Path) -> Reference:
    return Reference(lm, tmp_path)
