"""The sign exercise's figure shows the table it was given."""

from __future__ import annotations

from dualview.duality.theory.sign import risk_table
from dualview.report.figures.theory import sign_risk


def test_every_risk_is_drawn_where_it_belongs() -> None:
    risks = risk_table((5, 20), ("none", "cauchy"), draws=200)
    panels = sign_risk(risks, "a note").axes
    assert [axes.get_title() for axes in panels] == ["no noise", "Cauchy noise"]
    for axes, noise in zip(panels, ("none", "cauchy"), strict=True):
        drawn = {str(line.get_label()): list(line.get_ydata()) for line in axes.lines}  # pyright: ignore
        for name in {risk.estimator for risk in risks}:
            assert drawn[name] == [risk.risk for risk in risks if risk.noise == noise and risk.estimator == name]
