"""Where a result came from: everything that decides its numbers and, apart, when and how long it ran."""

from __future__ import annotations

import platform
import socket
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from dualview.clock import Clock
from dualview.controls.settings import control_seeds
from dualview.tasks.prompt import prompts_hash

if TYPE_CHECKING:
    from dualview.comparison import Prepared
    from dualview.models.loading import LanguageModel

_PACKAGES = ("dualview", "torch", "transformers", "tokenizers", "numpy", "scipy", "safetensors")


def attention_path(lm: LanguageModel) -> str:
    """How the model is asked."""
    return "shared prefix, packed queries" if lm.fast else f"whole prompts: {lm.whole_because}"


def device_name(device: torch.device) -> str:
    """What the model ran on, as its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def provenance(prepared: Prepared, clock: Clock) -> dict[str, Any]:
    """The result's `provenance`; what differs between two runs of the same numbers stands under `run`."""
    lm, options = prepared.lm, prepared.options
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "model": lm.name,
        "architecture": type(lm.model).__name__,
        "weights_hash": lm.weights_hash,
        "model_commit": lm.commit,
        "code_commits": dict(lm.code_commits),
        "data_commits": dict(prepared.task.commits),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": str(lm.device),
        "threads": torch.get_num_threads(),
        "attention": attention_path(lm),
        "seeds": {"demos": prepared.seed, **(control_seeds(prepared) if options.controls != "none" else {})},
        "prompts_hash": prompts_hash(prepared.prompts),
        "options": options.changed,
        "run": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "device_name": device_name(lm.device),
            "seconds": {name: round(seconds, 3) for name, seconds in clock.laps.items()},
        },
    }
