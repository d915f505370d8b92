"""What `verify` runs: an identity is a sentence, its paper, and a function that measures by how much it fails."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.errors import UserError


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
    tolerance: float | None = None
    """Where this model cannot do as well as its precision promises, what is asked of it instead …"""
    note: str | None = None
    """… and why."""


@dataclass(frozen=True)
class ModelIdentity:
    """A statement that is checked on a language model's own weights and activations."""

    statement: str
    paper: str
    error: Callable[[Draws, object], float | Measured]
    tolerance: float
    """In single precision."""
    wide: float | None = None
    """In float64; the same if None."""

    def tolerance_for(self, model: object) -> float:
        """What is asked of this model, by its precision."""
        in_double = getattr(model, "dtype", None) == torch.float64
        return self.wide if in_double and self.wide is not None else self.tolerance
