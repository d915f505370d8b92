"""A disk that is full, or turns read-only, in the middle of a sweep or a run: nothing that was finished is lost."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import dualview
from dualview.comparison.result import Result
from dualview.io.errors import UserError
from dualview.io.saving import ExtraFailed
from dualview.store import folder as store_module
from dualview.store.cell import checked
from dualview.store.paths import StorePaths
from dualview.store.store import Store
from dualview.sweep.runner import sweep
from sweep.study import grid, rows_by_query, rows_on_disk, save_study


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return grid(save_study(tmp_path_factory.mktemp("study")), seed=[1, 2, 3, 4], lr=[0.01, 0.02, 0.03], n_queries=4)


@pytest.fixture(scope="module")
def undisturbed(spec: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "undisturbed"
    assert sweep(spec, store).computed == 12
    return store


def mount(*options: str) -> bool:
    return subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A disk with room for a few cells."""
    place = tmp_path / "disk"
    place.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=768k", "tmpfs", str(place)):
        pytest.skip("mounting a small disk is not allowed here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


def test_a_full_disk(spec: dict[str, Any], undisturbed: Path, disk: Path) -> None:
    store, said = disk / "store", []
    first = sweep(spec, store, say=said.append)
    assert 0 < first.computed < 12 and len(first.failed) == 12 - first.computed and not first.stopped
    assert "No space left on device" in first.failed[0].reason
    assert any("No space left on device" in line for line in said)
    whole = [checked(folder) for folder in StorePaths(store).cells.glob("*/*")]
    assert len(whole) == first.computed  # what is there is whole, and nothing else is there
    assert list(StorePaths(store).unfinished.iterdir()) == []
    with Store(store) as opened:
        assert len(opened.to_frame()) == first.computed
    assert mount("-o", "remount,size=8m", str(disk))
    second = sweep(spec, store)
    assert (second.done_before, second.computed, second.failed) == (first.computed, 12 - first.computed, ())
    assert rows_on_disk(store) == rows_on_disk(undisturbed)
    assert rows_by_query(store) == rows_by_query(undisturbed)


def test_a_folder_that_turns_read_only(
    spec: dict[str, Any], undisturbed: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mount("-o", "remount,size=8m", str(disk))
    store, put = disk / "store", Store.put

    def put_three(self: Store, cell: Any) -> bool:
        if len(self.index.entries()) == 3:  # from here on whoever opens a file in it meets a read-only mount
            assert mount("--bind", str(store), str(store)) and mount("-o", "remount,bind,ro", str(store))
        return put(self, cell)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "put", put_three)
        summary = sweep(spec, store)
    assert (summary.computed, len(summary.failed), summary.stopped) == (3, 9, False)
    assert "Read-only file system" in summary.failed[0].reason
    with Store(store) as opened:
        assert not opened.writable and len(opened.to_frame()) == 3 and len(list(opened.results())) == 3
    with pytest.raises(UserError, match="cannot be written"):
        sweep(spec, store)
    subprocess.run(["umount", str(store)], check=True)
    assert sweep(spec, store).computed == 9
    assert rows_on_disk(store) == rows_on_disk(undisturbed)


def test_a_run_whose_folder_turns_read_only_after_its_result(
    spec: dict[str, Any], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mount("-o", "remount,size=8m", str(disk))
    out, save = disk / "out", Result.save

    def save_and_lock(self: Result, path: Path) -> None:
        save(self, path)
        assert mount("--bind", str(out), str(out)) and mount("-o", "remount,bind,ro", str(out))

    monkeypatch.setattr(Result, "save", save_and_lock)
    with pytest.warns(ExtraFailed) as warned:
        result = dualview.run(**{**spec, "seed": 1, "lr": 0.01}, out=out, save_records=True)
    said = [str(each.message) for each in warned]
    assert len(said) == 2 and all("Read-only file system" in line and "result.json" in line for line in said)
    assert [path.name for path in out.iterdir()] == ["result.json"]  # neither report nor records, nor part of one
    assert Result.load(out / "result.json").to_json() == result.to_json()
    subprocess.run(["umount", str(out)], check=True)


def test_a_write_cut_short(
    spec: dict[str, Any], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where mounting is not allowed: a limit on file sizes, by which the system itself cuts one cell's write short."""
    largest = max(path.stat().st_size for path in undisturbed.glob("cells/*/*/*"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    write, calls = store_module.write_cell, []

    def limited(cell: Any, folder: Path) -> Any:
        calls.append(folder)
        limit = largest // 2 if len(calls) == 3 else before[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            return write(cell, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(store_module, "write_cell", limited)
    first = sweep(spec, tmp_path / "store")
    assert first.computed == 11 and "File too large" in first.failed[0].reason
    assert sweep(spec, tmp_path / "store").computed == 1
    assert rows_on_disk(tmp_path / "store") == rows_on_disk(undisturbed)
