"""The table of docs/findings.md that holds Dai et al.'s settings (`--protocol dai`) next to their own numbers."""

from __future__ import annotations

from collections.abc import Sequence

from aggregate import TASKS
from front import SIZES, source, table
from layout import grid
from papers import LARGE, SMALL

from dualview.lab.harness import number
from dualview.report.published import published_values

COLUMNS = {
    "zero-shot": ("accuracy.zsl", "accuracy_zsl"),
    "FT": ("accuracy.ft", "accuracy_ft"),
    "ICL": ("accuracy.icl", "accuracy_icl"),
    "Rec2FTP": ("rec2ftp.value", "rec2ftp_value"),
    "its chance": ("rec2ftp.chance", "rec2ftp_chance"),
    "SimAOU": ("sim_aou.normalised", "sim_aou_normalised"),
    "noise alone": (None, "sim_aou_noise_floor"),
    "SimAM before": ("sim_am.before", "sim_am_before"),
    "SimAM after": ("sim_am.after", "sim_am_after"),
}
"""Title: the result file's key, under which the papers' numbers are, and the column of the cells."""


def settings() -> str:
    """Each draw that was run under `--protocol dai`, below the published numbers of its task."""
    cells = table("cells")
    cells = cells[(cells["protocol"] == "dai") & (cells["seed_asked"] != "auto")]
    rows: list[Sequence[str]] = []
    for task in (task for task in TASKS if (cells["task"] == task).any()):
        for of in (SMALL, LARGE):
            known = [None if key is None else published_values(task, key).get(of) for key, _ in COLUMNS.values()]
            rows.append([TASKS[task], f"*{of}*", "", *(number(value, none="") for value in known)])
        own = cells[cells["task"] == task].assign(seed=lambda c: c["seed"].astype(int))
        for cell in own.sort_values(["model", "seed"]).to_dict("records"):
            values = (number(cell[column], none="") for _, column in COLUMNS.values())
            rows.append([TASKS[task], SIZES[cell["model"]], str(cell["seed"]), *values])
    shown = grid(["task", "model", "seed", *COLUMNS], rows)
    return f"{shown}\n\nOne list of demonstrations a row; SimAOU is the normalised one.\n\n{source('cells')}"


PARTS = {"dai": settings}
