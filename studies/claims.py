"""What the study says of each claim: a difference over tasks, and no more than its interval allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pandas as pd
from aggregate import Mean, both_learn, comparison, control, over_tasks, passing, redrawn
from layout import COMPARISON, OVER_TASKS, RATES, UNTRAINED, Row, grid, source
from steps import closer_at, trained_less

SMALL = 0.01
OWN_SIZE = 1.2
"""About the size of in-context learning's own update."""


def says(difference: Mean, more: str = "yes", less: str = "no", same: str = "no difference") -> str:
    """What the interval of a difference allows to say; `same` if it lies within ± SMALL."""
    if difference.half is not None and abs(difference.value) + difference.half < SMALL:
        return same
    return more if difference.above_zero else less if difference.below_zero else "cannot be told here"


@dataclass(frozen=True)
class Claim:
    """A claim, the difference that should show it, and the words for what that difference can turn out to be."""

    text: str
    measured: str
    difference: Callable[[pd.DataFrame], Mean]
    """Over tasks, of some of plain descent's cells."""
    more: str = "yes"
    less: str = "no"
    same: str = "no difference"

    def row(self) -> Row:
        cells = comparison()
        found, where_learnt = self.difference(cells), self.difference(cells[both_learn(cells)])
        return [
            self.text,
            says(found, self.more, self.less, self.same),
            self.measured,
            found.show(),
            where_learnt.show(),
        ]


def claims() -> str:
    cells = comparison()
    learning = cells[both_learn(cells)]
    names = [f"all {len(cells)} cells", f"the {len(learning)} where both learn"]
    shown = grid(["claim", "here", "measured by", *names], [each.row() for each in (*_dai(), *_deutch(), *_shen())])
    note = (
        f"{OVER_TASKS} Where that interval holds 0 nothing can be told; where it lies within ±{SMALL:g}, there is no "
        "difference to speak of. *Here* goes by all cells. Both learn: each is above zero-shot by the 95 % interval "
        f"over queries; cells of {learning['task'].nunique()} tasks. In single cells at p < .01: Rec2FTP above chance "
        f"in {(cells['rec2ftp_p'] < 0.01).sum()} of {len(cells)}, raw SimAOU above random updates in "
        f"{passing(cells, 'gaussian')}, above every floor in {passing(cells)}."
    )
    files = "cells.parquet controls.parquet curves.parquet"
    return f"{shown}\n\n{note}\n\n{source(files, *COMPARISON, *UNTRAINED, *RATES)}"


def less(column: str, other: str, cells: pd.DataFrame) -> Mean:
    """One column of the cells less another."""
    return over_tasks(cells, cells[column] - cells[other])


def less_floor(name: str, cells: pd.DataFrame) -> Mean:
    """Raw SimAOU of the cells less one of its floors."""
    return over_tasks(cells, cells["sim_aou_raw"] - control(cells, "sim_aou", name))


def paired(column: str, first: pd.DataFrame, second: pd.DataFrame) -> Mean:
    """One column of some cells less the same of others with their tasks and seeds."""
    both = first.merge(second, on=["task", "seed"], suffixes=("_first", "_second"))
    return over_tasks(both, both[f"{column}_first"] - both[f"{column}_second"])


def _dai() -> list[Claim]:
    return [
        Claim(
            "ICL gets right what FT puts right (Dai et al., Rec2FTP)",
            "Rec2FTP, less its chance level",
            partial(less, "rec2ftp_value", "rec2ftp_chance"),
            "above chance on average",
            "below chance",
        ),
        Claim(
            "their updates of attention's output are alike, more than random ones (Dai et al., SimAOU)",
            "raw SimAOU, less random updates of the same size",
            partial(less_floor, "gaussian"),
        ),
        Claim(
            "… and more than updates that belong to another query",
            "raw SimAOU, less another query's",
            partial(less_floor, "shuffled_query"),
        ),
        Claim(
            "… because the same task is learnt",
            "raw SimAOU, less that with random labels in the prompt",
            partial(less_floor, "icl_random_labels"),
            "less alike with random labels",
            "more alike with random labels",
            "no: as alike with random labels",
        ),
        Claim(
            "FT brings attention closer to ICL's (Dai et al., SimAM)",
            "SimAM after, less before",
            partial(less, "sim_am_after", "sim_am_before"),
            less="the contrary",
        ),
        Claim(
            "FT attends to the training tokens as ICL does (Dai et al., Kendall)",
            "as released, less the same at learning rate 0",
            partial(less, "kendall_released_tau_token", "kendall_released_lr0_tau_token"),
            "more than the untouched model",
            "less than the untouched model",
        ),
    ]


def _deutch() -> list[Claim]:
    updates, changes = "raw SimAOU", "SimAM of the changes"
    return [
        *_closer("layer-causal descent is closer (Deutch et al.)", "sim_aou_raw", updates),
        *_closer("… and shares more changes of attention", "sim_am_delta", changes),
        *_untrained("untrained models score as high (Deutch et al.)", "sim_aou_raw", updates),
        *_untrained("… and in attention", "sim_am_delta", changes),
    ]


def _closer(text: str, column: str, title: str) -> list[Claim]:
    """Layer-causal less plain descent, at chosen rates and at equal size."""
    measured = f"{title}, layer-causal less plain"
    return [
        Claim(text, f"{measured}, at chosen rates", lambda cells: paired(column, comparison("layer-causal"), cells)),
        Claim("… at equal size", f"{measured}, ‖Δh‖ = {OWN_SIZE:g}", partial(closer_at, OWN_SIZE, column)),
    ]


def _untrained(text: str, column: str, title: str) -> list[Claim]:
    """The trained model less the untrained, each at its chosen rate, then at the size of the latter's update."""
    measured, words = f"{title}, trained less untrained", {"more": "no", "less": "yes, rather higher"}
    drawn = redrawn("untrained")
    return [
        Claim(text, f"{measured}, at chosen rates", lambda cells: paired(column, cells, drawn), **words),
        Claim("… at equal size", f"{measured}, at ‖Δh‖ of the latter", partial(trained_less, drawn, column), **words),
    ]


def _shen() -> list[Claim]:
    return [
        Claim(
            "ICL depends more on the demonstrations' order than FT (Shen et al.)",
            "standard deviation over orders, ICL less FT",
            partial(less, "order_sensitivity_icl", "order_sensitivity_ft"),
            "yes, at these step sizes",
        ),
        Claim(
            "FT's likeliest tokens are less ICL's than those of ICL in another order (Shen et al.)",
            "shared of ten, FT less another order",
            partial(less, "overlap_ft_token_overlap", "overlap_icl_reordered_token_overlap"),
            "no",
            "yes",
        ),
    ]
