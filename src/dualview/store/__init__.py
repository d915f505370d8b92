"""Finished runs, one cell each, in a folder that survives a killed process.

The names are imported on first use, so importing this package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualview.store.api import load
    from dualview.store.folder import Stored
    from dualview.store.store import Store

_HOME = {"load": "dualview.store.api", "Store": "dualview.store.store", "Stored": "dualview.store.folder"}

__all__ = ["Store", "Stored", "load"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dualview.store' has no attribute {name!r}")
