"""How the findings' tables look: the papers' rows in italics, ours beneath, and where they come from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from aggregate import EMBEDDED, SIX, TASKS, Means, mean_of
from papers import PAPER, Rows

from dualview.lab.harness import number
from dualview.report.published import published_values

Row = Sequence[str]
COMPARISON = ("six/comparison", "embedded/comparison")
UNTRAINED = ("six/untrained", "embedded/untrained")
RATES = tuple(f"{tasks}/{rates}" for rates in ("rates", "rates_layer_causal") for tasks in ("six", "embedded"))
SEEDS = "Ours: mean over seeds ± half of the 95 % interval (Student, over seeds; the queries are the same)."
MEANS = "Means over tasks: ± over tasks."
OVER_TASKS = "Means over tasks of means over seeds, ± half of the 95 % interval over tasks."


def grid(columns: Row, rows: Sequence[Row]) -> str:
    """A Markdown table, numbers to the right."""
    words = [any(row[at] and not re.match(r"-?\d|–", row[at]) for row in rows) for at in range(len(columns))]
    ruler = ["---" if word or at == 0 else "---:" for at, word in enumerate(words)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, ruler, *rows))


def source(files: str, first: str, *others: str) -> str:
    """Where a table comes from: the result files, and the specs whose sweeps made them."""
    links = ", ".join(f"[{name}](../studies/results/{name})" for name in files.split())
    more = f", and so with {', '.join(f'`{each}.yaml`' for each in others)}" if others else ""
    return f"*From {links}, made by `dualview sweep studies/{first}.yaml --store STORE`{more}.*"


def papers(rows: Rows) -> list[list[str]]:
    """The papers' rows: their six tasks, and the mean where they have all of them."""
    found = []
    for title, (of, key) in rows.items():
        values = [published_values(task, key).get(of) for task in SIX]
        known = [value for value in values if value is not None]
        mean = sum(known) / len(SIX) if len(known) == len(SIX) else None
        found.append([f"*{title}*", *(number(value, none="") for value in (*values, mean))])
    return found


def against_papers(
    what: str, found: Mapping[str, Means], note: str, files: str = "cells.parquet controls.parquet"
) -> str:
    """The papers' six tasks, their rows and then ours; then our other tasks, and the mean of all."""

    def rows(tasks: Iterable[str], averaged: Iterable[str]) -> list[list[str]]:
        return [
            [title, *(means[task].show() for task in tasks), mean_of(means, averaged).show()]
            for title, means in found.items()
        ]

    six = grid(["", *SIX.values(), "mean"], papers(PAPER.get(what, {})) + rows(SIX, SIX))
    rest = grid(["", *EMBEDDED.values(), f"mean of all {len(TASKS)}"], rows(EMBEDDED, TASKS))
    return "\n\n".join([six, rest, f"{note} {MEANS}", source(files, *COMPARISON)])
