"""The samples of output that README and tutorial show are what their commands print, to rounding."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.blocks import ROOT, blocks_of, run_block

README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
SAMPLES = {
    "run --out out --save-records": (README, "fine-tuning: kv at lr 0.03"),
    "run --shots 16 --n-queries 60 --lr 0.01 --out first --save-records": (TUTORIAL, "fine-tuning: kv at lr 0.01, 16"),
    "run --shots 8 --n-queries 40 --lr 0.01 --seeds 1:3 --out seeds": (TUTORIAL, "fine-tuning: kv at lr 0.01, 8 steps"),
    "run --task my-task.yaml --shots 8 --lr 0.01 --out mine": (TUTORIAL, "Not testable for this list"),
}
_NUMBER = re.compile(r"[+-]?\d*\.?\d+(?:e-?\d+)?")


def alike(shown: str, printed: str) -> bool:
    """Whether two words are the same but for rounding: another processor may flip a query or two that nearly tie."""
    words = [_NUMBER.sub("#", word) for word in (shown, printed)]
    numbers = [[float(found) for found in _NUMBER.findall(word)] for word in (shown, printed)]
    if words[0] != words[1] or len(numbers[0]) != len(numbers[1]):
        return False
    return all(
        abs(a - b) <= (2 if a == int(a) and b == int(b) and abs(a) > 1 else 0.05) for a, b in zip(*numbers, strict=True)
    )


def holds(printed: str, sample: str) -> bool:
    """Whether each part of the sample (… is what it leaves out) is a run of the printed words.

    Where lines break depends on the terminal.
    """
    words = printed.split()
    for wanted in (part.split() for part in sample.split("…")):
        starts = range(len(words) - len(wanted) + 1)
        if not any(all(map(alike, wanted, words[start : start + len(wanted)])) for start in starts):
            return False
    return True


@pytest.mark.embedded
@pytest.mark.parametrize("command", SAMPLES)
def test_a_sample_is_what_its_command_prints(command: str, tmp_path: Path) -> None:
    page, begins = SAMPLES[command]
    for block in blocks_of(page):
        if "title" in block.options:
            run_block(block, tmp_path, {})
    shown = [block.text for block in blocks_of(page) if block.language == "text"]
    [sample] = [text for text in shown if any(line.startswith(begins) for line in text.splitlines()[:2])]
    chosen = re.search(r"at lr ([\d.]+)", sample)  # by a query or two: given, so that rounding cannot choose another
    rate = ["--lr", chosen[1]] if chosen and "--lr" not in command else []
    done = subprocess.run(
        [sys.executable, "-m", "dualview", *command.split(), *rate],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert holds(done.stdout, sample), done.stdout


def test_the_exact_model_gives_what_the_tutorial_shows(tmp_path: Path) -> None:
    [commands] = [block for block in blocks_of(TUTORIAL) if block.text.startswith("dualview exact")]
    [sample] = [block.text for block in blocks_of(TUTORIAL) if block.text.startswith("exact on exact:")]
    printed = ""
    for line in commands.text.splitlines():
        done = subprocess.run(
            [sys.executable, "-m", *line.split()],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        printed += done.stdout
    assert holds(printed, sample), printed
    [verdict] = [block.text for block in blocks_of(TUTORIAL) if block.text.startswith("Supported for this list")]
    assert holds(printed, verdict), printed


def test_what_counts_as_the_same() -> None:
    assert holds("a\nSimAOU raw  +0.162 to +0.170\n(p = 0.04)", "SimAOU raw +0.161 to\n+0.171")
    assert not holds("SimAOU raw +0.162", "SimAOU raw +0.262") and not holds("rotated +0.1", "noise +0.1")
    assert alike("35", "36") and not alike("35", "38") and not alike("0", "1") and not alike("seeds.json", "seed.json")


def test_the_home_page_shows_what_the_readme_shows() -> None:
    shown = " ".join(block.text for block in blocks_of(README) if block.language == "text")
    samples = [block.text for block in blocks_of(ROOT / "docs" / "index.md") if block.language == "text"]
    assert samples and all(part.split() for part in samples)
    for sample in samples:
        assert all(" ".join(part.split()) in " ".join(shown.split()) for part in sample.split("…"))
