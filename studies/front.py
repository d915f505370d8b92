"""docs/findings.md, the front page: the claims by size of model, with the verdict's own numbers (`second.py`'s cells).

A draw is one list of demonstrations of one task. A claim is tested on the draws in which it can be: those in which the
verdict found that in-context learning (ICL) and fine-tuning (FT) both learn, and for labels those in which flipping
them changes what both predict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pandas as pd
from aggregate import RESULTS, TASKS, Mean, at_norm, over, result_file
from collect import numerics
from layout import grid

SECOND = RESULTS / "second"
SIZES = {"embedded": "135M", "qwen2.5-coder-0.5b": "0.5B", "qwen2.5-coder-1.5b": "1.5B"}
NEGLIGIBLE, SMALL = 0.01, 0.05
NO_FLOOR = "zsl_shifted"
"""A shift of position alone, which is no update of another kind."""
UNTRAINED = ("untrained", "untrained_but_embeddings")
LEAST = 3
"""Draws that an answer needs."""


@cache
def table(name: str) -> pd.DataFrame:
    return result_file(SECOND / f"{name}.parquet")


def draws(labels: str | None = "natural", *, full: bool = False) -> pd.DataFrame:
    """The cells with controls (`full`: with all of them) at the chosen rate, of the all-token loss: each draw once."""
    cells = table("cells")
    cells = cells[(cells["controls"] != "none") & (cells["lr_asked"] == "auto") & (cells["protocol"] == "modern")]
    cells = cells[(cells["ft_rule"] == "sgd") & (cells["ft_loss"] == "all") & (cells["epochs"] == 1)]
    cells = once(cells[cells["controls"] == "full"] if full else cells, ["model", "task", "labels", "seed"])
    return cells if labels is None else cells[cells["labels"] == labels]


def once(cells: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Of cells that are alike in these columns: one of the latest version of dualview's numbers, where there is one; of
    those, and of older ones, one with full controls; of those the newest."""
    version = numerics(cells)
    rank = cells.assign(old=version < numerics(table("cells")).max(), age=-version)
    order = rank.sort_values(["old", "controls", "age"], kind="stable").index
    return cells.loc[order].drop_duplicates(names).sort_index()


def versions(cells: pd.DataFrame) -> str:
    """The versions of dualview's numbers that some cells are of."""
    counts = numerics(cells).value_counts().sort_index(ascending=False)
    if len(counts) == 1:
        return f"version {counts.index[0]}"
    listed = [f"{version} ({count})" for version, count in counts.items()]
    return f"versions {', '.join(listed[:-1])} and {listed[-1]}"


def models() -> list[str]:
    """Those that were run, by size."""
    return [model for model in SIZES if (draws(None)["model"] == model).any()]


@cache
def from_records() -> frozenset[str]:
    """The floors that every draw has, whichever controls were run."""
    rows, cells = table("controls"), table("cells")
    quick = cells.loc[cells["controls"] == "quick", "key"]
    return frozenset(rows.loc[(rows["kind"] == "floor") & rows["key"].isin(quick), "name"]) - {NO_FLOOR}


def every_floor() -> frozenset[str]:
    """The floors of any control."""
    rows = table("controls")
    return frozenset(rows.loc[rows["kind"] == "floor", "name"]) - {NO_FLOOR}


def floor(cells: pd.DataFrame, metric: str, names: Collection[str] | None = None) -> pd.Series:
    """Each cell's highest floor of a metric among those named (None: those that every draw has)."""
    rows = table("controls")
    rows = rows[rows["name"].isin(from_records() if names is None else names)]
    rows = rows[(rows["metric"] == metric) & (rows["kind"] == "floor")]
    return cells["key"].map(rows.groupby("key")["value"].max())


def deeper(cells: pd.DataFrame) -> pd.Series:
    """Raw SimAOU of the last third of the layers, less that of the first third."""
    rows = table("layers")
    place = rows["layer"] / rows.groupby("key")["layer"].transform("max")
    last, first = (rows[part].groupby("key")["sim_aou_raw"].mean() for part in (place > 2 / 3, place < 1 / 3))
    return cells["key"].map(last - first)


def layer_causal_gain(cells: pd.DataFrame) -> pd.Series:
    """Raw SimAOU of layer-causal descent, less that of plain descent, at the size of FT's update (the norm curve).

    Similarity grows with the size of an update, so rules compare at equal size only; NaN where one does not reach it.
    """

    def gain(cell: pd.Series) -> float:
        curve = table("curves")
        curve = curve[curve["key"] == cell["key"]]
        plain, other = (curve[curve["rule"] == rule] for rule in ("sgd", "layer-causal"))
        size = plain.loc[plain["lr"] == cell["lr"], "update_norm"]
        if not len(size) or not len(other):
            return float("nan")
        return at_norm(other, size.item(), "sim_aou_raw") - at_norm(plain, size.item(), "sim_aou_raw")

    return cells.apply(gain, axis=1) if "rule" in table("curves") else pd.Series(float("nan"), cells.index)


