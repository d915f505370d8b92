"""The regression lab's options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Ge

from dualview.lab.settings import AtLeastOne, Positive, SeveralSeeds
from dualview.options import option


@dataclass(frozen=True, kw_only=True)
class RegressionSettings(SeveralSeeds):
    """Options of `dualview lab regression`."""

    task: Literal["linear", "sine"] = option("linear", "linear regression, or sine waves with an MLP before attention")
    layers: AtLeastOne = option(1, "times attention is applied: steps of gradient descent")
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
    batch_size: AtLeastOne | None = option(None, "new problems a step; by default 2048, or 512 (sine)")
    lr: Positive | None = option(
        None,
        "of Adam, decayed along a cosine; by default 1e-3, above 3 layers 5e-4, softmax 3 times that; 1e-3 (sine)",
    )
    clip: Positive | None = option(
        None, "of the gradient's norm; by default 0.001 up to 2 layers, 10 above and for softmax, 100 (sine)"
    )
    eval_tasks: Annotated[int, Ge(2)] = option(200_000, "problems for the final measurement, the same for every seed")
    shifts: bool = option(True, "also measure other input and weight scales, and corrupted labels (linear)")

    def __post_init__(self) -> None:
        linear = {field.name: field.default for field in fields(self) if field.name in ("dims", "input_range")}
        if self.task == "sine" and any(getattr(self, name) != default for name, default in linear.items()):
            raise ValueError("--dims and --input-range belong to the linear task; omit them with --task sine")
