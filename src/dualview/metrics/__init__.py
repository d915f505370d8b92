"""Metrics as pure functions of records: no model, no torch, float64 throughout."""

from dualview.metrics.summary import Layered, Metrics, compute_metrics

__all__ = ["Layered", "Metrics", "compute_metrics"]
