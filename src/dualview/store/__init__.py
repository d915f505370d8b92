"""Finished runs, one cell each, in a folder that survives a killed process.

A new column: its path in the result file, in `tables`. A new verb that reads a store: a function in `api`.

The names are imported on first use, so importing this package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualview.io.callable_package import lazy_names

if TYPE_CHECKING:
    from dualview.store.api import load
    from dualview.store.folder import Stored
    from dualview.store.store import Store

__all__ = ["Store", "Stored", "load"]
__getattr__ = lazy_names(__name__, {"api": ["load"], "folder": ["Stored"], "store": ["Store"]})
