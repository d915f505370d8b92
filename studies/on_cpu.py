"""A part of the study on a CPU, held against the GPU's numbers."""

from __future__ import annotations

import pandas as pd
from aggregate import RESULTS, RULES, comparison, table
from layout import grid, source

CHECKED = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "rec2ftp_value", "sim_aou_raw", "sim_aou_normalised")
CHECKED += ("sim_am_before", "sim_am_after", "sim_am_delta", "kendall_value", "update_norm_icl", "update_norm_ft")


def both_cells() -> pd.DataFrame:
    """The cells that both have, columns with `_cpu` and `_gpu`."""
    here = pd.read_parquet(RESULTS / "check.parquet").astype({"seed": int})
    there = pd.concat([comparison(rule) for rule in RULES])
    return here.merge(there, on=["task", "seed", "ft_rule"], suffixes=("_cpu", "_gpu"))


def both_controls() -> pd.DataFrame:
    """Every control of those cells: `ft_rule`, `metric`, `kind`, `name`, `value_cpu`, `value_gpu`."""
    keys = both_cells()[["ft_rule", "key_cpu", "key_gpu"]]
    here = pd.read_parquet(RESULTS / "check_controls.parquet").merge(keys, left_on="key", right_on="key_cpu")
    there = table("controls").merge(keys, left_on="key", right_on="key_gpu")
    on = ["ft_rule", "metric", "kind", "name"]
    return here[[*on, "value"]].merge(there[[*on, "value"]], on=on, how="outer", suffixes=("_cpu", "_gpu"))


def check() -> str:
    """The same cells on a CPU and on a GPU: each number's difference, and of each metric's controls the largest."""
    cells, controls = both_cells().set_index("ft_rule"), both_controls()
    apart = {name: (cells[f"{name}_cpu"] - cells[f"{name}_gpu"]).abs() for name in CHECKED}
    controls["apart"] = (controls["value_cpu"] - controls["value_gpu"]).abs()
    for metric, own in controls.groupby("metric", sort=False):
        count = own["name"].nunique()
        apart[f"controls of {metric} ({count})" if count > 1 else f"control of {metric}"] = own.groupby("ft_rule")[
            "apart"
        ].max()
    rows = [[name, *(f"{values[rule]:.1e}" for rule in RULES)] for name, values in apart.items()]
    tasks = ", ".join(
        f"{task}, seed {seed}" for task, seed in sorted(set(zip(cells["task"], cells["seed"], strict=True)))
    )
    note = (
        f"{tasks}; both rules, full controls. Undefined on the one and not on the other: "
        f"{int((controls['value_cpu'].isna() != controls['value_gpu'].isna()).sum())} of {len(controls)} controls."
    )
    command = source("check.parquet check_controls.parquet cells.parquet controls.parquet", "six/check")
    return f"{grid(['largest difference in', *RULES.values()], rows)}\n\n{note}\n\n{command}"
