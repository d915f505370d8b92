"""What the labs share when they summarise: means, paired differences with 95 % intervals, and curves with bands.

The 95 % intervals are those of `dualview.metrics.statistics`, one for each kind of data:

    bootstrap over queries      one training or model; rows (queries, pieces or blocks of text, tasks) are resampled
    Student over draws          one value for each training, or for each of many random problems
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dualview.metrics.statistics import draw_interval, draw_p, query_interval, ratio_interval
from dualview.report.figures.curves import Curve

Values = Float[np.ndarray, " row"]


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the known values; None if there is none.

    >>> mean([1.0, None, 2.0]), mean([None])
    (1.5, None)
    """
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def over_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """A number over seeds: mean, standard deviation (of two or more) and the values."""
    known = [value for value in values if value is not None]
    spread = statistics.stdev(known) if len(known) > 1 else None
    return {"mean": mean(known), "sd": spread, "values": list(values)}


# ---------------------------------------------------------------------------------------------------------- intervals


def student_ci(values: Sequence[float | None], limits: tuple[float, float] | None = None) -> list[float] | None:
    """Student's 95 % interval over draws, as JSON; `limits` are the bounds of what a value can be."""
    found = draw_interval(values, limits)
    return None if found is None else found.to_json()


def student(values: Sequence[float | None], limits: tuple[float, float] | None = None) -> dict[str, Any]:
    """The mean of the known values and Student's 95 % interval over draws."""
    return {"mean": mean(values), "ci": student_ci(values, limits)}


def bootstrap_ci(rows: Values, name: str) -> list[float] | None:
    """The 95 % bootstrap interval of the mean over rows, as JSON."""
    found = query_interval(rows, seed=0, name=name)
    return None if found is None else found.to_json()


def is_positive(ci: Sequence[float] | None) -> bool:
    """Whether an interval lies above 0."""
    return ci is not None and ci[0] > 0


def student_over_draws(gap: Values) -> dict[str, Any]:
    """Student's 95 % interval and two-sided p of paired differences, one for each draw; null where all are equal."""
    p = draw_p(gap)
    return {"ci": None if p is None else student_ci(gap.tolist()), "p": p}


def over_trainings_or_rows(runs: Sequence[Values], name: str) -> dict[str, Any] | None:
    """The mean of paired differences and its 95 % interval; `runs` has one array of differences for each seed.

    Several seeds: Student over draws. One seed: bootstrap over rows.
    """
    if not runs:
        return None
    means = [float(run.mean()) for run in runs]
    return {
        "mean": statistics.fmean(means),
        "ci": student_ci(means) if len(runs) > 1 else bootstrap_ci(runs[0], name),
        "values": means,
        "over": "seeds" if len(runs) > 1 else "text alone",
    }


def ratio_of_means(part: Values, whole: Values, name: str) -> dict[str, Any]:
    """mean(part) / mean(whole), with a 95 % bootstrap interval over rows; none if the denominator may change sign."""
    if abs(float(whole.mean())) < 1e-12:
        return {"value": None, "ci": None}
    found = ratio_interval(part, whole, name=name)
    return {"value": float(part.mean() / whole.mean()), "ci": None if found is None else found.to_json()}


# ------------------------------------------------------------------------------------------------------------- curves


def range_curve(x: Sequence[float], runs: Sequence[Sequence[float | None]]) -> Curve:
    """The mean over seeds at each x; with several seeds, a band from the lowest to the highest.

    A value may be missing, and a run may be shorter than x: it diverged or was stopped.
    """
    known = [[value for value in column if value is not None] for column in itertools.zip_longest(*runs)]
    middle = [mean(column) for column in known]
    if len(runs) == 1:
        return Curve(x, middle)
    return Curve(x, middle, [min(c, default=None) for c in known], [max(c, default=None) for c in known])


def interval_curve(
    x: Sequence[float], rows: Sequence[dict[str, Any]], show: Callable[[float], float] = lambda value: value
) -> Curve:
    """Each row's mean and, where every row has one, its 95 % interval as a band; `show` converts to the axis's unit."""
    middle = [None if row["mean"] is None else show(row["mean"]) for row in rows]
    if any(row["ci"] is None for row in rows):
        return Curve(x, middle)
    return Curve(x, middle, [show(row["ci"][0]) for row in rows], [show(row["ci"][1]) for row in rows])
