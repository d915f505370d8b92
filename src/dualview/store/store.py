"""The store: a folder of finished cells, with what repairs and queries it."""

from __future__ import annotations

from typing import Any

from dualview.store.folder import Problem, StoreFolder
from dualview.store.query import frame
from dualview.store.repair import repair


class Store(StoreFolder):
    """A store opened for reading or, with `create`, for writing too (and made if it is not there)."""

    def repair(self) -> list[Problem]:
        """Set aside what is damaged or foreign; everything found wrong since the store was opened."""
        repair(self)
        return self.problems

    def to_frame(self, *, current: bool = True) -> Any:
        """One row a cell, as a pandas frame; `current` as in `keys`."""
        return frame(self, current=current)
