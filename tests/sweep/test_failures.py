"""Sweeps in which something fails: the rest goes on, nothing finished is lost, and it is said what and why."""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dualview.comparison import run as comparison
from dualview.io.errors import UserError
from dualview.options import RunOptions
from dualview.store import cell as cells
from dualview.store.store import Store
from dualview.sweep import worker
from dualview.sweep.runner import sweep
from dualview.sweep.spec import Spec
from dualview.sweep.worker import is_out_of_memory
from sweep.study import Counter, grid, rows_on_disk

# ---------------------------------------------------------------------------------------------------------- surviving


def test_a_model_that_does_not_load_fails_its_own_cells(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(base["model"], broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    loaded = Counter(worker.load)
    monkeypatch.setattr(worker, "load", loaded)
    models = [str(tmp_path / "nowhere"), str(broken), base["model"]]
    said: list[str] = []
    summary = sweep(grid(base, model=models, seed=[1, 2]), tmp_path / "store", say=said.append)
    assert (summary.computed, len(summary.failed), summary.stopped) == (2, 4, False)
    assert loaded.calls == 3  # a failure is not tried again for the next cell
    reasons = [given_up.reason for given_up in summary.failed]
    assert "There is no model folder" in reasons[0] and "could not be loaded" in reasons[2]
    assert any("failed" in line and "nowhere" in line for line in said)
    with Store(tmp_path / "store") as store:
        assert sorted(failure.reason for failure in store.failures()) == sorted(reasons)
    shutil.copy(Path(base["model"]) / "model.safetensors", broken / "model.safetensors")
    again = sweep(grid(base, model=models, seed=[1, 2]), tmp_path / "store")
    assert (again.computed, len(again.failed)) == (2, 2)
    with Store(tmp_path / "store") as store:
        assert len(store.failures()) == 2  # what came right is forgotten


def out_of_memory(kind: str) -> BaseException:
    if kind == "gpu":
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if kind == "cpu":
        return RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 8 bytes")
    return MemoryError("Unable to allocate 3. TiB for an array")


@pytest.mark.parametrize("kind", ["gpu", "cpu", "numpy"])
def test_a_cell_that_runs_out_of_memory_gets_smaller_batches(
    kind: str, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int | None] = []

    def small_machine(_lm: object, _queries: object, how: Any, *_: object, **__: object) -> None:
        sizes.append(how.batch_size)
        if how.batch_size is None or how.batch_size > 1:
            raise out_of_memory(kind)

    monkeypatch.setattr(comparison, "ask", Counter(comparison.ask, small_machine))
    summary = sweep(base, tmp_path / "store")
    assert (summary.computed, summary.failed) == (1, ())
    assert sizes == [None, 3, 1, 1, 1]
    with Store(tmp_path / "store") as store:
        [stored] = store.results()
    assert any("out of memory: the batch was halved" in warning for warning in stored.result.warnings)
    monkeypatch.undo()
    alone = comparison.run(RunOptions.make(**grid(base, batch_size=1)))
    assert stored.result.accuracy == alone.accuracy and stored.result.sim_aou == alone.sim_aou
    assert sweep(base, tmp_path / "store").computed == 0  # it is the cell that was asked for


def test_a_cell_that_never_fits_is_given_up(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many_shots(_lm: object, _queries: object, how: Any, *_: object, **__: object) -> None:
        if len(how.prefix) > 30:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(comparison, "ask", Counter(comparison.ask, too_many_shots))
    summary = sweep(grid(base, shots=[2, 8]), tmp_path / "store")
    assert summary.computed == 1
    [given_up] = summary.failed
    assert given_up.options.shots == 8 and "Out of memory even with one query a pass (CUDA" in given_up.reason


def test_memory_is_told_from_other_errors() -> None:
    wrapped = UserError("layer-causal fine-tuning cannot follow it")
    wrapped.__cause__ = RuntimeError("CUDA out of memory.")
    assert is_out_of_memory(wrapped)
    for other in (RuntimeError("shapes do not match"), ValueError("out of memory lane"), UserError("no such task")):
        assert not is_out_of_memory(other)


def test_any_other_error_fails_its_cell_alone(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(prepared: Any, **_: object) -> None:
        if prepared.options.seed == 2:
            raise ZeroDivisionError("division by zero\nmore")

    monkeypatch.setattr(worker, "measure", Counter(worker.measure, bug))
    summary = sweep(grid(base, seed=[1, 2, 3]), tmp_path / "store")
    assert summary.computed == 2
    assert [given_up.reason for given_up in summary.failed] == ["ZeroDivisionError: division by zero"]
    with Store(tmp_path / "store") as store:
        [failure] = store.failures()
        assert "Traceback" in json.loads(failure.run)["trace"]


@pytest.mark.parametrize("kind", [OverflowError, sqlite3.IntegrityError, ValueError])
def test_whatever_writing_a_cell_meets_ends_that_cell_alone(
    kind: type[Exception], base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Counter(Store.put)

    def breaks(*_: object) -> None:
        if put.calls == 2:
            raise kind("too large for a column\nmore")

    put.before = breaks
    monkeypatch.setattr(Store, "put", lambda store, cell: put(store, cell))
    summary = sweep(grid(base, seed=[1, 2, 3]), tmp_path / "store")
    assert summary.computed == 2
    [given_up] = summary.failed
    assert given_up.reason == (f"It was computed but could not be written ({kind.__name__}: too large for a column).")
    with Store(tmp_path / "store") as store:
        [failure] = store.failures()
        assert "Traceback" in json.loads(failure.run)["trace"]
    monkeypatch.undo()
    assert sweep(grid(base, seed=[1, 2, 3]), tmp_path / "store").computed == 1


def test_a_cell_is_remembered_by_the_device_it_ran_on(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a cluster's head has another device than its workers: here the plan expects a GPU."""
    spec, store = grid(base, device="auto"), tmp_path / "store"
    with monkeypatch.context() as patched:
        patched.setattr("dualview.store.cell_key.auto_kind", lambda: "cuda")
        assert sweep(spec, store).computed == 1
        again = sweep(spec, store)
        assert (again.done_before, again.computed, again.elsewhere) == (0, 0, 1)  # not taken for a GPU's numbers
    assert sweep(spec, store).done_before == 1


@pytest.mark.parametrize("write", [1, 3, 6])
def test_no_room_at_any_write(
    write: int, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    """The disk is full at a cell's first, third or last write: that cell alone is lost, and nothing is half there."""
    calls = [0]
    whole = cells._write

    def full(path: Path, content: bytes) -> None:
        calls[0] += 1
        if calls[0] == 6 + write:  # in the second cell
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, content)

    monkeypatch.setattr(cells, "_write", full)
    store = tmp_path / "store"
    spec = grid(base, seed=[1, 2], controls=["none", "quick"])
    summary = sweep(spec, store)
    assert (summary.computed, len(summary.failed)) == (3, 1)
    assert summary.failed[0].reason == "It was computed but could not be written (No space left on device)."
    assert list((store / "unfinished").iterdir()) == []
    assert sweep(spec, store).computed == 1
    assert rows_on_disk(store) == rows_on_disk(finished)


def test_nothing_is_computed_that_cannot_be_kept(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk stays full the cells fail at once; the sweep goes on, and so does the next one."""
    measured = Counter(worker.measure)
    monkeypatch.setattr(worker, "measure", measured)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(cells, "_write", full)
        patched.setattr(Path, "write_bytes", full)
        summary = sweep(grid(base, seed=[1, 2, 3, 4]), tmp_path / "store")
    assert (summary.computed, len(summary.failed), measured.calls) == (0, 4, 1)
    assert sweep(grid(base, seed=[1, 2, 3, 4]), tmp_path / "store").computed == 4


def test_an_interrupt_keeps_what_is_finished(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Counter(worker.measure)

    def interrupted(*_: object, **__: object) -> None:
        if measured.calls == 3:
            raise KeyboardInterrupt

    measured.before = interrupted
    monkeypatch.setattr(worker, "measure", measured)
    summary = sweep(grid(base, seed=[1, 2, 3, 4]), tmp_path / "store")
    assert (summary.stopped, summary.computed, summary.left, summary.failed) == (True, 2, 2, ())
    assert list((tmp_path / "store" / "claims").iterdir()) == []
    assert sweep(grid(base, seed=[1, 2, 3, 4]), tmp_path / "store").computed == 2


def test_an_interrupt_while_packing_is_a_clean_stop(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_store: Store) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dualview.sweep.runner.pack", interrupted)
    summary = sweep(base, tmp_path / "store")
    assert (summary.stopped, summary.computed, summary.left) == (True, 1, 0)


def test_a_cell_in_other_hands_is_waited_for(base: dict[str, Any], tmp_path: Path) -> None:
    spec = Spec.make(grid(base, seed=[1, 2, 3]))
    with Store(tmp_path / "store", create=True) as store:
        lock = store.lock(spec.cells()[0])
        assert lock is not None and store.lock(spec.cells()[0]) is None
        threading.Timer(1.0, lock.release).start()
        said: list[str] = []
        summary = sweep(spec, tmp_path / "store", say=said.append)
    assert summary.computed == 3  # its holder let go without finishing it
    assert "waiting for 1 cell that another process is computing" in said


def test_mistakes_are_told_before_anything_runs(base: dict[str, Any], tmp_path: Path) -> None:
    for bad, said in (
        ({"task": "nosuch"}, "is not in the library"),
        ({"queries": str(tmp_path / "none.jsonl")}, "cannot be read"),
        ({"lr": [0.1, "fast"]}, "lr: "),
    ):
        with pytest.raises(UserError, match=said):
            sweep(grid(base, seed=[1, 2], **bad), tmp_path / "store")
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"engine": "spark"}, "There is no engine"),
        ({"address": "auto"}, "--address is for Ray; give --engine ray too"),
        ({"workers": 2}, "--workers is for Ray"),
        ({"cpus": 1}, "--cpus is for Ray"),
        ({"gpus": 0}, "--gpus is for Ray"),
        ({"retries": 3, "cpus": 2}, "--cpus and --retries are for Ray"),
        ({"shard": "3/2"}, "--shard"),
        ({"track": ["mlflow"]}, "There is no tracker"),
    )
    for extra, said in wrong:
        with pytest.raises(UserError, match=said):
            sweep(base, tmp_path / "store", **extra)


def test_the_estimate_comes_from_the_first_cells(base: dict[str, Any], tmp_path: Path) -> None:
    said: list[str] = []
    sweep(grid(base, seed=[1, 2, 3, 4, 5]), tmp_path / "store", say=said.append)
    assert said[0] == "5 cells (5 seed): 0 done, 5 to do"
    assert any(line.startswith("about") and "for 4 cells, from the first" in line for line in said)
    assert any("for 2 cells, from the first 3" in line for line in said)
