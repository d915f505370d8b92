"""`dualview lab regression`: does training find gradient descent? (von Oswald et al. 2023, arXiv 2212.07677)

Self-attention is trained to do linear regression in context and held against k steps of gradient descent, and of GD++,
each at its best step sizes on the very problems that are evaluated, and against Proposition 1's constructed weights.

What it shows: that these trained weights compute what gradient descent computes, on these problems. What it does not:
anything about language models, or about inputs far from the training's, where the shift tables show the limits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from dualview.io.progress import Progress, Silent
from dualview.lab.harness import LabResult, Table, begin, finish, one_thread, provenance
from dualview.lab.settings import AtLeastOne, Positive, SeveralSeeds
from dualview.options import option

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Settings(SeveralSeeds):
    """How the regression lab trains, and on what."""

    task: Literal["linear", "sine"] = option("linear", "linear regression, or sine waves with an MLP before attention")
    layers: AtLeastOne = option(1, "how often attention is applied: steps of gradient descent")
    recurrent: bool = option(True, "one set of weights for all layers")
    heads: AtLeastOne = option(1, "heads of each layer")
    softmax: bool = option(False, "softmax attention in place of linear")
    dims: AtLeastOne = option(10, "inputs of the linear task")
    demos: AtLeastOne = option(10, "demonstrations in the context")
    input_range: Positive = option(1.0, "inputs of the linear task are uniform in ± half of this")
    noise: Annotated[float, Ge(0)] = option(0.0, "standard deviation of the noise on the demonstrations' labels")
    steps: AtLeastOne | None = option(
        None, "of training; by default 2500 (1 layer), 5000 (recurrent), 50000, or 20000 (sine)"
    )
    batch_size: AtLeastOne | None = option(None, "fresh problems a step; by default 2048, or 512 (sine)")
    lr: Positive | None = option(
        None,
        "of Adam, decayed along a cosine; by default 1e-3, above 3 layers 5e-4, softmax 3 times that; 1e-3 (sine)",
    )
    clip: Positive | None = option(
        None, "of the gradient's norm; by default 0.001 up to 2 layers, 10 above and for softmax, 100 (sine)"
    )
    eval_tasks: Annotated[int, Ge(2)] = option(
        200_000, "problems on which the end is measured, the same for every seed"
    )
    shifts: bool = option(True, "also measure other input and weight scales, and corrupted labels (linear)")

    def __post_init__(self) -> None:
        linear = {field.name: field.default for field in fields(self) if field.name in ("dims", "input_range")}
        if self.task == "sine" and any(getattr(self, name) != default for name, default in linear.items()):
            raise ValueError("--dims and --input-range are of the linear task; leave them out with --task sine")


def regression(
    *,
    out: Path | str | None = None,
    json: Path | str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> LabResult:
    """Train self-attention on regression in context and compare it with gradient descent.

    The default is one linear layer on inputs uniform in ±.5, in a few minutes on a laptop: its loss should come within
    2 % of the best single step of gradient descent, its model cosine above .99.
    """
    chosen, clock = begin(Settings, settings, out, json, "regression")
    if chosen.task == "sine":
        from dualview.lab.regression.sine import run
    else:
        from dualview.lab.regression.linear import run
    from dualview.models.loading import pick_device

    device = pick_device(chosen.device)
    with one_thread():
        found = run(chosen, device, out, clock, progress or Silent())
        origin = provenance("regression", chosen, clock, device)
    result = LabResult(
        lab="regression",
        settings=chosen.to_json(),
        seeds=chosen.all_seeds,
        results=found.results,
        provenance=origin,
    )
    return finish(result, out=out, json=json, tables=tables, figures=figures, units=found.units)


def tables(result: LabResult) -> list[Table]:
    """The numbers, for people."""
    from dualview.lab.regression import report as regression_report

    return regression_report.tables(result)


def figures(result: LabResult) -> dict[str, Figure]:
    """Training curves against gradient descent's loss, and the shifts."""
    from dualview.lab.regression import report as regression_report

    return regression_report.figures(result)
