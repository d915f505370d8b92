"""Ctrl-C, and a scheduler's SIGTERM: what is finished is kept, and how to go on is said."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from crash.processes import run_apart, wait_for
from dualview.runs import claims
from runs.study import grid, save_study


def command(folder: Path, errors: Path, *arguments: str) -> None:
    """`dualview …` in a process of its own."""
    from dualview import cli

    os.chdir(folder)
    sys.argv = ["dualview", *arguments]
    with errors.open("w", buffering=1) as stream, contextlib.redirect_stderr(stream):
        cli.main()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_cleanly(kind: signal.Signals, tmp_path: Path) -> None:
    base = save_study(tmp_path)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(grid(base, seed=list(range(1, 200)))), encoding="utf-8")
    arguments = ("sweep", "study.yaml", "--store", "store", "--threads", "1", "--shard", "1/1")
    process = run_apart(command, tmp_path, tmp_path / "errors", *arguments)
    wait_for(lambda: len(list(tmp_path.glob("store/cells/*/*"))) > 2)
    assert process.pid is not None
    os.kill(process.pid, kind)
    process.join(60)
    assert process.exitcode == 130
    said = (tmp_path / "errors").read_text()
    assert "every finished cell is kept" in said
    assert said.endswith("Continue with: dualview sweep study.yaml --store store --threads 1 --shard 1/1\n")
    assert "nothing was written" not in said  # what was finished was
    store = tmp_path / "store"
    assert list((store / "unfinished").iterdir()) == []
    # The signal may fall just between a lock and whoever is to let it go: then its file stays, and nobody holds it.
    left = list((store / "claims").iterdir())
    assert len(left) <= 1 and all(claims.take(path.parent, path.stem) for path in left)
    assert 2 < len(list(store.glob("cells/*/*"))) < 199
