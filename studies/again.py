"""Cells that were run again, held against those of the study.

    python studies/again.py STORE …

prints, for every number and every metric's controls, how far the stores' cells are from `studies/results`. The study
was run on a GPU: docs/findings.md has the table of a CPU's.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from aggregate import RESULTS, table
from layout import grid, source

ASKED = ["task", "seed", "shots", "ft_rule", "lr_asked", "weights", "controls", "n_queries"]
"""What two cells have in common that should have the same numbers."""
CHECKED = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "rec2ftp_value", "sim_aou_raw", "sim_aou_normalised")
CHECKED += ("sim_am_before", "sim_am_after", "sim_am_delta", "kendall_value", "update_norm_icl", "update_norm_ft")


def both_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells that the study has too: columns with `_again` and `_study`."""
    return cells.astype({"seed": int}).merge(table("cells"), on=ASKED, suffixes=("_again", "_study"))


def both_controls(both: pd.DataFrame, controls: pd.DataFrame) -> pd.DataFrame:
    """Every control of those cells: what was asked, `metric`, `kind`, `name`, `value_again`, `value_study`."""
    on = [*ASKED, "metric", "kind", "name"]
    again, study = (
        rows.merge(both[[*ASKED, key]], left_on="key", right_on=key)[[*on, "value"]]
        for rows, key in ((controls, "key_again"), (table("controls"), "key_study"))
    )
    return again.merge(study, on=on, how="outer", suffixes=("_again", "_study"))


def apart(both: pd.DataFrame, controls: pd.DataFrame) -> Iterable[list[str]]:
    """The largest difference of each number, and of each metric's controls."""
    for name in CHECKED:
        yield [name, _largest(both[f"{name}_again"], both[f"{name}_study"])]
    for metric, own in controls.groupby("metric", sort=False):
        yield [f"controls of {metric}", _largest(own["value_again"], own["value_study"])]


def _largest(again: pd.Series, study: pd.Series) -> str:
    """The largest difference, and how many are a number in one of the two alone."""
    alone = int((again.isna() != study.isna()).sum())
    largest = (again - study).abs().max()
    shown = "–" if pd.isna(largest) else f"{largest:.1e}"
    return f"{shown}, {alone} undefined in one" if alone else shown


def compared(cells: pd.DataFrame, controls: pd.DataFrame) -> str:
    """The table, and which cells it is about."""
    both = both_cells(cells)
    if both.empty:
        return "None of these cells is one of the study's."
    named = ", ".join(f"{row.task} seed {row.seed} {row.ft_rule}" for row in both.itertuples())
    same = int((both["lr_again"] == both["lr_study"]).sum())
    told = f"{len(both)} of {len(cells)} cells are the study's ({named}); {same} of them chose the same learning rate."
    return f"{grid(['number', 'largest difference'], list(apart(both, both_controls(both, controls))))}\n\n{told}"


def check() -> str:
    """The part of the study that was run on a CPU."""
    found = compared(*(pd.read_parquet(RESULTS / f"{name}.parquet") for name in ("check", "check_controls")))
    return f"{found}\n\n{source('check.parquet check_controls.parquet cells.parquet controls.parquet', 'six/check')}"


if __name__ == "__main__":
    from collect import stores_asked_for

    stores = stores_asked_for()
    print(compared(*(pd.concat([tables[name] for tables in stores]) for name in ("cells", "controls"))))
