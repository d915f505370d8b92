"""The rivals lab's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from dualview.lab.settings import Positive, SeveralSeeds
from dualview.options import AtLeastOne, option

VARIANTS = ("shared", "softmax", "separate")


@dataclass(frozen=True, kw_only=True)
class RivalsSettings(SeveralSeeds):
    """Options of `dualview lab rivals`."""

    conditions: tuple[Annotated[float, Ge(1)], ...] = option((1.0, 10.0, 100.0), "condition numbers of Σ, x ~ N(0, Σ)")
    depths: tuple[Annotated[int, Ge(1), Le(16)], ...] = option((1, 2, 3, 4, 6, 8), "layers of linear attention")
    variants: tuple[str, ...] = option(VARIANTS, "other models: shared weights, softmax, separate x and y tokens")
    variant_depths: tuple[Annotated[int, Ge(1), Le(16)], ...] = option((1, 2), "layers of the other models")
    variant_condition: Annotated[float, Ge(1)] = option(10.0, "condition number of their inputs")
    heads: AtLeastOne = option(2, "heads of softmax attention")
    dims: Annotated[int, Ge(2)] = option(5, "inputs")
    demos: Annotated[int, Ge(2)] = option(20, "demonstrations in the context")
    noise: Annotated[float, Ge(0)] = option(0.25, "standard deviation of the noise on the demonstrations' labels")
    steps: AtLeastOne = option(3000, "of training; the other models too")
    batch_size: AtLeastOne = option(64, "new problems a step, for each model")
    lr: Positive = option(0.01, "of Adam, after a warm-up decayed along a cosine")
    clip: Positive = option(0.1, "of each model's gradient")
    tuning_tasks: Annotated[int, Ge(100)] = option(20_000, "problems on which the rules are tuned")
    eval_tasks: Annotated[int, Ge(2)] = option(4000, "problems for the measurement, new ones for each seed")
    seeds: AtLeastOne = option(5, "number of seeds to train, from --seed on")

    ACROSS = ("seed", "seeds", "conditions", "depths", "variants", "variant_depths", "variant_condition")

    @property
    def rule_steps(self) -> list[int]:
        """Steps of the rules: as many as any model has layers."""
        return sorted({*self.depths, *self.variant_depths})

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.variants) - set(VARIANTS)):
            raise ValueError(f"option --variants: there is no {unknown[0]!r}; there are {', '.join(VARIANTS)}")
        if self.demos <= self.dims:
            raise ValueError(
                f"with {self.demos} demonstrations of {self.dims} inputs there is no OLS; give more --demos"
            )
        if not (self.depths and self.conditions):
            raise ValueError("give at least one of --depths and of --conditions")
