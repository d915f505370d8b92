"""How the findings' tables look: the papers' rows in italics, ours beneath, and where they come from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from aggregate import EMBEDDED, SIX, TASKS, Mean, over
from papers import PAPER, Rows

from dualview.lab.words import number
from dualview.report.published import published_values

Row = Sequence[str]
COMPARISON = ("six/comparison", "embedded/comparison")
UNTRAINED = ("six/untrained", "embedded/untrained")
RATES = tuple(f"{tasks}/{rates}" for rates in ("rates", "rates_layer_causal") for tasks in ("six", "embedded"))
SEEDS = "Ours: mean over seeds ± half of the 95 % interval (Student, over seeds; the queries are the same)."
ALL = "The last column is the mean over tasks, ± over tasks."
OVER_TASKS = "Means over tasks of means over seeds, ± half of the 95 % interval over tasks."


def grid(columns: Row, rows: Sequence[Row]) -> str:
    """A Markdown table, numbers to the right."""
    words = [any(re.search("[a-z]{3}", row[at]) for row in rows) for at in range(len(columns))]
    ruler = ["---" if word or at == 0 else "---:" for at, word in enumerate(words)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, ruler, *rows))


def source(files: str, first: str, *others: str) -> str:
    """Where a table comes from: the result files, and the specs whose sweeps made them."""
    links = ", ".join(f"[{name}](../studies/results/{name})" for name in files.split())
    more = f", and so with {', '.join(f'`{each}.yaml`' for each in others)}" if others else ""
    return f"*From {links}, made by `dualview sweep studies/{first}.yaml --store STORE`{more}.*"


def papers(rows: Rows, tasks: Sequence[str]) -> list[list[str]]:
    """The papers' rows, with nothing under the tasks they do not have."""
    return [
        [f"*{title}*", *(number(published_values(task, key).get(of), none="") for task in tasks)]
        for title, (of, key) in rows.items()
    ]


def against_papers(
    what: str, found: Mapping[str, Mapping[str, Mean]], note: str, files: str = "cells.parquet controls.parquet"
) -> str:
    """The papers' six tasks, their rows and then ours; then our other tasks, and the mean of all."""
    six = grid(
        ["", *SIX.values()],
        papers(PAPER[what], list(SIX))
        + [[title, *(means[task].show() for task in SIX)] for title, means in found.items()],
    )
    rest = grid(
        ["", *EMBEDDED.values(), f"all {len(TASKS)}"],
        [
            [title, *(means[task].show() for task in EMBEDDED), over([mean.value for mean in means.values()]).show()]
            for title, means in found.items()
        ],
    )
    return "\n\n".join([six, rest, f"{note} {ALL}", source(files, *COMPARISON)])
