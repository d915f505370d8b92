"""Cells that were run again, compared with those of the study.

    python studies/again.py STORE …

prints, for every number and every metric's controls, how far the stores' cells are from `studies/results`, and ends
with 1 if that is too far. The study was run on a GPU: docs/appendix.md has the table of a CPU's.
"""

from __future__ import annotations

import sys

import pandas as pd
from aggregate import RESULTS, of_the_study, result_file, table
from layout import grid, source

from dualview.io.errors import UserError

ASKED = ["task", "seed", "shots", "ft_rule", "lr_asked", "weights", "controls", "prompts_hash"]
"""What two cells have in common that should have the same numbers."""
CHECKED = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "rec2ftp_value", "sim_aou_raw", "sim_aou_normalised")
CHECKED += ("sim_am_before", "sim_am_after", "sim_am_delta", "kendall_value", "update_norm_icl", "update_norm_ft")


def tolerance(number: str) -> float:
    """How far a number may be from the study's where both chose the same learning rate."""
    return 0.01 if number.startswith("accuracy") else 1e-3


def both_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells that the study has too: columns with `_again` and `_study`."""
    return (
        cells[of_the_study(cells)].astype({"seed": int}).merge(table("cells"), on=ASKED, suffixes=("_again", "_study"))
    )


def both_controls(both: pd.DataFrame, controls: pd.DataFrame) -> pd.DataFrame:
    """Every control of those cells: what was asked, `metric`, `kind`, `name`, `value_again`, `value_study`."""
    on = [*ASKED, "metric", "kind", "name"]
    again, study = (
        rows.merge(both[[*ASKED, key]], left_on="key", right_on=key)[[*on, "value"]]
        for rows, key in ((controls, "key_again"), (table("controls"), "key_study"))
    )
    return again.merge(study, on=on, how="outer", suffixes=("_again", "_study"))


def apart(both: pd.DataFrame, controls: pd.DataFrame) -> pd.DataFrame:
    """A row for each number, and for each metric's controls: the largest difference, and those that only one has."""
    pairs = {name: (both[f"{name}_again"], both[f"{name}_study"]) for name in CHECKED}
    for metric, own in controls.groupby("metric", sort=False):
        pairs[f"controls of {metric}"] = (own["value_again"], own["value_study"])
    found = {
        name: {"largest": (again - study).abs().max(), "alone": int((again.isna() != study.isna()).sum())}
        for name, (again, study) in pairs.items()
    }
    return pd.DataFrame(found).T


def compared(cells: pd.DataFrame, controls: pd.DataFrame) -> tuple[str, bool]:
    """The table with what it is about, and whether the cells agree with the study's."""
    both = both_cells(cells)
    if both.empty:
        return "None of these cells is one of the study's: another model, prompts or settings.", False
    same = both[both["lr_again"] == both["lr_study"]]  # near a tie rounding may choose another rate: other numbers
    found = apart(same, both_controls(same, controls))
    far = [name for name, row in found.iterrows() if row["alone"] or row["largest"] > tolerance(str(name))]
    rows = [
        [str(name), "–" if pd.isna(row["largest"]) else f"{row['largest']:.1e}", f"{tolerance(str(name)):g}"]
        for name, row in found.iterrows()
    ]
    named = ", ".join(f"{row.task} seed {row.seed} {row.shots} shots {row.ft_rule}" for row in both.itertuples())
    verdicts = int((both["verdict_again"].fillna("") == both["verdict_study"].fillna("")).sum())
    summary = f"{len(both)} of {len(cells)} cells are the study's ({named}): the same verdict in {verdicts}, the same "
    summary += f"learning rate in {len(same)}, which are compared. "
    if same.empty:
        return f"{summary}None is.", False
    summary += f"Too far apart: {', '.join(map(str, far))}." if far else "They agree."
    return f"{grid(['number', 'largest difference', 'tolerance'], rows)}\n\n{summary}", not far


def check() -> str:
    """The part of the study that was run on a CPU."""
    found, _ = compared(*(result_file(RESULTS / f"{name}.parquet") for name in ("check", "check_controls")))
    return f"{found}\n\n{source('check.parquet check_controls.parquet cells.parquet controls.parquet', 'six/check')}"


if __name__ == "__main__":
    from collect import collected, paths_given

    try:
        stores = [collected(path) for path in paths_given(sys.argv[1:])]
        shown, agree = compared(*(pd.concat([tables[name] for tables in stores]) for name in ("cells", "controls")))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(shown)
    sys.exit(0 if agree else 1)
