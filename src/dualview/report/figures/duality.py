"""Figures of the identities: what signing the values costs, by the kind of noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualview.report.figures.style import GREY, dress, look, new_figure, small_print

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dualview.duality.theory.sign import Risk

_NOISE = {"none": "no noise", "gaussian": "Gaussian noise", "cauchy": "Cauchy noise"}


def sign_risk(risks: Sequence[Risk], note: str = "") -> Figure:
    """The risk of each sign variant after one step, against the number of examples, one panel for each noise.

    `risks` is `duality.theory.sign.risk_table(...)`. 0 is perfect, 1 no better than predicting 0; the grey line is
    1 − 2/π, below which the sign of the whole batch's gradient cannot fall.
    """
    noises = [noise for noise in _NOISE if any(risk.noise == noise for risk in risks)]
    names = list(dict.fromkeys(risk.estimator for risk in risks))
    figure = new_figure(2.1 * max(2, len(noises)) + 1.9, 3.2)
    panels = figure.subplots(1, len(noises), sharey=True, squeeze=False)[0]
    for axes, noise in zip(panels, noises, strict=True):
        dress(axes, xlabel="examples", ylabel="relative risk" if noise == noises[0] else "")
        axes.set_title(_NOISE[noise], fontsize=8.5)
        for index, name in enumerate(names):
            points = sorted((r.n_samples, r.risk) for r in risks if r.noise == noise and r.estimator == name)
            how = look(index)
            x, y = [n for n, _ in points], [risk for _, risk in points]
            axes.plot(x, y, color=how.colour, marker=how.marker, linestyle=how.line, markersize=4, label=name)
        axes.axhline(1 - 2 / math.pi, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)), label="1 − 2/π")
        axes.set_ylim(0.0, 1.05)
        axes.set_xscale("log")
        ticks = sorted({risk.n_samples for risk in risks})
        axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axes.minorticks_off()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7.5, frameon=False, handlelength=2.6)
    small_print(figure, "One step of gradient descent with signs: risk by number of examples", note)
    return figure
