"""`dualview lab regression`: does training find gradient descent? (von Oswald et al. 2023, arXiv 2212.07677)

Self-attention is trained to do linear regression in context and held against k steps of gradient descent, and of GD++,
each at its best step sizes on the very problems that are evaluated, and against Proposition 1's constructed weights.

What it shows: that these trained weights compute what gradient descent computes, on these problems. What it does not:
anything about language models, or about inputs far from the training's, where the shift tables show the limits.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualview.io.progress import Progress, Silent
from dualview.lab.harness import LabResult, Table, begin, finish, one_thread, provenance
from dualview.lab.regression.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def regression(
    *,
    out: Path | str | None = None,
    json: Path | str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> LabResult:
    """Train self-attention on regression in context and compare it with gradient descent.

    The default is one linear layer on inputs uniform in ±.5, in a few minutes on a laptop: its loss should come within
    2 % of the best single step of gradient descent, its model cosine above .99.
    """
    chosen, clock = begin(Settings, settings, out, json, "regression")
    if chosen.task == "sine":
        from dualview.lab.regression.sine import run
    else:
        from dualview.lab.regression.linear import run
    from dualview.models.loading import pick_device

    device = pick_device(chosen.device)
    with one_thread():
        found = run(chosen, device, out, clock, progress or Silent())
        origin = provenance("regression", chosen, clock, device)
    result = LabResult(
        lab="regression",
        settings=chosen.to_json(),
        seeds=chosen.all_seeds,
        results=found.results,
        provenance=origin,
    )
    return finish(result, out=out, json=json, tables=tables, figures=figures, units=found.units)


def tables(result: LabResult) -> list[Table]:
    """The numbers, for people."""
    from dualview.lab.regression import report as regression_report

    return regression_report.tables(result)


def figures(result: LabResult) -> dict[str, Figure]:
    """Training curves against gradient descent's loss, and the shifts."""
    from dualview.lab.regression import report as regression_report

    return regression_report.figures(result)
