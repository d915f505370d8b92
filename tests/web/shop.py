"""A store of a few cells, made as a user makes one: by a sweep of the tiny model over a tiny task."""

from __future__ import annotations

from pathlib import Path

from dualview.sweep import sweep
from equivalence import tiny


def make_store(folder: Path, model: Path) -> Path:
    """Two seeds at one learning rate, six queries each."""
    task = tiny.save_task(folder / "task")
    spec = {"model": str(model), "task": str(task), "seed": [1, 2], "shots": 3, "n_queries": 6, "lr": 0.05}
    sweep({**spec, "device": "cpu"}, folder / "store")
    return folder / "store"
