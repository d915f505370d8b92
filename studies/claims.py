"""What the study says of each claim: a difference over tasks, and no more than its interval allows."""

from __future__ import annotations

from aggregate import Mean, comparison, control, over_tasks, table
from layout import COMPARISON, OVER_TASKS, Row, grid, source
from steps import closer_at

SMALL = 0.01


def claims() -> str:
    shown = grid(["claim", "here", "numbers"], [*_of_dai(), *_of_deutch(), *_of_shen()])
    note = (
        f"{OVER_TASKS} Where that interval holds 0 nothing can be told; where it lies within ±{SMALL:g}, there is no "
        "difference to speak of."
    )
    return f"{shown}\n\n{note}\n\n{source('cells.parquet controls.parquet curves.parquet', *COMPARISON)}"


def says(difference: Mean, more: str = "yes", less: str = "no", same: str = "no difference") -> str:
    """What the interval of a difference allows to say; `same` if it lies within ± SMALL."""
    if difference.half is not None and abs(difference.value) + difference.half < SMALL:
        return same
    return more if difference.above_zero else less if difference.below_zero else "cannot be told here"


def _less(column: str, other: str) -> Mean:
    """One column of plain descent's cells less another."""
    cells = comparison()
    return over_tasks(cells, cells[column] - cells[other])


def _less_control(column: str, name: str) -> Mean:
    """One similarity of plain descent's cells less one of its controls."""
    cells, metric = comparison(), "sim_aou" if column.startswith("sim_aou") else "sim_am"
    return over_tasks(cells, cells[column] - control(cells, metric, name))


def _passing(name: str | None = None) -> str:
    """In how many cells raw SimAOU exceeds one floor, or every one, at p < .01."""
    cells = comparison()
    floors = table("controls").query("metric == 'sim_aou' and kind == 'floor' and name != 'zsl_shifted'")
    worst = floors[(floors["name"] == name) | (name is None)].groupby("key")["p"].max()
    return f"p < .01 in {int((cells['key'].map(worst) < 0.01).sum())} of {len(cells)} cells"


def _of_dai() -> list[Row]:
    cells = comparison()
    lift = _less("rec2ftp_value", "rec2ftp_chance")
    noise, query = (_less_control("sim_aou_raw", name) for name in ("gaussian", "shuffled_query"))
    labels = _less_control("sim_aou_raw", "icl_random_labels")
    change = _less("sim_am_after", "sim_am_before")
    rank = _less("kendall_released_tau_token", "kendall_released_lr0_tau_token")
    return [
        [
            "ICL gets right what FT puts right (Dai et al., Rec2FTP)",
            says(lift, "above chance on average", "below chance"),
            f"lift over chance {lift.show()}; p < .01 in {(cells['rec2ftp_p'] < 0.01).sum()} of {len(cells)} cells",
        ],
        [
            "their updates of attention's output are alike, more than random ones (Dai et al., SimAOU)",
            says(noise),
            f"raw, less random updates of the same size {noise.show()}; {_passing('gaussian')}",
        ],
        [
            "… and more than updates that belong to another query",
            says(query),
            f"raw, less another query's {query.show()}",
        ],
        [
            "… because the same task is learnt",
            says(labels, "less alike with random labels", "more alike so", same="no: as alike with random labels"),
            f"raw, less demonstrations with random labels {labels.show()}; above every floor at {_passing()}",
        ],
        [
            "FT brings attention closer to ICL's (Dai et al., SimAM)",
            says(change, less="the contrary"),
            f"after less before {change.show()}",
        ],
        [
            "FT attends to the training tokens as ICL does (Dai et al., Kendall)",
            says(rank, "more than the untouched model", "less than the untouched model"),
            f"as released, less the same at learning rate 0: {rank.show()}",
        ],
    ]


def _of_deutch() -> list[Row]:
    both = comparison("layer-causal").merge(comparison(), on=["task", "seed"], suffixes=("_lc", "_gd"))
    rows: list[Row] = []
    for claim, column, title in (
        ("layer-causal descent is closer (Deutch et al.)", "sim_aou_raw", "raw SimAOU"),
        ("… and shares more changes of attention", "sim_am_delta", "SimAM of the changes"),
    ):
        chosen, equal = over_tasks(both, both[f"{column}_lc"] - both[f"{column}_gd"]), closer_at(1.0, column)
        said = f"{says(chosen)} at chosen rates; {says(equal)} at equal size"
        numbers = f"{chosen.show()} at chosen rates, {equal.show()} at ‖Δh‖ = 1"
        rows.append([claim, said, f"{title}, layer-causal less plain: {numbers}"])
    drawn, maps = (_less_control(column, "untrained") for column in ("sim_aou_raw", "sim_am_delta"))
    rows.append(
        [
            "untrained models score as high (Deutch et al.)",
            says(drawn, "no", "no lower: rather higher"),
            f"trained less untrained: raw SimAOU {drawn.show()}, SimAM of the changes {maps.show()}",
        ]
    )
    return rows


def _of_shen() -> list[Row]:
    order = _less("order_sensitivity_icl", "order_sensitivity_ft")
    tokens = _less("overlap_ft_token_overlap", "overlap_icl_reordered_token_overlap")
    return [
        [
            "ICL depends more on the demonstrations' order than FT (Shen et al.)",
            says(order, "yes, at these step sizes"),
            f"standard deviation over orders, ICL less FT {order.show()}",
        ],
        [
            "FT's likeliest tokens are less ICL's than those of ICL in another order (Shen et al.)",
            says(tokens, "no", "yes"),
            f"shared of ten, FT less another order {tokens.show()}",
        ],
    ]
