"""kill −9 at any instant: at most the cell in flight is lost, and no row is ever partial or twice."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from crash.processes import kill, start, wait_for
from dualview.store.cell import checked
from dualview.store.paths import StorePaths
from dualview.store.store import Store
from dualview.sweep.runner import sweep
from sweep.study import grid, rows_by_query, rows_on_disk, save_study

KILLS = 20
"""At most: a fast machine has finished all cells before."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """48 cheap cells."""
    base = save_study(tmp_path_factory.mktemp("study"))
    return grid(base, seed=[1, 2, 3, 4], lr=[0.01, 0.02, 0.03], shots=[2, 3], ft_loss=["all", "label"], n_queries=4)


@pytest.fixture(scope="module")
def undisturbed(spec: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "undisturbed"
    summary = sweep(spec, store)
    assert summary.computed == 48 and not summary.failed
    return store


def keys_on_disk(store: Path) -> set[str]:
    return {folder.name for folder in StorePaths(store).cells.glob("*/*")}


def wait_for_another_cell(store: Path, than: int) -> None:
    wait_for(lambda: len(keys_on_disk(store)) > than)


def must_be_the_same(store: Path, other: Path) -> None:
    """Row for row and byte for byte, `provenance.run` aside."""
    assert rows_on_disk(store) == rows_on_disk(other)
    assert rows_by_query(store) == rows_by_query(other)
    assert not list(StorePaths(store).unfinished.iterdir()) and not list(StorePaths(store).locks.iterdir())


def test_killed_at_twenty_random_instants(spec: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    store, draw = tmp_path / "store", random.Random(0)
    seen: set[str] = set()
    killed = 0
    for number in range(KILLS):
        process = start(spec, store)
        if number % 2:  # from the moment it is at work, so that most kills hit a cell under way
            wait_for_another_cell(store, len(seen))
        time.sleep(draw.uniform(0, 0.25))
        killed += process.is_alive()
        with suppress(ProcessLookupError):  # it has ended
            kill(process)
        there = keys_on_disk(store)
        assert seen <= there  # nothing that was finished is lost
        for key in there:
            checked(StorePaths(store).cell(key))  # and nothing under its own name is partial
        seen = there
        if len(seen) == 48:
            break
    assert killed >= KILLS / 2, "it finished before it was killed often enough: take more cells"
    last = start(spec, store, tmp_path / "answer")
    last.join(120)
    told = json.loads((tmp_path / "answer").read_text())
    assert told["done_before"] == len(seen) and told["computed"] == 48 - len(seen)
    assert told["failed"] == [] and told["problems"] == 0
    must_be_the_same(store, undisturbed)


def test_two_processes_share_the_work(spec: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    store, answers = tmp_path / "store", [tmp_path / "first", tmp_path / "second"]
    processes = [start(spec, store, answer) for answer in answers]
    for process in processes:
        process.join(120)
    told = [json.loads(answer.read_text()) for answer in answers]
    assert sum(each["computed"] for each in told) == 48  # each cell once, by one of them
    assert all(each["done_before"] + each["computed"] + each["elsewhere"] == 48 for each in told)
    assert not any(each["failed"] or each["problems"] for each in told)
    must_be_the_same(store, undisturbed)


def test_a_dead_process_s_cell_is_taken_over(spec: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    doomed, survivor = start(spec, store), start(spec, store, tmp_path / "answer")
    wait_for_another_cell(store, 5)
    kill(doomed)
    survivor.join(120)
    told = json.loads((tmp_path / "answer").read_text())
    assert told["done_before"] + told["computed"] + told["elsewhere"] == 48 and not told["failed"]
    must_be_the_same(store, undisturbed)


def test_a_store_is_read_while_it_is_written(spec: dict[str, Any], tmp_path: Path) -> None:
    store = tmp_path / "store"
    process = start(spec, store)
    wait_for_another_cell(store, 1)
    counts: list[int] = []
    while process.is_alive() and len(counts) < 5:
        with Store(store) as opened:
            frame = opened.to_frame()
            counts.append(len(frame))
            assert frame.key.is_unique and not opened.problems
    process.join(120)
    assert counts == sorted(counts)
    with Store(store) as opened:
        assert len(opened.to_frame()) == 48
