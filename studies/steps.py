"""What depends on how far fine-tuning goes, and on how many demonstrations there are."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from aggregate import EMBEDDED, RULES, Mean, Means, at_norm, by_task, comparison, over, over_tasks, rates, table
from layout import COMPARISON, OVER_TASKS, RATES, SEEDS, grid, source

SIZES = (0.2, 0.5, 0.7, 1.0)
LARGE = (1.0, 1.2, 1.5)
"""Sizes that not all of the given rates reach, but the rates of the controls do."""


def curves_of_controls(cells: pd.DataFrame) -> pd.DataFrame:
    """Both rules at every rate of the grid, a row a rate: the curves that every cell with full controls has."""
    return table("curves").merge(cells[["key", "task", "seed"]], on="key")


def curves_of_rates() -> pd.DataFrame:
    """Both rules' cells at given rates, a row a rate."""
    columns = {"ft_rule": "rule", "ft_status": "status", "update_norm_ft": "update_norm", "accuracy_ft": "accuracy"}
    return pd.concat([rates(rule) for rule in RULES]).rename(columns=columns)


def at_size(curves: pd.DataFrame, norm: float, column: str) -> pd.DataFrame:
    """One column of both rules at one size of update, a row for each task and seed where both reach it."""
    read = {name: at_norm(curve, norm, column) for name, curve in curves.groupby(["task", "seed", "rule"])}
    rows = pd.Series(read, dtype=float).rename_axis(["task", "seed", "rule"]).unstack("rule")
    return rows.reindex(columns=list(RULES)).dropna().reset_index()


def closer_at(norm: float, column: str, cells: pd.DataFrame) -> Means:
    """How much closer layer-causal descent is at one size of update, where the cells' curves reach it."""
    found = at_size(curves_of_controls(cells), norm, column)
    return by_task(found, found["layer-causal"] - found["sgd"])


def trained_less(others: pd.DataFrame, column: str, cells: pd.DataFrame) -> Means:
    """Plain descent on the trained model, read off at the size of other cells' updates, less those cells.

    Of tasks and seeds that are among `cells`, where the trained model's curve reaches that size.
    """
    curves = dict(iter(curves_of_rates().query("rule == 'sgd'").groupby(["task", "seed"])))
    wanted = others.merge(cells[["task", "seed"]], on=["task", "seed"])
    read = [at_norm(curves[row.task, row.seed], row.update_norm_ft, column) for row in wanted.itertuples()]
    return by_task(wanted, pd.Series(read, index=wanted.index) - wanted[column])


def _at_sizes(curves: pd.DataFrame, sizes: Sequence[float]) -> str:
    """Similarity and accuracy of both rules, a row for each size of update."""
    rows = []
    for norm in sizes:
        shown: list[Mean] = []
        for column in ("sim_aou_raw", "sim_am_delta", "accuracy"):
            found = at_size(curves, norm, column)
            shown += [over_tasks(found, found[rule]) for rule in RULES]
            shown.append(over_tasks(found, found["layer-causal"] - found["sgd"]))
        rows.append([f"{norm:g}", str(found["task"].nunique()), str(len(found)), *(mean.show() for mean in shown)])
    titles = ("raw SimAOU", "SimAM of changes", "accuracy")
    names = [f"{what}, {of}" for what in titles for of in ("GD", "LCGD", "LCGD less GD")]
    return grid(["‖Δh‖", "tasks", "cells", *names], rows)


def at_large_size() -> str:
    size = over_tasks(comparison(), comparison()["update_norm_icl"]).show(2)
    note = (
        "Both rules at every rate of the grid, read off at one size of update (interpolated in its logarithm), where "
        "both curves reach it: not the same cells in every row. The first 64 queries of each cell; ± over tasks. The "
        f"size of ICL's own update is {size}."
    )
    shown = _at_sizes(curves_of_controls(comparison()), LARGE)
    return f"{shown}\n\n{note}\n\n{source('curves.parquet cells.parquet', *COMPARISON)}"


def by_rate() -> str:
    rows = []
    for rule, title in RULES.items():
        for lr, cells in rates(rule).groupby("lr"):
            trained, one = cells[cells["ft_status"] != "diverged"], cells["ft_status"] == "collapsed"
            gain = trained["accuracy_ft"] - trained["accuracy_zsl"]
            columns = (trained[name] for name in ("update_norm_ft", "sim_aou_raw", "sim_am_delta"))
            values = (over_tasks(trained, each).show() for each in (*columns, gain))
            counts = (len(cells), len(cells) - len(trained), one.sum())
            rows.append([title, f"{lr:g}", *map(str, counts), *values])
    names = ["cells", "diverged", "one answer to all"]
    names += ["‖Δh‖", "raw SimAOU", "SimAM of changes", "accuracy less zero-shot's"]
    return f"{grid(['fine-tuning by', 'rate', *names], rows)}\n\n{OVER_TASKS}\n\n{source('cells.parquet', *RATES)}"


def at_equal_size() -> str:
    note = (
        "Read off between the rates of the table above (interpolated in the logarithm of the size), where both rules "
        f"reach that size: not the same cells in every row. {OVER_TASKS}"
    )
    return f"{_at_sizes(curves_of_rates(), SIZES)}\n\n{note}\n\n{source('cells.parquet', *RATES)}"


def shots() -> str:
    cells = table("cells")
    cells = cells[(cells["controls"] == "quick") & (cells["weights"] == "trained") & cells["task"].isin(EMBEDDED)]
    rows = []
    for (task, asked), part in cells.groupby(["task", "shots"]):
        columns = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "sim_aou_raw", "sim_aou_raw_floor")
        lift = part["rec2ftp_value"] - part["rec2ftp_chance"]
        values = [part[column] for column in (*columns, "update_norm_icl", "update_norm_ft")]
        shown = [over(each).show() for each in (*values, lift)]
        rows.append([str(task), str(asked), str(len(part)), *shown, str((part["verdict"] == "supported").sum())])
    names = ["zero-shot", "in-context", "fine-tuned", "raw SimAOU", "its highest floor", "‖Δh‖ of ICL", "‖Δh‖ of FT"]
    names += ["Rec2FTP lift", "called supported"]
    shown = grid(["task", "shots", "seeds", *names], rows)
    return f"{shown}\n\n{SEEDS}\n\n{source('cells.parquet', 'embedded/shots')}"
