"""docs/findings.md, the front page: the claims by size of model, with the verdict's own numbers (`second.py`'s cells).

A draw is one list of demonstrations of one task. A claim is tested on the draws in which it can be: those in which the
verdict found that in-context learning (ICL) and fine-tuning (FT) both learn, and for labels those in which flipping
them changes what both predict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from aggregate import RESULTS, TASKS, Mean, over, result_file
from layout import grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SECOND = RESULTS / "second"
SIZES = {"embedded": "135M", "qwen2.5-coder-0.5b": "0.5B", "qwen2.5-coder-1.5b": "1.5B"}
IMAGES = Path(__file__).parents[1] / "docs" / "images"
FOREST, BY_SIZE = IMAGES / "findings-claims.png", IMAGES / "findings-sizes.png"
NEGLIGIBLE = 0.01
_LEAST = 3
"""Draws that an answer needs."""


@cache
def table(name: str) -> pd.DataFrame:
    return result_file(SECOND / f"{name}.parquet")


def draws(labels: str | None = "natural", rule: str = "sgd") -> pd.DataFrame:
    """The cells with controls at the chosen rate, of the all-token loss."""
    cells = table("cells")
    cells = cells[(cells["controls"] != "none") & (cells["lr_asked"] == "auto") & (cells["protocol"] == "modern")]
    cells = cells[(cells["ft_rule"] == rule) & (cells["ft_loss"] == "all") & (cells["epochs"] == 1)]
    # Where a draw was run with full and with quick controls, it counts once, with the former.
    cells = cells.sort_values("controls").drop_duplicates(["model", "task", "labels", "seed"]).sort_index()
    return cells if labels is None else cells[cells["labels"] == labels]


def models() -> list[str]:
    """Those that were run, by size."""
    return [model for model in SIZES if (draws(None)["model"] == model).any()]


def floor(cells: pd.DataFrame, metric: str, names: Sequence[str] = ()) -> pd.Series:
    """Each cell's highest floor of a metric (but for a shift of position), or the highest of those named."""
    rows = table("controls")
    rows = rows[(rows["metric"] == metric) & (rows["kind"] == "floor") & (rows["name"] != "zsl_shifted")]
    rows = rows[rows["name"].isin(names)] if names else rows
    return cells["key"].map(rows.groupby("key")["value"].max())


def deeper(cells: pd.DataFrame) -> pd.Series:
    """Raw SimAOU of the last third of the layers, less that of the first third."""
    rows = table("layers")
    place = rows["layer"] / rows.groupby("key")["layer"].transform("max")
    last, first = (rows[part].groupby("key")["sim_aou_raw"].mean() for part in (place > 2 / 3, place < 1 / 3))
    return cells["key"].map(last - first)


def against_rule(rule: str) -> Callable[[pd.DataFrame], pd.Series]:
    """Raw SimAOU of another rule on the same draw, less that of plain descent."""

    def measure(cells: pd.DataFrame) -> pd.Series:
        same = ["model", "task", "labels", "seed"]
        other = draws(None, rule).set_index(same)["sim_aou_raw"]
        other = other[~other.index.duplicated()]
        there = pd.Series(other.reindex(pd.MultiIndex.from_frame(cells[same])).to_numpy(), cells.index)
        return there - cells["sim_aou_raw"]

    return measure


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

    def cells(self, model: str) -> pd.DataFrame:
        """The draws on which it can be tested."""
        cells = draws()
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
        if found.n == 0 and len(self.cells(model)):
            return "not run"
        if found.n < _LEAST or found.half is None:
            return "not testable"
        if found.above_zero:
            return "**yes**"
        small = abs(found.value) + found.half <= NEGLIGIBLE
        return "**no**" if found.below_zero or small else "unclear"

    def verdicts(self, model: str) -> str:
        """How often the cells' own verdict finds it."""
        cells = self.cells(model)
        if self.level is None or not len(cells):
            return ""
        return f"{(cells[f'verdict_{self.level}'] == 'supported').sum()} of {len(cells)}"


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
    ),
    Claim(
        "attention maps change in similar ways",
        "Dai et al.",
        "SimAM of the changes, less its highest floor",
        lambda c: c["sim_am_delta"] - floor(c, "sim_am"),
        "sim_am_delta",
        "attention",
        anchor="attention",
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
        "raw SimAOU, layer-causal less plain",
        against_rule("layer-causal"),
        anchor="layer-causal-and-untrained",
    ),
    Claim(
        "a trained model is above an untrained one",
        "against Deutch et al.",
        "raw SimAOU, less that of untrained weights at FT's size",
        lambda c: c["sim_aou_raw"] - floor(c, "sim_aou", ("untrained",)),
        anchor="layer-causal-and-untrained",
    ),
    Claim(
        "ICL depends more on the demonstrations' order than FT",
        "Shen et al.",
        "standard deviation of accuracy over orders, ICL less FT",
        lambda c: c["order_sensitivity_icl"] - c["order_sensitivity_ft"],
        anchor="order",
        of_all=True,
    ),
)


