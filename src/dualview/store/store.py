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

    def to_frame(self, name: str = "cells", *, current: bool = True) -> Any:
        """A table as a pandas frame, by default one row per cell; `current` as in `keys`."""
        return table(self, name, current=current).to_pandas()
