"""Which cells of a grid are left to compute, found from the index without loading a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dualview.io import assets
from dualview.io.errors import UserError
from dualview.options import RunOptions
from dualview.store.cell_key import Fingerprints, asked_id
from dualview.store.store import Store
from dualview.tasks.sampling import sample_demos
from dualview.tasks.task import load_task


@dataclass(frozen=True)
class PlannedCell:
    """One run of a study."""

    options: RunOptions
    asked: str
    """The id of its options."""
    plan: str | None
    """Its plan key; None where only loading its model can tell."""
    key: str | None
    """The finished cell's key; None if it is to be computed."""

    @property
    def done(self) -> bool:
        return self.key is not None


@dataclass(frozen=True)
class Shard:
    """The i-th of n parts, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`2/5` is the second of five parts.

        >>> Shard.parse("2/5")
        Shard(number=2, of=5)
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard takes i/n with i from 1 to n, such as 2/5, not {text!r}.")
        return cls(int(match[1]), int(match[2]))

    def of_cells(self, cells: Sequence[RunOptions]) -> Sequence[RunOptions]:
        """A contiguous part, since neighbours share a model and its passes; parts differ by one cell at most."""
        start, stop = (len(cells) * n // self.of for n in (self.number - 1, self.number))
        return cells[start:stop]


def make_plan(cells: Sequence[RunOptions], store: Store, fingerprints: Fingerprints) -> list[PlannedCell]:
    """Which cells are done, and which are to be computed."""
    known, with_records = store.index.plans(), store.index.with_records()
    planned: list[PlannedCell] = []
    for options in cells:
        asked = asked_id(options)
        plan = fingerprints.plan_key(options, asked)
        key = None if plan is None else known.get(plan)
        if options.save_records and key not in with_records:
            key = None
        planned.append(PlannedCell(options, asked, plan, key))
    return planned


def must_have_demonstrations(cells: Sequence[PlannedCell]) -> None:
    """Refuse more shots than a task has rows before anything is computed.

    Planning downloads nothing: rows on the hub, and embedded rows that are not fetched yet, are counted when their
    cells are computed. So are files that cannot be read, which fail their own cells.
    """
    most: dict[tuple[str, Path | None], RunOptions] = {}
    for options in (cell.options for cell in cells if not cell.done and cell.options.demos is None):
        named = (options.task, options.data)
        if named not in most or options.shots > most[named].shots:
            most[named] = options
    for options in most.values():
        task = load_task(options.task, options.data)
        source = str(task.source("train"))
        if source.startswith("hf:") or (source.startswith("embedded:") and not assets.DATA.folder.is_dir()):
            continue
        try:
            task.rows("train")
        except UserError:
            continue
        sample_demos(task, 1, options.shots)


def make_current(cells: Sequence[PlannedCell], store: Store) -> None:
    """Make finished cells the current ones of their options, where another cell was (another model of that name)."""
    current = store.index.current()
    changed = {cell.asked: cell.key for cell in cells if cell.key is not None and current.get(cell.asked) != cell.key}
    if changed:
        store.index.set_current(changed)
