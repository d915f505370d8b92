"""What the dry run of a sweep refuses: the mistakes that `dualview run --dry-run` finds, without loading a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualview.comparison.inputs import encode, read_inputs
from dualview.io import assets
from dualview.io.hub import HubName
from dualview.models.reader import load_reader, locate
from dualview.options import RunOptions
from dualview.sweep.plan import PlannedCell, rows_are_here
from dualview.tasks.task import load_task

_NOT_READ = {"seed", "device", "lr", "lr_grid", "epochs", "ft_rule", "ft_loss", "ft_params", "controls", "save_records"}
"""Options whose value changes nothing here; a draw stands for all of them."""


def must_be_able_to_start(cells: Sequence[PlannedCell]) -> None:
    """Refuse a model that is not there, a file that cannot be read, and prompts that do not fit the context.

    Nothing is downloaded: models and rows of the hub are checked by their own cells. So is the device: a dry run may be
    made on a machine without the GPUs that the sweep will have.
    """
    seen: set[tuple[Any, ...]] = set()
    for options in (cell.options for cell in cells):
        alike = tuple(value for name, value in vars(options).items() if name not in _NOT_READ)
        if alike not in seen:
            seen.add(alike)
            _check(options)


def _check(options: RunOptions) -> None:
    here = _model_is_here(options.model)
    if options.seed == "auto":  # any draw will do, and the model is not asked for the best
        options = replace(options, seed=1)
    if not rows_are_here(load_task(options.task, options.data, options.labels)):
        return
    inputs = read_inputs(options)
    if here:
        reader = load_reader(options.model, dtype=options.dtype, trust_remote_code=options.trust_remote_code)
        assert inputs.demos is not None
        encode(options, reader, inputs.task, inputs.demos, inputs.queries)


def _model_is_here(name: str) -> bool:
    """Whether its tokenizer can be read at once; a GGUF file would have to be converted first."""
    if name == "embedded":
        return assets.MODEL.folder.is_dir()
    found = locate(name)
    return not isinstance(found, HubName | Path)
