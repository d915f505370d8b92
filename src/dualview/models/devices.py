"""Where a model runs: one device, or its layers spread over all GPUs."""

from __future__ import annotations

import torch

from dualview.io.errors import UserError, first_line

BALANCED = "balanced"
"""The `device` that spreads a model's layers over all GPUs."""
_WEIGHTS_SHARE = 0.8  # of a GPU's free memory; the rest is for the passes


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"Device {device!r} cannot be used here ({first_line(error)}); try cpu or auto.") from error
    return found


def room_on_gpus() -> dict[int, int]:
    """What each GPU has free, so that nothing is left to the processor's memory, where a model's layers cannot run."""
    if not torch.cuda.is_available():
        raise UserError(f"--device {BALANCED} spreads a model over GPUs and there is none here; try cpu or auto.")
    return {gpu: int(torch.cuda.mem_get_info(gpu)[0] * _WEIGHTS_SHARE) for gpu in range(torch.cuda.device_count())}
