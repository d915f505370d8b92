"""A real Chromium. Where there is none these tests are skipped and say so; under CI that is a failure."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from browser.watched import NAMES, executable, missing
from equivalence import tiny


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