@dataclass(frozen=True)
class Claim:
    """One row of the table: what is claimed, and the number that decides it, which is 0 if the claim is false."""

    text: str
    paper: str
    measured: str
    measure: Callable[[pd.DataFrame], pd.Series]
    value: str | None = None
    """The column of the value itself, where the number is a value less its floor."""
    level: str | None = None
    """The verdict's level on it."""
    anchor: str = ""
    of_all: bool = False
    """Whether it is about every draw, learnt or not."""
    full: bool = False
    """Whether only cells with full controls have its number."""
    metric: str | None = None
    """The metric of which full controls have further floors: untrained weights, random labels, another task."""

    def cells(self, model: str) -> pd.DataFrame:
        """The draws on which it can be tested."""
        cells = draws(full=self.full)
        cells = cells[cells["model"] == model]
        if self.of_all:
            return cells
        cells = cells[cells["verdict_learning"] == "supported"]
        return cells[cells["verdict_labels"] != "not testable"] if self.level == "labels" else cells

    def mean(self, model: str) -> Mean:
        cells = self.cells(model)
        return over(self.measure(cells)) if len(cells) else over([])

    def answer(self, model: str) -> str:
        if model not in models():
            return "not run"
        found = self.mean(model)
        if self.full and not len(self.cells(model)) and len(replace(self, full=False).cells(model)):
            return "not run"
        if found.n < LEAST or found.half is None:
            return "not testable"
        if abs(found.value) + found.half <= NEGLIGIBLE or found.below_zero:
            return "**no**"
        if not found.above_zero:
            return "unclear"
        against = self.against_every_control(model)
        if against.n >= LEAST and not against.above_zero:
            return f"{'**no**' if against.below_zero else 'unclear'}, against every control"
        return "**yes**" if found.value >= SMALL else "**yes**, small"

    def verdicts(self, model: str) -> str:
        """How often the cells' own verdict finds it."""
        cells = self.cells(model)
        if self.level is None or not len(cells):
            return ""
        return f"{(cells[f'verdict_{self.level}'] == 'supported').sum()} of {len(cells)}"

    def against_every_control(self, model: str) -> Mean:
        """The value less the highest of all floors, over the draws that have every control."""
        cells = self.cells(model)
        full = cells[cells["controls"] == "full"]
        if self.metric is None or self.value is None or not len(full):
            return over([])
        return over(full[self.value] - floor(full, self.metric, every_floor()))


CLAIMS = (
    Claim(
        "the same queries change in the same way",
        "Dai et al.",
        "agreement of log-odds changes within classes",
        lambda c: c["agreement"],
        "agreement",
        "predictions",
        anchor="predictions",
    ),
    Claim(
        "attention outputs change in similar directions",
        "Dai et al.",
        "raw SimAOU, less its highest floor",
        lambda c: c["sim_aou_raw"] - floor(c, "sim_aou"),
        "sim_aou_raw",
        "representations",
        anchor="representations",
        metric="sim_aou",
    ),
    Claim(
        "attention maps change in similar ways",
        "Dai et al.",
        "SimAM of the changes, less its highest floor",
        lambda c: c["sim_am_delta"] - floor(c, "sim_am"),
        "sim_am_delta",
        "attention",
        anchor="attention",
        metric="sim_am",
    ),
    Claim(
        "what labels teach is the same",
        "here",
        "label contrast, less its highest floor",
        lambda c: c["label_contrast"] - floor(c, "label_contrast"),
        "label_contrast",
        "labels",
        anchor="labels",
    ),
    Claim(
        "FT attends to the training tokens that ICL attends to",
        "Dai et al.",
        "Kendall, dual form of W_V, less rate 0",
        lambda c: c["kendall_dual_v_tau_token"] - c["kendall_dual_v_lr0_tau_token"],
        "kendall_dual_v_tau_token",
        anchor="tokens",
    ),
    Claim(
        "ICL is better than FT in few-shot",
        "Dai et al.",
        "accuracy, ICL less FT",
        lambda c: c["accuracy_icl"] - c["accuracy_ft"],
        anchor="accuracy",
        of_all=True,
    ),
    Claim(
        "similarity grows with depth",
        "Dai et al.",
        "raw SimAOU, last third of the layers less the first",
        deeper,
        anchor="depth",
    ),
    Claim(
        "layer-causal descent is closer to ICL",
        "Deutch et al.",
        "raw SimAOU, layer-causal less plain, at equal size",
        layer_causal_gain,
        anchor="layer-causal-and-untrained",
        full=True,
    ),
    Claim(
        "trained weights are more similar than untrained ones",
        "doubted by Deutch et al.",
        "raw SimAOU, less that of untrained weights at FT's size",
        lambda c: c["sim_aou_raw"] - floor(c, "sim_aou", UNTRAINED),
        anchor="layer-causal-and-untrained",
        full=True,
    ),
    Claim(
        "ICL depends more on the demonstrations' order than FT",
        "Shen et al.",
        "standard deviation of a label's probability over orders, ICL less FT",
        lambda c: c["order_sensitivity_icl"] - c["order_sensitivity_ft"],
        anchor="order",
        full=True,
    ),
)


