"""Provenance: everything that decides a result's numbers and, separately, when and how long it ran.

What can fail is collected before the work (`provenance`); afterwards only the times are added (`finished`).
"""

from __future__ import annotations

import platform
import socket
from datetime import UTC, datetime
from typing import Any

import torch

from dualview.comparison.controls.settings import control_seeds
from dualview.comparison.prepare import Prepared
from dualview.io.clock import Clock
from dualview.io.versions import versions
from dualview.models.language_model import LanguageModel
from dualview.tasks.prompts import prompts_hash


def attention_path(lm: LanguageModel) -> str:
    """How the model is asked."""
    return "shared prefix, packed queries" if lm.fast else f"whole prompts: {lm.whole_because}"


def device_name(device: torch.device) -> str:
    """What the model ran on, as its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def provenance(prepared: Prepared) -> dict[str, Any]:
    """All of the result's `provenance` that is known before the work; `run` is where two equal runs may differ."""
    lm, options = prepared.lm, prepared.options
    lm.hash_weights_soon()  # takes seconds for a large model; `finished` asks for it
    return {
        "versions": versions(),
        "model": lm.name,
        "architecture": type(lm.model).__name__,
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
        "run": {"host": socket.gethostname(), "device_name": device_name(lm.device)},
    }


def finished(known: dict[str, Any], lm: LanguageModel, clock: Clock) -> dict[str, Any]:
    """The same after the work: with the weights' hash, the date, and how long each part took."""
    seconds = {name: round(seconds, 3) for name, seconds in clock.laps.items()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {**known, "weights_hash": lm.weights_hash, "run": {"date": date, **known["run"], "seconds": seconds}}
