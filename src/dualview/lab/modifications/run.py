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

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from dualview.io.progress import Progress, Silent
from dualview.lab.harness import LabResult, Table, begin, finish, one_thread, provenance
from dualview.lab.settings import AtLeastOne, Positive, SeveralSeeds
from dualview.options import option

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAMILIES = ("regularised", "augmented", "negative", "sign")


@dataclass(frozen=True, kw_only=True)
class Settings(SeveralSeeds):
    """Which modifications are trained, and how."""

    only: tuple[str, ...] = option(FAMILIES, "families to train beside softmax attention")
    alphas: tuple[float, ...] = option((0.1, 0.3, 0.5), "α of the regularised models (0: softmax attention itself)")
    ks: tuple[AtLeastOne, ...] = option((1, 3), "k of the negative models")
    betas: tuple[float, ...] = option((0.1, 0.5), "β of the negative models (0: softmax attention itself)")
    rank: AtLeastOne = option(8, "units in each adapter of the augmented models")
    heads: AtLeastOne = option(2, "heads of the one layer; a single softmax head cannot take gradient descent's step")
    dims: AtLeastOne = option(10, "inputs of the linear problems")
    demos: AtLeastOne = option(15, "demonstrations in the context")
    input_range: Positive = option(1.0, "inputs are uniform in ± half of this")
    epochs: AtLeastOne = option(100, "passes over the training set")
    train_tasks: AtLeastOne = option(2048, "problems in the training set")
    batch_size: AtLeastOne = option(128, "problems a step")
    test_tasks: Annotated[int, Ge(2)] = option(2048, "problems on which the test loss is measured")
    lr: Positive = option(5e-3, "of Adam, constant, the same for every model")
    seeds: Annotated[int, Ge(2)] = option(5, "seeds, from --seed on")

    ACROSS = ("seed", "seeds", "only", "alphas", "ks", "betas")

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.only) - set(FAMILIES)):
            raise ValueError(f"option --only: there is no family {unknown[0]!r}; there are {', '.join(FAMILIES)}")
        empty = {"regularised": not any(self.alphas), "negative": not (self.ks and any(self.betas))}
        if all(empty.get(family, False) for family in self.only):
            raise ValueError(
                "there is nothing to compare with softmax attention; "
                f"give families ({', '.join(FAMILIES)}) with --only, and --alphas or --betas that are not all 0"
            )


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
