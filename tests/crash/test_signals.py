"""Ctrl-C, and a scheduler's SIGTERM: what is finished is kept, and how to go on is said."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from crash.processes import run_apart, wait_for
from dualview.store import locks
from dualview.store.signals import uninterrupted
from dualview.sweep.runner import sweep
from sweep.study import grid, save_study


def command(folder: Path, errors: Path, *arguments: str) -> None:
    """`dualview …` in a process of its own."""
    from dualview.cli import main as cli

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
    assert list((store / "claims").iterdir()) == []
    assert 2 < len(list(store.glob("cells/*/*"))) < 199


@pytest.mark.parametrize("moment", ["taking", "letting go"])
def test_a_signal_in_the_middle_of_a_lock(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes when the lock's file is there and its holder is not noted yet, or no longer."""
    acquire, release, sent = locks.FileLock.acquire, locks.FileLock.release, list[str]()

    def interrupt() -> None:
        sent.append("Ctrl-C")
        os.kill(os.getpid(), signal.SIGINT)

    def acquired(self: Any, *given: Any, **more: Any) -> Any:
        found = acquire(self, *given, **more)
        if Path(self.lock_file).parent.name == "claims" and moment == "taking":
            interrupt()
        return found

    def released(self: Any, *given: Any, **more: Any) -> None:
        if Path(self.lock_file).parent.name == "claims" and moment == "letting go" and self.is_locked:
            interrupt()
        release(self, *given, **more)

    monkeypatch.setattr(locks.FileLock, "acquire", acquired)
    monkeypatch.setattr(locks.FileLock, "release", released)
    summary = sweep(grid(save_study(tmp_path), seed=[1, 2, 3], n_queries=4), tmp_path / "store")
    assert summary.stopped and summary.left + summary.computed == 3 and sent == ["Ctrl-C"]
    assert list((tmp_path / "store" / "claims").iterdir()) == []


def test_a_killed_process_s_lock_files_are_removed(tmp_path: Path) -> None:
    base, store = save_study(tmp_path), tmp_path / "store"
    assert sweep(grid(base, n_queries=4), store).computed == 1
    left = store / "claims" / f"{'0' * 64}.lock"
    left.touch()  # of a cell that no later sweep asks for
    living = locks.acquire(store / "claims", "1" * 64)
    assert living is not None
    with living:
        assert sweep(grid(base, n_queries=4), store).done_before == 1
        assert [path.stem for path in (store / "claims").iterdir()] == ["1" * 64]


def test_a_lock_is_released_once(tmp_path: Path) -> None:
    first = locks.acquire(tmp_path, "cell")
    assert first is not None
    first.release()
    second = locks.acquire(tmp_path, "cell")
    assert second is not None
    first.release()  # must not remove the file of the second
    assert locks.acquire(tmp_path, "cell") is None
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_signals_wait_for_the_end_of_a_block() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), uninterrupted(), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with uninterrupted():
        pass

    def elsewhere() -> None:
        with uninterrupted():  # handlers can be set in the main thread alone
            done.append("another thread")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done[-1] == "another thread"
