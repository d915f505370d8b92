"""What `verify` runs: an identity is a sentence, its paper, and a function that measures by how much it fails."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.io.errors import UserError


class NotApplicable(UserError):
    """This model has no place for an identity: the one reason for which a check is skipped rather than failed."""


class Draws:
    """Fresh random shapes and float64 tensors for one identity, from a seed and the identity's name."""

    def __init__(self, seed: int, name: str) -> None:
        # the name is mixed in so that two identities of one seed see different data; crc32 is the same on every machine
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
class Identity:
    """A statement that can be checked on random data alone."""

    statement: str
    paper: str
    error: Callable[[Draws], float]
    """How far the two sides are apart (relative, unless the statement says otherwise)."""
    tolerance: float = 1e-12


@dataclass(frozen=True)
class Measured:
    """What a check found, where its size needs something to be read beside."""

    error: float
    unpatched: float | None = None
    """The same difference of the logits without the patch: what there was to explain."""
    rounding: float = 0.0
    """How large rounding alone can make the error on this model, in its precision (see `rounding`)."""
    note: str | None = None
    """Why rounding is larger than the model's precision promises."""


def worst_of(found: Sequence[Measured]) -> Measured:
    """The one whose error is largest beside its own rounding; a NaN is larger than any number."""

    def badness(each: Measured) -> float:
        if math.isnan(each.error) or not each.rounding:
            return math.inf if each.error else 0.0
        return each.error / each.rounding

    return max(found, key=badness)


@dataclass(frozen=True)
class ModelIdentity:
    """A statement that is checked on a language model's own weights and activations."""

    statement: str
    paper: str
    error: Callable[[Draws, object], float | Measured]
    exact: float = 0.0
    """What the statement leaves without any rounding: 0, or the error of a quadrature.

    What rounding can add is found on the model and comes with the error.
    """
