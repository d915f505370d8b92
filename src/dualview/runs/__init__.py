"""Many runs: a spec expands to cells, an engine computes them, a store keeps them.

The names are loaded on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualview.runs.reading import load
    from dualview.runs.runner import Summary, sweep
    from dualview.runs.spec import Spec
    from dualview.runs.store import Store, Stored

_HOME = {
    "load": "dualview.runs.reading",
    "Summary": "dualview.runs.runner",
    "sweep": "dualview.runs.runner",
    "Spec": "dualview.runs.spec",
    "Store": "dualview.runs.store",
    "Stored": "dualview.runs.store",
}

__all__ = ["Spec", "Store", "Stored", "Summary", "load", "sweep"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dualview.runs' has no attribute {name!r}")
