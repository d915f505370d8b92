"""Which rows are demonstrations, queries, and selection rows (for the learning rate and the seed)."""

from __future__ import annotations

from pathlib import Path

from dualview.io.errors import UserError
from dualview.tasks.rows import Row
from dualview.tasks.task import SplitName, Task, shuffled

FIRST_SEED = 1
QUERY_SEED = 1
"""The order of the queries does not depend on the seed, so every seed is scored on the same queries."""


def sample_demos(task: Task, seed: int, shots: int) -> list[Row]:
    """`shots` rows of the task's train split, drawn without replacement.

    They depend only on the task's name and rows, the seed and the number of shots. The draw is the start of a shuffle
    keyed by all three, so 16 shots are not the first half of 32. Seed 1 of a task with `first_n` takes its first rows.
    """
    if shots < 1:
        raise UserError(f"--shots is {shots}; in-context learning and fine-tuning need at least one demonstration.")
    pool = task.rows("train")
    if shots > len(pool):
        held = "" if task.source("selection") else " after a part was held out for selection"
        raise UserError(
            f"--shots is {shots} but task {task.name} has {len(pool)} demonstration rows in {task.source('train')}"
            f"{held}; ask for fewer, add rows, or name the demonstrations with --demos."
        )
    if task.first_n and seed == FIRST_SEED:
        return pool[:shots]
    order = shuffled(len(pool), f"demos of {task.name}, seed {seed}, shots {shots}")
    return [pool[index] for index in order[:shots]]


def sample_queries(task: Task, n: int | None = None, seed: int = QUERY_SEED) -> list[Row]:
    """The first `n` of the shuffled validation rows (None, or more than there are: all of them)."""
    if n is not None and n < 1:
        raise UserError(f"--n-queries is {n}; ask for at least one query.")
    rows = task.rows("validation")
    order = shuffled(len(rows), f"queries of {task.name}, seed {seed}")
    return [rows[index] for index in order[:n]]


def selection_rows(task: Task, n: int = 64) -> list[Row]:
    """The first `n` rows of the selection split, on which `--lr auto` and `--seed auto` choose."""
    return task.rows("selection")[:n]


def read_rows(task: Task, path: str | Path, split: SplitName = "validation") -> list[Row]:
    """Exactly the rows of a file (`--queries`, or with train `--demos`), in its order, validated as the task's."""
    return task.read(Path(path), split)
