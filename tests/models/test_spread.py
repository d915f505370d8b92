"""A model whose layers lie on several devices, as far as one device can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model  # pyright: ignore[reportMissingTypeStubs]
from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # pyright: ignore[reportMissingTypeStubs]

import dualview
from dualview.anatomy.dispatch import is_spread
from dualview.io.errors import UserError
from dualview.models.loading import adopt, load_model
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
    """Every block has the hook that moves its inputs, and the logits are read as a spread model reads them."""
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize("rule", ["sgd", "layer-causal", "linearised"])
def test_layers_on_two_devices(folder: Path, tmp_path: Path, rule: str) -> None:
    """accelerate's own hooks, the first layer on a GPU and the others on the CPU."""
    whole, loaded = (load_model(str(folder), dtype="float64", device="cpu") for _ in range(2))
    layers = len(loaded.anatomy.blocks)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": 0 if i == 0 else "cpu" for i in range(layers)}
    spread = adopt(dispatch_model(loaded.model, places, main_device="cpu", force_hooks=True), loaded.tokenizer, "two")
    assert is_spread(spread.model) and {p.device.type for p in spread.model.parameters()} == {"cpu", "cuda"}
    options: dict[str, Any] = {"task": str(tiny.save_task(tmp_path)), "shots": 4, "n_queries": 6, "lr": 0.05}
    one, other = (dualview.compare(model=lm, **options, ft_rule=rule).to_json() for lm in (whole, spread))
    assert abs(np.array([q["ft"] for q in one["queries"]]) - [q["ft"] for q in other["queries"]]).max() < 1e-4
    for metric, name in (("sim_aou", "raw"), ("sim_am", "delta"), ("update_norm", "ft")):
        assert one[metric][name] == pytest.approx(other[metric][name], abs=1e-4)  # norms run in float32
