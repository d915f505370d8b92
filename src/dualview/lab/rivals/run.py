"""`dualview lab rivals`: which rule does a trained in-context learner follow? Gradient descent, or something better?

Linear self-attention is trained on regression in context, by depth and by condition number of the inputs, and compared
with OLS, ridge, gradient descent, GD++, preconditioned GD and GD++, and Newton's method. Every rule has as many steps
as the model has layers and is tuned on problems that are not reported. The closest rule wins by interval over seeds.
"""

from __future__ import annotations

from dualview.lab.harness import Findings, Job, lab
from dualview.lab.rivals.report import figures, tables
from dualview.lab.rivals.settings import RivalsSettings


@lab(RivalsSettings, tables, figures, single_thread=True)
def rivals(job: Job[RivalsSettings]) -> Findings:
    """Train self-attention on regression in context and find the rule it is closest to, by depth and condition number.

    Against OLS, ridge, gradient descent, GD++, preconditioned GD and Newton's method, each at its best; by prediction
    and by ∂ŷ/∂x_q, with intervals over seeds. Also shared weights, softmax, and x and y as separate tokens.
    """
    from dualview.lab.rivals.compare import run

    return run(job)
