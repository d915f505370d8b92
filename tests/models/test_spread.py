"""A model whose layers lie on several devices, as far as one device can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # pyright: ignore[reportMissingTypeStubs]

import dualview
from dualview.errors import UserError
from dualview.models.dispatch import is_spread
from dualview.models.loading import load_model
from equivalence import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def test_spreading_needs_gpus(folder: Path) -> None:
    if torch.cuda.is_available():
        assert load_model(str(folder), device="balanced").device.type == "cuda"
    else:
        with pytest.raises(UserError, match=r"spreads a model over GPUs and there is none here"):
            load_model(str(folder), device="balanced")


@pytest.mark.parametrize("rule", ["sgd", "layer-causal", "linearised"])
def test_a_spread_model_gives_the_same_numbers(folder: Path, tmp_path: Path, rule: str) -> None:
    """Every block wears the hook that moves its inputs, and the logits are read as a spread model reads them."""
    task = str(tiny.save_task(tmp_path))
    whole, spread = (load_model(str(folder), dtype="float64", device="cpu") for _ in range(2))
    for block in spread.anatomy.blocks:
        add_hook_to_module(block, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    spread.model.hf_device_map = {"first": 0, "second": 1}  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    assert is_spread(spread.model) and not is_spread(whole.model)
    options: dict[str, Any] = {"task": task, "shots": 4, "n_queries": 6, "lr": 0.05, "ft_rule": rule}
    one, other = (dualview.compare(model=lm, **options).to_json() for lm in (whole, spread))
    for found in (one, other):
        found["provenance"].pop("run")
    assert one == other
