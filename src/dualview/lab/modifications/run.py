"""`dualview lab modifications`: do the attentions that the dual view suggests learn better? (Ren & Liu, 2310.13220)

Regularised, negative and augmented attention (and sign attention) compared with softmax attention on problems learnt in
context, with 1 to 3 layers. Their figure shows one training curve each; here the best setting of each family is found
by search on held-out problems, over a range that includes where it hurts, and confirmed on fresh seeds and problems.

What it shows: differences on these problems at this size. Learning rate and sizes are the same for all, chosen so that
softmax attention learns: they favour softmax attention if anything.
"""

from __future__ import annotations

from dualview.lab.harness import Findings, Job, lab
from dualview.lab.modifications.report import figures, tables
from dualview.lab.modifications.settings import ModificationsSettings


@lab(ModificationsSettings, tables, figures, single_thread=True)
def modifications(job: Job[ModificationsSettings]) -> Findings:
    """Search where regularised, negative, augmented or sign attention beats softmax attention, and confirm it.

    Regression and classification in context, 1 to 3 layers; the best setting of each family on held-out problems is
    trained again with fresh seeds, with a paired test, corrected for the number of comparisons.
    """
    from dualview.lab.modifications.training import run

    return run(job)
