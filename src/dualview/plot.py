"""The figures of the report, one function each, as matplotlib figures.

Of one run:      `accuracy`, `sim_aou`, `sim_am`, `kendall`, `demo_mass`, `norm_curve`; `run_figures` draws all it has.
Of one answer:   `attention` draws what `dualview.explain` found.
Of many runs:    `accuracy_by_task(group)`, `similarity_by_layer(group, "sim_aou.raw", "SimAOU")` and
                 `similarity_against_norm(group.runs)`, for each `group` of `run_groups(STORE)`.
Of the theory:   `sign_risk`. `curves` draws any series with bands.
"""

from __future__ import annotations

from dualview.report.build import run_groups
from dualview.report.figures.curves import Curve, curves
from dualview.report.figures.explanation import attention
from dualview.report.figures.run import (
    accuracy,
    demo_mass,
    kendall,
    norm_curve,
    run_figures,
    sim_am,
    sim_aou,
)
from dualview.report.figures.store import accuracy_by_task, similarity_against_norm, similarity_by_layer
from dualview.report.figures.style import save
from dualview.report.figures.theory import sign_risk

__all__ = [
    "Curve",
    "accuracy",
    "accuracy_by_task",
    "attention",
    "curves",
    "demo_mass",
    "kendall",
    "norm_curve",
    "run_figures",
    "run_groups",
    "save",
    "sign_risk",
    "sim_am",
    "sim_aou",
    "similarity_against_norm",
    "similarity_by_layer",
]
