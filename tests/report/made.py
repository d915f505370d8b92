"""One real run of a tiny model with every control, and a result that can be bent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dualview.comparison.result import Result
from dualview.records import Records, load_records
from dualview.verbs import run as compare
from equivalence import tiny


@dataclass(frozen=True)
class TinyRun:
    folder: Path
    """What the run wrote: result.json and records.safetensors."""
    task: Path
    result: Result
    records: Records


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    root = tmp_path_factory.mktemp("report")
    model, task = tiny.save_model(root / "model"), tiny.save_task(root / "task", validation=20)
    folder = root / "out"
    compare(
        model=str(model),
        task=str(task),
        shots=5,
        n_queries=20,
        lr=0.05,
        lr_grid="0.01,0.1",
        dtype="float64",
        device="cpu",
        save_records=True,
        out=folder,
    )
    records = load_records(folder / "records.safetensors")
    return TinyRun(folder, task, Result.load(folder / "result.json"), records)


Bend = Callable[[Callable[[dict[str, Any]], None]], Result]


@pytest.fixture
def bend(run: TinyRun) -> Bend:
    """The run's result after its JSON was changed."""

    def bent(change: Callable[[dict[str, Any]], None]) -> Result:
        content = json.loads((run.folder / "result.json").read_text(encoding="utf-8"))
        change(content)
        return Result.model_validate(content)

    return bent


def without_layers(content: dict[str, Any]) -> None:
    """As if the controls had no values layer by layer."""
    for control in content["controls"].values():
        control.pop("per_layer", None)


def unrecorded(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a result (`sim_aou`, `sim_am`, `update_norm`) of a run that did not record it."""
    return {key: {} if isinstance(value, dict) else None for key, value in part.items()}
