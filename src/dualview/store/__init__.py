"""Many runs: a spec expands to cells, an engine computes them, a store keeps them.

The names are loaded on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualview.store.api import load
    from dualview.store.store import Store, Stored
    from dualview.sweep.runner import Summary, sweep
    from dualview.sweep.spec import Spec

_HOME = {
    "load": "dualview.store.api",
    "Summary": "dualview.sweep.runner",
    "sweep": "dualview.sweep.runner",
    "Spec": "dualview.sweep.spec",
    "Store": "dualview.store.store",
    "Stored": "dualview.store.store",
}

__all__ = ["Spec", "Store", "Stored", "Summary", "load", "sweep"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dualview.store' has no attribute {name!r}")
