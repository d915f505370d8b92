"""Which cells of a grid are left to compute, found from the index without loading a model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualview.io import assets
from dualview.io.errors import UserError
from dualview.io.hashing import digest
from dualview.options import RunOptions
from dualview.store.cell_key import CONTENT_OPTIONS, Fingerprints, asked_id
from dualview.store.store import Store
from dualview.sweep.spec import Grid
from dualview.tasks.sampling import sample_demos
from dualview.tasks.task import Task, load_task

_AT_ONCE = 5_000
"""How many cells are looked up together."""


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A run of a study that is to be computed."""

    cells: Sequence[RunOptions]
    number: int
    """Its place among the study's cells, which make its options when they are needed."""
    asked: str
    """The id of its options."""
    plan: str | None
    """Its plan key; None where only loading its model can tell."""

    @property
    def options(self) -> RunOptions:
        return self.cells[self.number]


@dataclass
class SweepPlan:
    """Which cells of a study are finished, and which are to be computed."""

    cells: int
    done: int = 0
    todo: list[PlannedCell] = field(default_factory=list[PlannedCell])
    changed: dict[str, tuple[str, str | None]] = field(default_factory=dict[str, tuple[str, str | None]])
    """Finished cells that are not the current ones of their options: those options' ids, the cells' and plan keys."""


def part_of(cells: Sequence[RunOptions], shard: str) -> Sequence[RunOptions]:
    """The i-th of n parts, counted from 1: contiguous, since neighbours share a model and its passes; parts differ by
    one cell at most.

    >>> part_of(range(10), "2/5")
    range(2, 4)
    """
    match = re.fullmatch(r"(\d+)/(\d+)", shard.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--shard takes i/n with i from 1 to n, such as 2/5, not {shard!r}.")
    start, stop = (len(cells) * number // int(match[2]) for number in (int(match[1]) - 1, int(match[1])))
    return cells[start:stop]


def make_plan(cells: Sequence[RunOptions], store: Store, fingerprints: Fingerprints) -> SweepPlan:
    """Which cells are done, and which are to be computed: some thousand at a time, and only the latter are kept."""
    plan, contents = SweepPlan(len(cells)), dict[tuple[Any, ...], tuple[str | None, bool]]()
    number, asked_ids = 0, iter(_asked(cells))
    while batch := list(itertools.islice(asked_ids, _AT_ONCE)):
        for start, (_, shared) in enumerate(batch, number):
            if shared not in contents:
                options = cells[start]
                contents[shared] = fingerprints.content(options), options.save_records
        asked = [each for each, _ in batch]
        known = [contents[shared] for _, shared in batch]
        plans = [
            None if content is None else digest(each, content) for each, (content, _) in zip(asked, known, strict=True)
        ]
        current = store.index.current_plans(asked)
        rest = [
            place
            for place, (each, records) in enumerate(zip(plans, (records for _, records in known), strict=True))
            if each is None or records or current.get(asked[place]) != each
        ]
        done: set[int] = set()
        found = store.index.look_up([asked[place] for place in rest], [plans[place] for place in rest]) if rest else ()
        for each, key, has_records, is_current in found:
            place = rest[each]
            if has_records or not known[place][1]:
                done.add(place)
                if not is_current:
                    plan.changed[asked[place]] = key, plans[place]
        plan.done += len(batch) - len(rest) + len(done)
        plan.todo += [
            PlannedCell(cells, number + place, asked[place], plans[place]) for place in rest if place not in done
        ]
        number += len(batch)
    return plan


def _asked(cells: Sequence[RunOptions]) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """Each cell's id, and what decides the content that it names and whether its tensors are wanted."""
    shared = (*CONTENT_OPTIONS, "save_records")
    if isinstance(cells, Grid):
        return cells.asked(shared)
    return ((asked_id(options), tuple(getattr(options, name) for name in shared)) for options in cells)


def must_have_demonstrations(cells: Sequence[PlannedCell]) -> None:
    """Refuse more shots than a task has rows before anything is computed.

    Planning downloads nothing: rows on the hub, and embedded rows that are not fetched yet, are counted when their
    cells are computed. So are files that cannot be read, which fail their own cells.
    """
    most: dict[tuple[str, Path | None], RunOptions] = {}
    for options in (cell.options for cell in cells):
        if options.demos is not None:
            continue
        named = (options.task, options.data)
        if named not in most or options.shots > most[named].shots:
            most[named] = options
    for options in most.values():
        task = load_task(options.task, options.data)
        if not rows_are_here(task):
            continue
        try:
            task.rows("train")
        except UserError:
            continue
        sample_demos(task, 1, options.shots)


def rows_are_here(task: Task) -> bool:
    """Whether a task's rows can be read without a download."""
    source = str(task.source("train"))
    return not source.startswith("hf:") and (not source.startswith("embedded:") or assets.DATA.folder.is_dir())
