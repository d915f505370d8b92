"""Figures of the identities: what signing the values costs, by the kind of noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualview.report.charts.spec import Chart, Series
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dualview.duality.theory.sign import Risk

_NOISE = {"none": "no noise", "gaussian": "Gaussian noise", "cauchy": "Cauchy noise"}


def sign_risk(risks: Sequence[Risk], note: str = "") -> Figure:
    """The risk of each sign variant after one step, against the number of examples, one panel for each noise.

    `risks` is `duality.theory.sign.risk_table(...)`. 0 is perfect, 1 no better than predicting 0; the grey line is
    1 − 2/π, below which the sign of the whole batch's gradient cannot fall.
    """
    found = {noise: title for noise, title in _NOISE.items() if any(risk.noise == noise for risk in risks)}
    charts = [_chart(title, [risk for risk in risks if risk.noise == noise]) for noise, title in found.items()]
    title = "One step of gradient descent with signs: risk by number of examples"
    return draw(charts, title, note, (2.1 * max(2, len(charts)) + 1.9, 3.2), across=list(found.values()))


def _chart(title: str, risks: Sequence[Risk]) -> Chart:
    series: list[Series] = []
    for name in dict.fromkeys(risk.estimator for risk in risks):
        points = sorted((risk.n_samples, risk.risk) for risk in risks if risk.estimator == name)
        series.append({"name": name, "x": [n for n, _ in points], "values": [risk for _, risk in points]})
    return Chart(
        "lines",
        {
            "title": title,
            "x": {"label": "examples", "log": True},
            "y": {"label": "relative risk", "min": 0, "max": 1},
            "series": series,
            "rules": [{"name": "1 − 2/π", "value": 1 - 2 / math.pi}],
        },
    )