def claims() -> str:
    """The table of the page: answer by size, and the number of the largest model that was run."""
    largest, rows = models()[-1], []
    for claim in CLAIMS:
        found = claim.mean(largest)
        number = f"{found.show()} ({found.n}, {claim.cells(largest)['task'].nunique()} tasks)" if found.n else "–"
        title = f"[{claim.text}](#{claim.anchor}) ({claim.paper})"
        rows.append(
            [title, *(claim.answer(model) for model in SIZES), claim.measured, number, claim.verdicts(largest) or "–"]
        )
    size = SIZES[largest]
    shown = grid(["claim", *SIZES.values(), "measured by", f"{size}", f"verdicts, {size}"], rows)
    return f"{shown}\n\n{_note(size)}\n\n{_source()}"


def _note(size: str) -> str:
    return (
        f"Natural label words, all-token loss, chosen rate, 32 demonstrations. {size}: mean ± half of the 95 % "
        "interval (Student) over draws in which ICL and FT both learn (accuracy and order: over all), their number in "
        f"brackets. **Yes**: above 0 by that interval; **no**: below 0, or within ±{NEGLIGIBLE}; not testable: fewer "
        f"than {_LEAST} such draws. Verdicts: draws in which dualview's own verdict supports the level, each by itself."
    )


def _source() -> str:
    files = ", ".join(
        f"[second/{name}.parquet](../studies/results/second/{name}.parquet)" for name in ("cells", "controls", "layers")
    )
    return f"*From {files}, made by `python studies/second.py STORE` and `--collect`.*"


def outcomes() -> str:
    """Every task with its accuracies and verdicts, by size and label words."""
    rows = []
    cells = draws(None)
    for (model, labels), group in cells.groupby(["model", "labels"], sort=False):
        for task, title in TASKS.items():
            own = group[group["task"] == task]
            if not len(own):
                continue
            counts = own["verdict"].value_counts()
            settings = (over(own[f"accuracy_{name}"]).value for name in ("zsl", "icl", "ft"))
            rows.append(
                [
                    SIZES[str(model)],
                    str(labels),
                    title,
                    str(len(own)),
                    *(f"{value:.3f}" for value in settings),
                    ", ".join(f"{name} {count}" for name, count in counts.items()),
                ]
            )
    rows.sort(key=lambda row: (list(SIZES.values()).index(row[0]), row[1] != "natural"))
    shown = grid(["size", "labels", "task", "draws", "zero-shot", "ICL", "FT", "verdicts, each draw alone"], rows)
    return f"{shown}\n\nMean accuracies over draws.\n\n{_source()}"


def answer() -> str:
    """The page's three sentences, with their numbers."""
    cells = draws(None)
    model = models()[-1]
    own = cells[cells["model"] == model]
    natural, abstract = (own[own["labels"] == labels] for labels in ("natural", "abstract"))
    learnt, counted = natural[natural["verdict_learning"] == "supported"], natural["verdict"].value_counts()
    value, highest = over(learnt["sim_aou_raw"]), over(floor(learnt, "sim_aou"))
    few = abstract[abstract["verdict_learning"] == "supported"]
    agree, contrast = (over(learnt[name]).show(2) for name in ("agreement", "label_contrast"))
    return (
        f"In the {SIZES[model]} model, where ICL and FT both learn ({len(learnt)} of {len(natural)} draws with natural "
        f"label words), they are related beyond every control that was run: the verdict is *supported* in "
        f"{counted.get('supported', 0)} of these draws, with an agreement of {agree} and a raw SimAOU of "
        f"{value.show(2)} against floors of {highest.show(2)}. The relation is far from identity: most of that SimAOU "
        f"is what the floors have too, and what the labels teach is shared only in part (label contrast {contrast}, 1 "
        "being the same). In the other draws there is nothing to compare: mostly FT does not learn from "
        f"32 demonstrations what ICL does. With abstract label words both learn in {len(few)} of {len(abstract)} draws."
    )


