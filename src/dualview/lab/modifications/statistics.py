"""Which differences from softmax attention survive the seeds.

Two outcomes of each training: the test loss after the last epoch, and its mean over all epochs (how fast it fell).
Each model's is compared with softmax attention's seed by seed, by Student's paired t-test, two-sided; Holm's correction
runs over all comparisons of both outcomes. A difference survives if its corrected p is below .05.

With five seeds the t-test assumes nearly normal differences; `seeds_lower` counts signs and assumes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dualview.lab.summaries import student_over_draws
from dualview.metrics.statistics import holm

LEVEL = 0.05
OUTCOMES = {"last": "test loss after the last epoch", "mean": "test loss, mean over epochs"}
Curves = Mapping[str, Mapping[str, Sequence[float | None]]]
"""Test losses by model and seed: before training, then after each epoch."""


def differences(curves: Curves, reference: str) -> dict[str, Any]:
    """Every model against the reference, by outcome and model."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in OUTCOMES:
        values = {name: [outcome_of(outcome, curve) for curve in seeds.values()] for name, seeds in curves.items()}
        found[outcome] = {name: compared(values[name], values[reference]) for name in values}
    tests = [row for rows in found.values() for name, row in rows.items() if name != reference]
    corrected = holm(np.array([math.nan if row["p"] is None else row["p"] for row in tests], dtype=np.float64))
    for row, p in zip(tests, corrected.tolist(), strict=True):
        row["p_holm"] = None if math.isnan(p) else p
        row["survives"] = row["p_holm"] is not None and row["p_holm"] < LEVEL
    return found


def outcome_of(outcome: str, curve: Sequence[float | None]) -> float | None:
    """One training's number; None if it diverged."""
    after = [value for value in curve[1:] if value is not None]
    if len(after) < len(curve) - 1:
        return None
    return after[-1] if outcome == "last" else sum(after) / len(after)


def compared(values: Sequence[float | None], reference: Sequence[float | None]) -> dict[str, Any]:
    """Mean, mean paired difference, Student's 95 % interval over trainings, and p; all null where a seed diverged."""
    row: dict[str, Any] = {"values": list(values), "mean": None, "difference": None, "ci": None, "p": None}
    row |= {"p_holm": None, "survives": False, "seeds_lower": None}
    if any(value is None for value in (*values, *reference)):
        return row
    own = np.array(values, dtype=np.float64)
    gap = own - np.array(reference, dtype=np.float64)
    row |= {"mean": float(own.mean()), "difference": float(gap.mean()), "seeds_lower": int((gap < 0).sum())}
    return row | student_over_draws(gap)
