"""What `--device auto` means on this machine, without importing torch where there can be no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

_SIGNS = tuple(Path("/dev") / name for name in ("nvidiactl", "nvmap", "dxg", "kfd"))
"""Without one of these neither CUDA (also under WSL or on a Jetson) nor ROCm finds a GPU on Linux."""


def auto_kind() -> str:
    """The kind of device that `auto` means here: `cuda` or `cpu`, as torch would choose."""
    if "torch" not in sys.modules:
        no_gpu = sys.platform == "linux" and not any(sign.exists() for sign in _SIGNS)
        if no_gpu or sys.platform == "darwin":
            return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