def forest() -> Figure:
    """Each claim and size: the number that decides it, with its interval over draws."""
    from dualview.report.figures.style import BLACK, GREY, dress, legend, look, new_figure, small_print

    made = new_figure(7.2, 5.2)
    axes = made.subplots()
    shown, run = set[str](), models()
    for row, claim in enumerate(CLAIMS):
        for number, model in enumerate(run):
            size, how, found = SIZES[model], look(list(SIZES).index(model)), claim.mean(model)
            at = row + 0.22 * (number - (len(run) - 1) / 2)
            if found.n < _LEAST or found.half is None:
                axes.text(0.008, at, f"{size}: {claim.answer(model)}", va="center", fontsize=6, color=GREY)
                continue
            cells = claim.cells(model)
            axes.errorbar(
                found.value,
                at,
                xerr=found.half,
                fmt=how.marker,
                color=how.colour,
                markersize=5,
                capsize=2,
                label=size if size not in shown else None,
            )
            shown.add(size)
            if claim.value is not None:
                axes.plot(over(cells[claim.value]).value, at, "|", color=how.colour, markersize=9, alpha=0.6)
    axes.axvline(0, color=BLACK, linewidth=0.7)
    axes.set_yticks(range(len(CLAIMS)), [f"{claim.text}\n{claim.measured}" for claim in CLAIMS], fontsize=6.5)
    axes.set_ylim(len(CLAIMS) - 0.4, -0.6)
    dress(axes, xlabel="value less its floor (0: no more than the control)")
    legend(axes, columns=3)
    small_print(
        made,
        "The claims, with what is left of each once its controls are taken away",
        "Mean over draws in which ICL and FT both learn, natural label words; bars: 95 % interval over draws. "
        "A tick marks the value itself, before its floor is taken away.",
    )
    return made


def by_size() -> Figure:
    """Accuracy by setting, and both similarities by depth."""
    from dualview.report.figures.style import SETTINGS, dress, legend, new_figure, small_print

    made = new_figure(7.2, 5.6)
    upper, lower = made.subfigures(2, 1, height_ratios=(1, 1.1))
    panels: Sequence[Axes] = list(upper.subplots(1, 2, sharey=True))
    for axes, labels in zip(panels, ("natural", "abstract"), strict=True):
        cells = draws(labels)
        names = [(m, t) for m in SIZES for t in TASKS if ((cells["model"] == m) & (cells["task"] == t)).any()]
        for name, how in SETTINGS.items():
            for at, (model, task) in enumerate(names):
                own = cells[(cells["model"] == model) & (cells["task"] == task)][f"accuracy_{name}"]
                axes.plot([at] * len(own), own, how.marker, color=how.colour, markersize=4, alpha=0.7)
            axes.plot([], [], how.marker, color=how.colour, label={"zsl": "zero-shot"}.get(name, name.upper()))
        axes.set_xticks(range(len(names)), [f"{TASKS[t]}\n{SIZES[m]}" for m, t in names], fontsize=6.5)
        dress(axes, ylabel="accuracy" if labels == "natural" else "", xlabel=f"{labels} label words")
    legend(panels[0], columns=3)
    depth: Sequence[Axes] = list(lower.subplots(1, 2))
    rows = table("layers")
    place = (rows["layer"] / rows.groupby("key")["layer"].transform("max") * 9).round() / 9
    for axes, column, title in zip(
        depth, ("sim_aou_raw", "label_contrast"), ("raw SimAOU", "label contrast"), strict=True
    ):
        _by_depth(axes, rows.assign(place=place), column)
        dress(axes, ylabel=f"{title} (cosine)", xlabel="depth (0: first layer, 1: last)")
    legend(depth[0], columns=1)
    small_print(
        made,
        "What is learnt, and how similar the updates are, by size of model",
        "Above: every draw. Below: means over the draws in which ICL and FT both learn, natural label words, with the "
        "95 % interval over draws; dotted: another query's update (SimAOU).",
    )
    return made


def _by_depth(axes: Axes, rows: pd.DataFrame, column: str) -> None:
    from dualview.report.figures.style import BLACK, look

    for number, (model, size) in enumerate(SIZES.items()):
        cells, how = CLAIMS[0].cells(model), look(number)
        if not len(cells):
            continue
        own = rows[rows["key"].isin(cells["key"])].groupby(["place", "key"])[column].mean().unstack("key")
        means = [over(values) for values in own.to_numpy()]
        value, half = (np.array([getattr(mean, name) or np.nan for mean in means]) for name in ("value", "half"))
        axes.plot(own.index, value, how.marker, ls="-", color=how.colour, markersize=3, label=size)
        axes.fill_between(own.index, value - half, value + half, color=how.colour, alpha=0.15, linewidth=0)
        if column == "sim_aou_raw":
            floors = table("profiles").query("metric == 'sim_aou' and name == 'shuffled_query'")
            floors = floors[floors["key"].isin(cells["key"])]
            at = (floors["layer"] / floors["layer"].max() * 9).round() / 9
            line = floors.assign(place=at).groupby("place")["value"].mean()
            axes.plot(line.index, line, ":", color=how.colour, linewidth=1, label=f"{size}, another query")
    axes.axhline(0, color=BLACK, linewidth=0.7)


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
        f"{runs['seconds'].sum() / 60:.0f} minutes in all.\n\n{_source()}"
    )


def _seeds(group: pd.DataFrame) -> str:
    return ", ".join(str(int(seed)) for seed in sorted(group["seed"].astype(int).unique()))


PARTS: Mapping[str, Callable[[], str]] = {
    "answer": answer,
    "front_claims": claims,
    "outcomes": outcomes,
    "ran": ran,
}
