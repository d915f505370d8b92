"""Numbers of every layer side by side: what a comparison of two models' insides comes back as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, get_origin, get_type_hints

import numpy as np


@dataclass(frozen=True)
class PerLayer:
    """A dataclass whose tuples hold one number a layer; NaN where a layer has none."""

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, float]], **rest: Any) -> Self:
        """One row of numbers a layer, by the names of the fields; a row without a number has none."""
        names = [name for name, kind in get_type_hints(cls).items() if get_origin(kind) is tuple]
        return cls(**{name: tuple(row.get(name, float("nan")) for row in rows) for name in names}, **rest)

    def to_json(self) -> dict[str, Any]:
        return {
            name: [None if np.isnan(x) else x for x in value] if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }
