"""`dualview lab modifications`: do the attentions that the dual view suggests learn better? (Ren & Liu, 2310.13220)

Their talk's figure: test loss over 100 epochs of regularised, augmented and negative models against normal softmax
attention on regression in context, here with sign attention beside them and over seeds.

An epoch is one pass over a fixed set of `train_tasks` problems in batches of `batch_size`; the test loss is measured
after each, on `test_tasks` others. A seed decides the initial weights, the training set, the order of its batches and
the test set, all of them the same for every model: differences are taken seed by seed, and what survives the seeds
survives other data as well.

What it shows: differences on this task at this size. Learning rate and sizes are the same for all, and such that
softmax attention learns on every seed tried: if anyone is favoured, it is softmax attention. Where it does not learn on
some seed, that seed's scatter hides every other difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualview.io.progress import Progress, Silent
from dualview.lab.harness import LabResult, Table, begin, finish, one_thread, provenance
from dualview.lab.modifications.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def modifications(
    *,
    out: Path | str | None = None,
    json: Path | str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> LabResult:
    """Train regularised, augmented, negative and sign attention against softmax attention, over seeds.

    Regression in context with one layer; test loss after each epoch, and a paired test over seeds, corrected for the
    number of models, that says which differences survive.
    """
    chosen, clock = begin(Settings, settings, out, json, "modifications")
    from dualview.lab.modifications.training import run
    from dualview.models.loading import pick_device

    device = pick_device(chosen.device)
    with one_thread():
        found = run(chosen, device, out, progress or Silent())
        clock.lap("training")
        origin = provenance("modifications", chosen, clock, device)
    result = LabResult(
        lab="modifications",
        settings=chosen.to_json(),
        seeds=chosen.all_seeds,
        results=found.results,
        provenance=origin,
    )
    return finish(result, out=out, json=json, tables=tables, figures=figures, units=found.units)


def tables(result: LabResult) -> list[Table]:
    """The last epoch's test losses, and which differences survive the seeds."""
    from dualview.lab.modifications import report as modifications_report

    return modifications_report.tables(result)


def figures(result: LabResult) -> dict[str, Figure]:
    """Test loss over epochs, a figure for each family."""
    from dualview.lab.modifications import report as modifications_report

    return modifications_report.figures(result)
