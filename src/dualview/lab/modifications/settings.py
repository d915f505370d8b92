"""The modifications lab's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from dualview.lab.settings import Positive, SeveralSeeds
from dualview.options import AtLeastOne, option

FAMILIES = ("regularised", "negative", "augmented g1", "augmented g2", "augmented g1, g2", "sign")
PROBLEMS = ("regression", "classification")


@dataclass(frozen=True, kw_only=True)
class ModificationsSettings(SeveralSeeds):
    """Options of `dualview lab modifications`."""

    only: tuple[str, ...] = option((), "families to train besides softmax attention, by their first words; all if none")
    problems: tuple[str, ...] = option(PROBLEMS, "what is learnt in context")
    layers: tuple[AtLeastOne, ...] = option((1, 2, 3), "numbers of layers")
    alphas: tuple[float, ...] = option((-4, -1, -0.5, -0.2, 0.2, 0.5, 1, 4), "α of the regularised models")
    ks: tuple[AtLeastOne, ...] = option((1, 3), "k of the negative models")
    betas: tuple[float, ...] = option((-1, -0.3, 0.3, 1), "β of the negative models")
    ranks: tuple[AtLeastOne, ...] = option((4, 16), "units in each adapter of the augmented models")
    heads: AtLeastOne = option(2, "heads of each layer; a single softmax head cannot take gradient descent's step")
    dims: AtLeastOne = option(5, "inputs of a problem")
    demos: AtLeastOne = option(10, "demonstrations in the context")
    input_range: Positive = option(2.0, "inputs are uniform in ± half of this")
    steps: AtLeastOne = option(1200, "training steps of one layer, each on new problems; L layers take 1/L of them")
    batch_size: AtLeastOne = option(32, "problems a step")
    lr: Positive = option(2e-2, "of Adam, the same for every model; it falls to 0 along a cosine")
    test_tasks: Annotated[int, Ge(2)] = option(2048, "problems on which a trained model is measured")
    search_seeds: AtLeastOne = option(3, "trainings of each setting from which the best of a family is chosen")
    seeds: Annotated[int, Ge(2)] = option(12, "fresh trainings that confirm it, from --seed on")

    ACROSS = ("seed", "seeds", "only", "problems", "layers")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.only if not any(each.startswith(name) for each in FAMILIES)]:
            raise ValueError(f"option --only: there is no family {unknown[0]!r}; there are {'; '.join(FAMILIES)}")
        if unknown := sorted(set(self.problems) - set(PROBLEMS)):
            raise ValueError(f"option --problems: there are no {unknown[0]!r}; there are {', '.join(PROBLEMS)}")
        empty = {"regularised": not any(self.alphas), "negative": not (self.ks and any(self.betas))}
        if all(empty.get(family, "augmented" in family and not self.ranks) for family in self.families):
            raise ValueError(
                "there is nothing to compare with softmax attention; give --alphas or --betas that are not all 0"
            )
        if "negative" in self.families and (large := [k for k in self.ks if k > self.demos]):
            raise ValueError(
                f"option --ks: {large[0]} tokens before the query are asked for; there are {self.demos} (--demos)"
            )
        if not (self.problems and self.layers):
            raise ValueError("there is nothing to train; give --problems and --layers")

    @property
    def families(self) -> list[str]:
        return [each for each in FAMILIES if not self.only or any(each.startswith(name) for name in self.only)]
