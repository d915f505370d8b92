"""The modifications lab's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from dualview.lab.settings import AtLeastOne, Positive, SeveralSeeds
from dualview.options import option

FAMILIES = ("regularised", "augmented", "negative", "sign")


@dataclass(frozen=True, kw_only=True)
class ModificationsSettings(SeveralSeeds):
    """Options of `dualview lab modifications`."""

    only: tuple[str, ...] = option(FAMILIES, "families to train besides softmax attention")
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
