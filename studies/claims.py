"""What the study says of each claim: a difference over tasks, and no more than its interval allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from aggregate import (
    SIX,
    Mean,
    Means,
    both_learn,
    by_task,
    comparison,
    control,
    mean_of,
    mean_of_kinds,
    passing,
    redrawn,
)
from layout import COMPARISON, OVER_TASKS, RATES, UNTRAINED, grid, source
from steps import closer_at, trained_less

from dualview.metrics.statistics import holm

SMALL = 0.01
"""Under a tenth of raw SimAOU."""
OWN_SIZE, MODEST_SIZE = 1.2, 0.5
"""About the size of in-context learning's own update, and of fine-tuning's where it still gains."""
UNKNOWN = "cannot be told here"


def says(difference: Mean, more: str = "yes", less: str = "no", same: str = "no difference") -> str:
    """What the interval of a difference allows to say; `same` if it lies within ± SMALL."""
    if difference.half is not None and abs(difference.value) + difference.half < SMALL:
        return same
    return more if difference.above_zero else less if difference.below_zero else UNKNOWN


@dataclass(frozen=True)
class Claim:
    """A claim, the difference that should show it, and the words for what that difference can turn out to be."""

    text: str
    measured: str
    difference: Callable[[pd.DataFrame], Means]
    """By task, of some of plain descent's cells."""
    more: str = "yes"
    less: str = "no"
    same: str = "no difference"

    def says(self, found: Mean) -> str:
        return says(found, self.more, self.less, self.same)

    def row(self, adjusted: float) -> list[str]:
        """`adjusted`: the difference's p, with Holm's correction for all claims listed."""
        cells = comparison()
        six, learning = cells[cells["task"].isin(SIX)], cells[both_learn(cells)]
        means = self.difference(cells)
        here = self.says(mean_of(means))
        shown = [_shown(self.difference(part), len(part)) for part in (cells, six, learning)]
        too = ["kinds"] if here != UNKNOWN and self.says(mean_of_kinds(means)) == here else []
        too += ["Holm"] if adjusted < 0.05 else []
        return [self.text, here, self.measured, *shown, ", ".join(too)]


def _shown(means: Means, cells: int) -> str:
    """The mean over tasks, and of how many cells if not of all."""
    count = sum(mean.n for mean in means.values())
    return mean_of(means).show() + (f" ({count} cells)" if count < cells else "")


def claims() -> str:
    cells = comparison()
    learning = cells[both_learn(cells)]
    listed = [*_dai(), *_deutch(), *_shen()]
    adjusted = holm(np.array([mean_of(claim.difference(cells)).p for claim in listed]))
    names = [f"all {len(cells)} cells", "the papers' six tasks", f"the {len(learning)} cells where both learn"]
    rows = [claim.row(p) for claim, p in zip(listed, adjusted, strict=True)]
    shown = grid(["claim", "here", "measured by", *names, "holds too"], rows)
    chance = cells["rec2ftp_p"] < 0.01
    note = (
        f"{OVER_TASKS} Where that interval holds 0 nothing can be told; where it lies within ±{SMALL:g} (under a tenth "
        "of raw SimAOU), there is no difference to speak of. *Here* goes by all cells. *Holds too*: with the five "
        "tasks about films counted as one (kinds); with Holm's correction for all rows at 5 %. Both learn: in-context "
        "and plainly fine-tuned accuracy each above zero-shot's by the 95 % interval over queries; cells of "
        f"{learning['task'].nunique()} tasks. In single cells at p < .01: Rec2FTP is above chance in {chance.sum()} of "
        f"{len(cells)} ({chance[both_learn(cells)].sum()} where both learn); raw SimAOU above random updates in "
        f"{passing(cells, 'gaussian')}, above every floor (but for a shift of position) in {passing(cells)}."
    )
    files = "cells.parquet controls.parquet curves.parquet"
    return f"{shown}\n\n{note}\n\n{source(files, *COMPARISON, *UNTRAINED, *RATES)}"


def less(column: str, other: str, cells: pd.DataFrame) -> Means:
    """One column of the cells less another."""
    return by_task(cells, cells[column] - cells[other])


def less_control(column: str, metric: str, name: str, cells: pd.DataFrame) -> Means:
    """One column of the cells less a control of its metric."""
    return by_task(cells, cells[column] - control(cells, metric, name))


def paired(column: str, first: pd.DataFrame, second: pd.DataFrame) -> Means:
    """One column of some cells less the same of others with their tasks and seeds."""
    both = first.merge(second, on=["task", "seed"], suffixes=("_first", "_second"))
    return by_task(both, both[f"{column}_first"] - both[f"{column}_second"])


def _dai() -> list[Claim]:
    aou, am, rec = (
        partial(less_control, column, metric)
        for column, metric in (("sim_aou_raw", "sim_aou"), ("sim_am_delta", "sim_am"), ("rec2ftp_value", "rec2ftp"))
    )
    no_label = {
        "more": "less alike with random labels",
        "less": "more alike with random labels",
        "same": "no: as alike with random labels",
    }
    return [
        Claim(
            "ICL gets right what FT puts right (Dai et al., Rec2FTP)",
            "Rec2FTP, less its chance level",
            partial(less, "rec2ftp_value", "rec2ftp_chance"),
            "above chance on average",
            "below chance",
        ),
        Claim(
            "… because the same task is learnt",
            "Rec2FTP, less that with random labels in the prompt",
            partial(rec, "icl_random_labels"),
            "less so with random labels",
            "more so with random labels",
        ),
        Claim(
            "their updates of attention's output are alike, more than random ones (Dai et al., SimAOU)",
            "raw SimAOU, less random updates of the same size",
            partial(aou, "gaussian"),
        ),
        Claim(
            "… and more than updates that belong to another query",
            "raw SimAOU, less another query's",
            partial(aou, "shuffled_query"),
        ),
        Claim(
            "… because the same task is learnt",
            "raw SimAOU, less that with random labels in the prompt",
            partial(aou, "icl_random_labels"),
            **no_label,
        ),
        Claim(
            "FT brings attention closer to ICL's (Dai et al., SimAM)",
            "SimAM after, less before",
            partial(less, "sim_am_after", "sim_am_before"),
            less="the contrary",
        ),
        Claim(
            "… its changes are alike, more than those of another query",
            "SimAM of the changes, less another query's",
            partial(am, "shuffled_query"),
        ),
        Claim(
            "… because the same task is learnt",
            "SimAM of the changes, less that with random labels in the prompt",
            partial(am, "icl_random_labels"),
            **no_label,
        ),
        Claim(
            "FT attends to the training tokens as ICL does (Dai et al., Kendall)",
            "as released, less the same at learning rate 0",
            partial(less, "kendall_released_tau_token", "kendall_released_lr0_tau_token"),
            "more than the untouched model",
            "less than the untouched model",
        ),
        Claim(
            "… in the dual form of the trained values",
            "less the same at learning rate 0",
            partial(less, "kendall_dual_v_tau_token", "kendall_dual_v_lr0_tau_token"),
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
    """Layer-causal less plain descent, at chosen rates and at two equal sizes."""
    measured = f"{title}, layer-causal less plain"
    return [
        Claim(text, f"{measured}, at chosen rates", lambda cells: paired(column, comparison("layer-causal"), cells)),
        *(
            Claim("… at equal size", f"{measured}, ‖Δh‖ = {size:g}", partial(closer_at, size, column))
            for size in (MODEST_SIZE, OWN_SIZE)
        ),
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