def claims() -> str:
    """The table of the page: answer by size, and the number of the largest model that was run."""
    largest, rows = models()[-1], []
    for claim in CLAIMS:
        found = claim.mean(largest)
        cells = claim.cells(largest)
        tasks = cells.loc[claim.measure(cells).notna(), "task"].nunique() if found.n else 0
        number = f"{found.show()} ({found.n}, {tasks} task{'s' if tasks > 1 else ''})" if found.n else "–"
        if (against := claim.against_every_control(largest)).n >= LEAST:
            number += f"; against every control {against.show()} ({against.n})"
        title = f"[{claim.text}](#{claim.anchor}) ({claim.paper})"
        rows.append(
            [title, *(claim.answer(model) for model in SIZES), claim.measured, number, claim.verdicts(largest) or "–"]
        )
    size = SIZES[largest]
    shown = grid(["claim", *SIZES.values(), "measured by", f"{size}", f"verdicts, {size}"], rows)
    return f"{shown}\n\n{_note(size, CLAIMS[0].cells(largest))}\n\n{source()}"


def _note(size: str, learnt: pd.DataFrame) -> str:
    full = (learnt["controls"] == "full").sum()
    return (
        f"Natural label words, all-token loss, chosen rate, 32 demonstrations. {size}: mean ± half of the 95 % "
        "interval (Student) over draws in which ICL and FT both learn (accuracy: over all), their number in brackets. "
        "Floors are those that every draw has: random and other queries' updates, the direction that all queries "
        "share, shrinking heads, rotations. Layer-causal descent, untrained weights and orders need full controls "
        f"({full} of the {len(learnt)} draws where both learn, which are of {versions(learnt)} of dualview's numbers). "
        f"**Yes**: above 0 by that interval, small if under {SMALL}; **no**: below 0, or within ±{NEGLIGIBLE}; not "
        f"testable: fewer than {LEAST} such draws; not run: none of them has the control. Verdicts: draws in which "
        "dualview's own verdict supports the level, each by itself, against every control that was run. Against every "
        "control: less the highest of all floors, untrained weights, random labels and other tasks' demonstrations "
        f"among them, over the draws with full controls ({LEAST} at least); where it is not above 0, the answer "
        "is not yes either. Agreement and the label contrast have the same floors in every draw."
    )


def source(*names: str) -> str:
    """Where something of the page comes from; without names from all that the claims need."""
    files = ", ".join(
        f"[second/{name}.parquet](../studies/results/second/{name}.parquet)"
        for name in names or ("cells", "controls", "layers", "curves")
    )
    return f"*From {files}, made by `python studies/second.py STORE` and `--collect`.*"


def outcomes() -> str:
    """Every task with its accuracies and verdicts, by size."""
    rows = []
    for model, size in SIZES.items():
        for task, title in TASKS.items():
            own = draws()
            own = own[(own["model"] == model) & (own["task"] == task)]
            if len(own):
                settings = (over(own[f"accuracy_{name}"]).value for name in ("zsl", "icl", "ft"))
                counts = ", ".join(f"{name} {count}" for name, count in own["verdict"].value_counts().items())
                rows.append([size, title, str(len(own)), *(f"{value:.3f}" for value in settings), counts])
    shown = grid(["size", "task", "draws", "zero-shot", "ICL", "FT", "verdicts, each draw alone"], rows)
    return f"{shown}\n\nMean accuracies over draws, natural label words.\n\n{source('cells')}"


def ran() -> str:
    """What was run, and what was not."""
    runs, cells = table("runs"), table("cells")
    devices = " and ".join(sorted(runs["device_name"].unique()))
    kinds = cells.groupby(["model", "ft_rule", "ft_loss", "controls", "labels"], sort=False)
    rows = [
        [SIZES[str(key[0])], *map(str, key[1:]), str(group["task"].nunique()), _seeds(group), str(len(group))]
        for key, group in kinds
    ]
    shown = grid(["size", "rule", "loss", "controls", "labels", "tasks", "seeds", "cells"], rows)
    return (
        f"{shown}\n\n{len(cells)} cells of at most {cells['n_queries_used'].max()} queries on {devices}, "
        f"{runs['seconds'].sum() / 60:.0f} minutes in all.\n\n{source('cells', 'runs')}"
    )


def _seeds(group: pd.DataFrame) -> str:
    return ", ".join(str(int(seed)) for seed in sorted(group["seed"].astype(int).unique()))


PARTS: Mapping[str, Callable[[], str]] = {
    "front_claims": claims,
    "outcomes": outcomes,
    "ran": ran,
}
