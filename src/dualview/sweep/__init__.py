"""A study: a spec expands to cells, an engine computes them, a store keeps them. `dualview.sweep(...)` runs one.

A new engine: a class with the `run` of `engine.Engine`, named in `runner`. A new tracker: a class in `trackers`.

The names are imported on first use, so importing this package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualview.io.callable_package import lazy_names, make_callable

if TYPE_CHECKING:
    from dualview.sweep.runner import Summary, sweep
    from dualview.sweep.spec import Spec

__all__ = ["Spec", "Summary", "sweep"]
__getattr__ = lazy_names(__name__, {"runner": ["Summary", "sweep"], "spec": ["Spec"]})

make_callable(__name__, f"{__name__}.runner.sweep")
