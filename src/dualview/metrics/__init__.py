"""Metrics as pure functions of records: no model, no torch, float64 throughout.

`dualview.metrics(records)` recomputes every number of a run.
"""

from dualview.io.callable_package import make_callable
from dualview.metrics.summary import Layered, Metrics, compute_metrics

__all__ = ["Layered", "Metrics", "compute_metrics"]

make_callable(__name__, f"{__name__}.recompute.recompute")
