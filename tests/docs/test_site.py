"""The site builds without a warning, asks no other machine for anything, and says what the program says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.blocks import ROOT

_ASKED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr, done.stdout + done.stderr
    return folder


def test_no_page_asks_another_machine(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        asked = list(_ASKED.findall(page.read_text(encoding="utf-8")))
        assert not asked, f"{page.name} loads {asked}"


def test_every_block_of_code_is_shown_as_one(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert "```" not in page.read_text(encoding="utf-8"), page.name
    assert "--editable" in (site / "tutorial.html").read_text(encoding="utf-8")


def test_every_verb_and_option_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for said in ("dualview run", "dualview verify", "--lr-grid", "--save-records", "--controls"):
        assert said in text


def test_the_reference_is_made_from_docstrings(site: Path) -> None:
    text = (site / "reference" / "duality.html").read_text(encoding="utf-8")
    assert "softmax_split" in text and "tokens as columns" in text
