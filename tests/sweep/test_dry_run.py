"""The dry run of a sweep refuses what the dry run of one of its cells does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dualview
from dualview.io.errors import UserError
from dualview.io.hub import NotCached
from dualview.models import loading
from dualview.sweep.runner import sweep
from sweep.study import grid

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no folder": ({"model": "./nofolder"}, "There is no model folder ./nofolder"),
    "a folder without a model": ({"model": "FOLDER"}, "has no config.json"),
    "short context": ({"max_context": 10}, "context"),
    "a broken patch": ({"patch": "FOLDER/patch.safetensors"}, "is not a readable patch file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_cell_is_found_without_loading_a_model(
    mistake: str, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, named = MISTAKES[mistake]
    (tmp_path / "patch.safetensors").write_bytes(b"broken")
    changed = {name: str(value).replace("FOLDER", str(tmp_path)) for name, value in changed.items()}
    with pytest.raises(UserError) as of_run:
        dualview.run(**{**base, **changed}, dry_run=True)
    monkeypatch.setattr(loading, "load_model", pytest.fail)
    axes = {name: [base.get(name), value] for name, value in changed.items()}  # the mistake is in the second cell
    with pytest.raises(UserError) as of_sweep:
        sweep(grid(base, **axes), tmp_path / "store", dry_run=True)
    assert str(of_sweep.value) == str(of_run.value) and named in str(of_sweep.value)
    assert not (tmp_path / "store").exists()


def test_the_model_may_choose_the_seed(base: dict[str, Any], tmp_path: Path) -> None:
    assert sweep(grid(base, seed=["auto", 1]), tmp_path / "store", dry_run=True).left == 2


def test_the_machine_may_lack_the_device(base: dict[str, Any], tmp_path: Path) -> None:
    assert sweep(grid(base, device="cuda"), tmp_path / "store", dry_run=True).left == 1


def test_nothing_is_downloaded(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object) -> None:
        raise NotCached("there is no network")

    monkeypatch.setattr("dualview.io.hub.resolve", offline)
    monkeypatch.setattr("dualview.sweep.dry_run.load_reader", pytest.fail)
    assert sweep(grid(base, model="owner/name"), tmp_path / "store", dry_run=True).left == 1
