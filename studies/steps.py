"""What depends on how far fine-tuning goes, and on how many demonstrations there are."""

from __future__ import annotations

import pandas as pd
from aggregate import EMBEDDED, RULES, Mean, at_norm, comparison, over, over_tasks, rates, table
from layout import COMPARISON, NOT_YET, OVER_TASKS, SEEDS, grid, source

NORMS = (0.5, 0.7, 1.0, 1.5)


def _at_size(norm: float, column: str) -> pd.DataFrame:
    """One column of both rules' curves at one size of update, a row for each cell whose curves both reach it."""
    curves, cells = table("curves").groupby(["key", "rule"]), comparison()
    values = {rule: [at_norm(curves.get_group((key, rule)), norm, column) for key in cells["key"]] for rule in RULES}
    return cells[["task", "seed"]].assign(**values).dropna()


def closer_at(norm: float) -> Mean:
    """How much closer layer-causal descent is at one size of update."""
    found = _at_size(norm, "sim_aou_raw")
    return over_tasks(found, found["layer-causal"] - found["sgd"])


def matched() -> str:
    rows = []
    for norm in NORMS:
        sim, right = _at_size(norm, "sim_aou_raw"), _at_size(norm, "accuracy")
        values = [over_tasks(sim, sim[rule]).show() for rule in RULES]
        values += [closer_at(norm).show(), *(over_tasks(right, right[rule]).show() for rule in RULES)]
        rows.append([f"{norm:g}", str(sim["task"].nunique()), str(len(sim)), *values])
    names = ["raw SimAOU, GD", "raw SimAOU, LCGD", "difference", "accuracy, GD", "accuracy, LCGD"]
    shown = grid(["‖Δh‖", "tasks", "cells", *names], rows)
    size = over_tasks(comparison(), comparison()["update_norm_icl"]).show(2)
    note = (
        "Both rules at every rate of the grid, read off at one size of update (interpolated in its logarithm), where "
        "both curves reach it: not the same cells in every row. The first 64 queries of each cell; ± over tasks. The "
        f"size of ICL's own update is {size}."
    )
    return f"{shown}\n\n{note}\n\n{source('curves.parquet cells.parquet', *COMPARISON)}"


SIZES = (0.1, 0.2, 0.5, 1.0, 1.5)


def points() -> pd.DataFrame:
    """Both rules' cells at given rates as curves: one row a rate, its similarity and accuracy against its size."""
    cells = pd.concat([rates(rule) for rule in RULES])
    columns = {"ft_rule": "rule", "ft_status": "status", "update_norm_ft": "update_norm", "accuracy_ft": "accuracy"}
    return cells.rename(columns=columns)


def at_size(norm: float, column: str) -> pd.DataFrame:
    """One column of both rules at one size of update, a row for each task and seed where both reach it."""
    curves = points().groupby(["task", "seed", "rule"])
    read = {name: at_norm(curve, norm, column) for name, curve in curves}
    rows = pd.Series(read, dtype=float).rename_axis(["task", "seed", "rule"]).unstack("rule")
    return rows.reindex(columns=list(RULES)).dropna().reset_index()


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
    if not rows:
        return NOT_YET
    names = ["cells", "diverged", "one answer to all"]
    names += ["‖Δh‖", "raw SimAOU", "SimAM of changes", "accuracy less zero-shot's"]
    return f"{grid(['fine-tuning by', 'rate', *names], rows)}\n\n{OVER_TASKS}\n\n{_made_by_rates()}"


def at_equal_size() -> str:
    if points().empty:
        return NOT_YET
    rows = []
    for norm in SIZES:
        sim, right = at_size(norm, "sim_aou_raw"), at_size(norm, "accuracy")
        difference = over_tasks(sim, sim["layer-causal"] - sim["sgd"])
        shown = [*(over_tasks(sim, sim[rule]) for rule in RULES), difference]
        shown += [over_tasks(right, right[rule]) for rule in RULES]
        rows.append([f"{norm:g}", str(sim["task"].nunique()), str(len(sim)), *(mean.show() for mean in shown)])
    names = ["raw SimAOU, GD", "raw SimAOU, LCGD", "difference", "accuracy, GD", "accuracy, LCGD"]
    note = (
        "Read off between the rates of the table above (interpolated in the logarithm of the size), where both rules "
        f"reach that size: not the same cells in every row. {OVER_TASKS}"
    )
    return f"{grid(['‖Δh‖', 'tasks', 'seeds of tasks', *names], rows)}\n\n{note}\n\n{_made_by_rates()}"


def _made_by_rates() -> str:
    specs = (f"{tasks}/{rates}" for rates in ("rates", "rates_layer_causal") for tasks in ("six", "embedded"))
    return source("cells.parquet", *specs)


def shots() -> str:
    cells = table("cells")
    cells = cells[(cells["controls"] == "quick") & (cells["weights"] == "trained") & cells["task"].isin(EMBEDDED)]
    rows = []
    for (task, asked), part in cells.groupby(["task", "shots"]):
        columns = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "sim_aou_raw", "sim_aou_raw_floor", "update_norm_icl")
        lift = part["rec2ftp_value"] - part["rec2ftp_chance"]
        rows.append(
            [str(task), str(asked), str(len(part)), *(over(part[c]).show() for c in columns), over(lift).show()]
        )
    names = ["zero-shot", "in-context", "fine-tuned", "raw SimAOU", "its highest floor", "‖Δh‖ of ICL", "Rec2FTP lift"]
    shown = grid(["task", "shots", "seeds", *names], rows)
    return f"{shown}\n\n{SEEDS}\n\n{source('cells.parquet', 'embedded/shots')}"
