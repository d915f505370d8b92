"""`dualview lab modifications`: do the attentions that the dual view suggests learn better? (Ren & Liu, 2310.13220)

It repeats their talk's figure over seeds, with sign attention added: test loss over 100 epochs of regularised,
augmented and negative models compared with softmax attention on regression in context.

An epoch is one pass over a fixed set of `train_tasks` problems in batches of `batch_size`; the test loss is measured
after each, on `test_tasks` others. A seed decides the initial weights, the training set, the order of its batches and
the test set, which are the same for every model. Differences are taken seed by seed, so a difference that survives the
seeds survives other data as well.

What it shows: differences on this task at this size. Learning rate and sizes are the same for all, and such that
softmax attention learns on every seed tried: they favour softmax attention if anything. Where it does not learn on some
seed, that seed's scatter hides every other difference.
"""

from __future__ import annotations

from dualview.lab.harness import Findings, Job, lab
from dualview.lab.modifications.report import figures, tables
from dualview.lab.modifications.settings import ModificationsSettings

__all__ = ["Settings", "figures", "modifications", "tables"]

Settings = ModificationsSettings


@lab(ModificationsSettings, tables, figures, single_thread=True)
def modifications(job: Job[ModificationsSettings]) -> Findings:
    """Train regularised, augmented, negative and sign attention against softmax attention, over seeds.

    Regression in context with one layer; test loss after each epoch, and a paired test over seeds, corrected for the
    number of models, of which differences survive.
    """
    from dualview.lab.modifications.training import run

    return run(job)
