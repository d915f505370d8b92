"""Standard output that cannot be written: one sentence, and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dualview
from equivalence import tiny

SOURCE = Path(dualview.__file__).parents[1]
REASONS = {">/dev/full": "No space left on device", ">&-": "Bad file descriptor"}


def run_to(stream: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`dualview …` with its standard output redirected by a shell; a pipe's exit code is that of dualview."""
    command = f'"$0" -m dualview "$@" {stream}'
    if stream.startswith("|"):
        command = f'{{ "$0" -m dualview "$@"; echo "exit code $?" >&2; }} {stream}'
    there = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["sh", "-c", command, sys.executable, *words], env=there, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "verb", ["--help", "tasks", "tasks --json -", "assets list", "doctor", "verify --model none", "sweep", "ls"]
)
def test_a_full_standard_output_is_one_sentence(verb: str, tmp_path: Path) -> None:
    words = verb.split()
    if verb == "sweep":
        (tmp_path / "spec.yaml").write_text(f"task: {tiny.save_task(tmp_path / 'task')}\nshots: 2\n")
        words = ["sweep", str(tmp_path / "spec.yaml"), "--store", str(tmp_path / "new"), "--dry-run", "--json", "-"]
    if verb == "ls":
        (tmp_path / "store" / "cells").mkdir(parents=True)
        words += ["--store", str(tmp_path / "store")]
    run = run_to(">/dev/full", *words)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1] == "dualview: The output could not be written: No space left on device."


@pytest.mark.parametrize("stream", REASONS)
def test_what_is_printed_in_parts(stream: str, tmp_path: Path) -> None:
    """Nothing of it is flushed before the end."""
    model, task = tiny.save_model(tmp_path / "model"), tiny.save_task(tmp_path / "task")
    run = run_to(stream, "prompt", "--model", str(model), "--task", str(task), "--shots", "2", "--n-queries", "2")
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == f"dualview: The output could not be written: {REASONS[stream]}."


@pytest.mark.parametrize("words", [("tasks",), ("tasks", "--json", "-")])
def test_a_reader_that_leaves_is_no_error(words: tuple[str, ...]) -> None:
    run = run_to("| :", *words)
    assert run.stderr == "exit code 1\n"


def test_a_mistake_is_told_whatever_standard_output_is() -> None:
    run = run_to(">&-", "tasks", "nowhere.yaml")
    assert run.returncode == 2 and "nowhere.yaml" in run.stderr and "output" not in run.stderr
