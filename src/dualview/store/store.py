"""The store: a folder of finished cells, its repair and its queries."""

from __future__ import annotations

from typing import Any

from dualview.store.folder import StoreFolder, StoreProblem
from dualview.store.query import table
from dualview.store.repair import repair


class Store(StoreFolder):
    """A store opened for reading or, with `create`, for writing too (and made if it is not there)."""

    def repair(self) -> list[StoreProblem]:
        """Set aside what is damaged or foreign; returns everything found wrong since the store was opened."""
        repair(self)
        return self.problems

    def to_frame(self, *, current: bool = True) -> Any:
        """One row per cell, as a pandas frame; `current` as in `keys`."""
        return table(self, "cells", current=current).to_pandas()
