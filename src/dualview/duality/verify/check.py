"""What `verify` runs: formulas, each with its paper, the function that measures its error, and its common misprints."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.toy_attention import relative_error


class Draws:
    """Random shapes and float64 tensors for one formula, from a seed and the formula's statement."""

    def __init__(self, seed: int, name: str) -> None:
        # the name is mixed in so that two formulas of one seed see different data; crc32 is the same on every machine
        self.generator = torch.Generator().manual_seed((seed * 2_654_435_761 + zlib.crc32(name.encode())) % 2**63)

    def size(self, low: int = 2, high: int = 9) -> int:
        """A size between `low` and `high`, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def number(self, low: float, high: float) -> float:
        """A number between `low` and `high`."""
        return low + (high - low) * float(torch.rand((), generator=self.generator, dtype=torch.float64))

    def normal(self, *shape: int) -> Float[Tensor, "*shape"]:
        """Standard normal, float64."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def matrix(self, rows: int, columns: int) -> Float[Tensor, "rows columns"]:
        """Normal entries of variance 1/columns, so that products keep their size."""
        return self.normal(rows, columns) / columns**0.5

    def uniform(self, *shape: int) -> Float[Tensor, "*shape"]:
        """U(0, 1), float64."""
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)


@dataclass(frozen=True)
class Deviation:
    """How far a formula is off, where that number alone does not say enough."""

    error: float
    unpatched: float | None = None
    """The same difference of the logits without the patch: what there was to explain."""
    rounding: float = 0.0
    """How large rounding alone can make the error on this model, in its precision (see `rounding`)."""
    note: str | None = None
    """Why rounding is larger than the model's precision promises."""


def worst_of(found: Sequence[Deviation]) -> Deviation:
    """The one with the largest error relative to its own rounding; a NaN is larger than any number."""

    def badness(each: Deviation) -> float:
        # NaN compares false with everything, so without this a broken check could be hidden by a sound one.
        if math.isnan(each.error) or not each.rounding:
            return math.inf if each.error else 0.0
        return each.error / each.rounding

    return max(found, key=badness)


Sides = tuple[Tensor, Tensor]
"""What a formula gives, and what it should give."""

Setup = Callable[..., Any]
"""Makes the data of a formula from `Draws`, and from the model for a formula that is checked on one."""

Measure = Callable[..., float | Sides | Deviation | Iterator[Deviation]]
"""A function of the data that a set-up made (of the draws themselves where there is none).

It returns the two sides, or how far they are apart (relative, unless the statement says otherwise); or it yields how
far they are apart in each of several cases, of which the worst counts.
"""


@dataclass(frozen=True)
class Formula:
    """A statement that can be checked: an identity with the misprints that distort it, or one of those misprints."""

    statement: str
    paper: str
    """For a misprint: where the slip was found (the note, the review, the slides), or else the result it distorts."""
    measure: Measure
    tolerance: float = 1e-12
    """The error that is allowed; on a model, what the statement leaves without any rounding (0, or a quadrature's)."""
    given: Setup | None = None
    misprints: list[Formula] = field(default_factory=list["Formula"])
    """The same statement as it is often misprinted or carried too far: each of them must fail."""

    def deviation(self, draws: Draws, *model: Any) -> Deviation:
        """The distance of the two sides on these draws (and this model)."""
        found = self.measure(draws, *model) if self.given is None else self.measure(self.given(draws, *model))
        if isinstance(found, Deviation | Iterator):
            return found if isinstance(found, Deviation) else worst_of(list(found))
        return Deviation(relative_error(*found) if isinstance(found, tuple) else found)

    def error(self, draws: Draws, *model: Any) -> float:
        """The error alone."""
        return self.deviation(draws, *model).error

    def misprint(
        self, statement: str, paper: str, tolerance: float = 1e-10, given: Setup | Literal["same"] | None = "same"
    ) -> Callable[[Measure], Measure]:
        """Decorate the function that measures a wrong form of this formula, by default on the same set-up."""

        def add(measure: Measure) -> Measure:
            setup = self.given if given == "same" else given
            self.misprints.append(Formula(statement, paper, measure, tolerance, setup))
            return measure

        return add


def identity(
    statement: str, paper: str, tolerance: float = 1e-12, given: Setup | None = None
) -> Callable[[Measure], Formula]:
    """Decorate the function that measures an identity: the name becomes the `Formula`."""
    return lambda measure: Formula(statement, paper, measure, tolerance, given)


def identities_of(module: ModuleType) -> tuple[Formula, ...]:
    """The identities that a module defines, in their order."""
    # Decorating is enough: the order of the table is the order of the file.
    return tuple(value for value in vars(module).values() if isinstance(value, Formula))


NOTE = "note on ICL and FT"
REVIEW = "literature review"
SLIDES = "Ren & Liu, slides"
IRIE = "Irie et al. 2022"
DAI = "Dai et al. 2023"
VON_OSWALD = "von Oswald et al. 2023"
REN_LIU = "Ren & Liu 2024"
DHERIN = "Dherin et al. 2025"
GOLDWASER = "Goldwaser et al. 2026"
