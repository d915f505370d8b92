"""A study: a spec expands to cells, an engine computes them, a store keeps them. `dualview.sweep(...)` runs one.

The names are imported on first use, so importing this package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dualview.io.callable_package import make_callable

if TYPE_CHECKING:
    from dualview.sweep.runner import Summary, sweep
    from dualview.sweep.spec import Spec

_HOME = {"Summary": "dualview.sweep.runner", "sweep": "dualview.sweep.runner", "Spec": "dualview.sweep.spec"}

__all__ = ["Spec", "Summary", "sweep"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dualview.sweep' has no attribute {name!r}")


make_callable(__name__, f"{__name__}.runner.sweep")
