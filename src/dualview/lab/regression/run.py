"""`dualview lab regression`: does training find gradient descent? (von Oswald et al. 2023, arXiv 2212.07677)

Self-attention is trained to do linear regression in context. It is compared with k steps of gradient descent and of
GD++, each at the step sizes that are best on the evaluated problems, and with Proposition 1's constructed weights.

What it shows: these trained weights compute what gradient descent computes, on these problems. What it does not show:
anything about language models, or about inputs far from the training's. The shift tables show these limits.
"""

from __future__ import annotations

from dualview.lab.harness import Findings, Job, lab
from dualview.lab.regression.report import figures, tables
from dualview.lab.regression.settings import RegressionSettings

__all__ = ["Settings", "figures", "regression", "tables"]

Settings = RegressionSettings


@lab(RegressionSettings, tables, figures, single_thread=True)
def regression(job: Job[RegressionSettings]) -> Findings:
    """Train self-attention on regression in context and compare it with gradient descent.

    The default is one linear layer on inputs uniform in ±.5; it takes a few minutes on a laptop. Its loss should be
    within 2 % of the best single step of gradient descent, its model cosine above .99.
    """
    if job.settings.task == "sine":
        from dualview.lab.regression.sine import run
    else:
        from dualview.lab.regression.linear import run
    return run(job)
