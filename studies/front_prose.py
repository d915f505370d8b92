"""The sentences of docs/findings.md that have numbers, each made from the result files.

What they say follows from the claims' answers (`front.Claim.answer`), so that new cells change words and numbers alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import pandas as pd
import second
from aggregate import TASKS, Mean, over
from front import (
    CLAIMS,
    LEAST,
    SIZES,
    UNTRAINED,
    Claim,
    draws,
    every_floor,
    floor,
    models,
    once,
    source,
    table,
    versions,
)
from layout import grid

from dualview.store.cell_key import asked_id
from dualview.sweep.spec import Spec

_FULL = tuple(claim for claim in CLAIMS if claim.full)
"""The claims that need full controls."""


def answer() -> str:
    """Three sentences: what is alike in the largest model, what is not, and where the question cannot be put."""
    model = models()[-1]
    said = {claim.level: claim.answer(model) for claim in CLAIMS if claim.level}
    natural = draws()[draws()["model"] == model]
    learnt = natural[natural["verdict_learning"] == "supported"]
    agree, value, contrast = (over(learnt[name]).show(2) for name in ("agreement", "sim_aou_raw", "label_contrast"))
    beyond = over(learnt["sim_aou_raw"] - floor(learnt, "sim_aou"))
    alike = said["predictions"].startswith("**yes")
    inside = [said[level] == "**yes**" for level in ("representations", "labels")]  # not merely a small one
    word = "Yes" if alike and all(inside) else "Partly" if alike or any(inside) else "No"
    moves = "tend to change the same answers in the same way" if alike else "do not clearly change the same answers"
    holds = (learnt["verdict_predictions"] == "supported").sum()
    smaller = draws()[draws()["model"] != model]
    above = over(learnt["label_contrast"] - floor(learnt, "label_contrast"))
    return (
        f"**{word}.** Where the {SIZES[model]} model learns a task from the prompt and by fine-tuning too "
        f"({len(learnt)} of {len(natural)} lists of demonstrations), ICL and FT {moves}: query by query, their changes "
        f"of the answer's log-odds correlate at {agree}, in {holds} of {len(learnt)} lists more than the controls "
        "explain. "
        f"{'Inside the model they are alike too' if all(inside) else 'Inside the model they share little'}: their "
        f"changes of attention's output have a cosine of {value}, {beyond.show(3)} more than unrelated updates "
        f"reach{_every_control_clause(model)}{_untrained_clause(model)}, and what the labels teach them has a cosine "
        f"of {contrast}, {above.show(3)} more than its controls. Elsewhere the question can hardly be asked, since "
        f"both learn in only {_both(smaller)} lists with the smaller models, and in {_both(abstract_cells())} "
        "trainings with meaningless label words."
    )


def _both(cells: pd.DataFrame) -> str:
    return f"{(cells['verdict_learning'] == 'supported').sum()} of {len(cells)}"


def _every_control_clause(model: str) -> str:
    """How far the representations are from the highest of all floors, where every control was run."""
    against = next(claim for claim in CLAIMS if claim.level == "representations").against_every_control(model)
    if against.n < LEAST:
        return ""
    size, side = f"{abs(against.value):.3f} ± {against.half or 0:.3f}", "less" if against.value < 0 else "more"
    return f" but {size} {side} than the highest control in the {against.n} lists where every control was run"


def _untrained_clause(model: str) -> str:
    """What untrained weights have, once enough draws tell."""
    claim = next(claim for claim in CLAIMS if "untrained" in claim.text)
    said = claim.answer(model)
    return {"**no**": " (an untrained network has more)", "**yes**": " (an untrained network has less)"}.get(said, "")


def limits() -> str:
    """What the numbers rest on: draws, tasks, full controls, versions."""
    cells, model = table("cells"), models()[-1]
    largest = draws()[draws()["model"] == model]
    full = draws(full=True)[draws(full=True)["model"] == model]
    both, learnt = (part[part["verdict_learning"] == "supported"] for part in (full, largest))
    lower = (full["sim_aou_raw"] < floor(full, "sim_aou", UNTRAINED)).sum()
    lines = [
        f"Few tasks and few draws: {len(largest)} draws of {largest['task'].nunique()} tasks for the {SIZES[model]} "
        f"model with natural label words, {len(cells)} cells in all (see [what was run](#what-was-run)). Intervals "
        "are over draws of the demonstrations; draws of one task share its queries.",
        f"Of those draws {len(full)} have full controls, {len(both)} where both learn. Only there are untrained "
        "weights, random labels and other tasks' demonstrations among the floors. In "
        f"{lower} of these {len(full)}, untrained weights (all, or all but the embeddings) are more similar than the "
        "trained ones, at updates of equal size. The [appendix](appendix.md) has such controls for a model of 135 "
        "million parameters, by the verdict of the first edition.",
        f"By version of dualview's numbers, all cells are of {versions(cells)}, and the draws on which the "
        f"{SIZES[model]} model's claims rest of {versions(learnt)}. Floors and verdicts are of their version. A draw "
        "that was run more than once counts once: the latest version before older ones, then full controls before "
        "quick ones. `src/dualview/comparison/numerics.py` says what changed.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def claim(anchor: str) -> str:
    """The answers to a section's claims, by size, with their numbers."""
    return "\n".join(_line(each) for each in CLAIMS if each.anchor == anchor)


def _line(each: Claim) -> str:
    parts = [f"{SIZES[model]} {each.answer(model)}{_number(each, model)}" for model in reversed(models())]
    return f"- *{each.text[0].upper()}{each.text[1:]}* ({each.measured}): {'; '.join(parts)}."


def _number(each: Claim, model: str) -> str:
    found = each.mean(model)
    if not found.n:
        return ""
    value = over(each.cells(model)[each.value]) if each.value and each.value != each.level else None
    own = f", of {value.show()}" if value is not None and value.n and "less" in each.measured else ""
    against = each.against_every_control(model)
    every = f"; against every control {against.show()} ({against.n})" if against.n >= LEAST else ""
    return f", {found.show()}{own} ({found.n} draw{'' if found.n == 1 else 's'}){every}"


def full_controls() -> str:
    """The claims that need full controls, over all draws that have them, learnt or not."""
    rows = []
    for model in models():
        cells = draws(full=True)[draws(full=True)["model"] == model]
        if len(cells):
            means = (over(values) for values in (_above_all(cells), *(each.measure(cells) for each in _FULL)))
            rows.append([SIZES[model], f"{len(cells)}, {cells['task'].nunique()}", *map(_with_count, means)])
    above = "raw SimAOU, less the highest of all floors"
    shown = grid(["size", "draws, tasks", above, *(each.measured for each in _FULL)], rows)
    return f"{shown}\n\nAll draws with full controls, whether or not both learn.\n\n{source()}"


def _above_all(cells: pd.DataFrame) -> pd.Series:
    """Raw SimAOU, less every floor that full controls have."""
    return cells["sim_aou_raw"] - floor(cells, "sim_aou", every_floor())


def _with_count(found: Mean) -> str:
    return f"{found.show()} ({found.n})" if found.n else "–"


def ceiling() -> str:
    """How similar a change of K and V that imitates the in-context model is."""
    rows = table("controls")
    rows = rows[(rows["name"] == "ft_distilled") & (rows["metric"] == "sim_aou")]
    cells = draws(full=True)[draws(full=True)["model"] == models()[-1]]
    found = over(cells["key"].map(rows.set_index("key")["value"]))
    return (
        f"A change of K and V could carry far more: trained to reproduce the in-context model's outputs, it reaches a "
        f"SimAOU of {found.show(2)} ({SIZES[models()[-1]]}, {found.n} draws)."
    )


def abstract_cells() -> pd.DataFrame:
    """Meaningless label words: every list and training once."""
    cells = table("cells")
    cells = cells[(cells["labels"] == "abstract") & (cells["controls"] != "none") & (cells["ft_rule"] == "sgd")]
    names = ["model", "task", "seed", "ft_loss", "epochs", "lr_asked"]
    return once(cells[cells["protocol"] == "modern"], names)


def abstract() -> str:
    """The table of meaningless label words."""
    cells, rows = abstract_cells(), []
    beyond = cells["label_contrast"] - floor(cells, "label_contrast")
    order = cells.assign(model=cells["model"].map(list(SIZES).index), task=cells["task"].map(list(TASKS).index))
    for at in order.sort_values(["model", "task", "seed", "ft_loss", "epochs"], ascending=[False, *[True] * 4]).index:
        cell = cells.loc[at]
        learns = "yes" if cell["verdict_learning"] == "supported" else "no"
        rows.append(
            [
                SIZES[cell["model"]],
                TASKS[cell["task"]],
                str(cell["seed"]),
                f"{cell['ft_loss']}, {cell['epochs']}, {cell['controls']}",
                *(f"{cell[f'accuracy_{name}']:.3f}" for name in ("zsl", "icl", "ft")),
                learns,
                *(f"{value:.3f}" for value in (cell["agreement"], cell["label_contrast"], beyond[at])),
                str(cell["verdict"]),
            ]
        )
    columns = ["size", "task", "seed", "loss, epochs, controls", "zero-shot", "ICL", "FT", "both learn", "agreement"]
    shown = grid([*columns, "label contrast", "less its floor", "verdict"], rows)
    both = cells["verdict_learning"] == "supported"
    found = [over(side[both]).show() for side in (cells["agreement"], cells["label_contrast"], beyond)]
    said = (
        f"Where both learn from meaningless words ({both.sum()} of {len(cells)} trainings), agreement is {found[0]} "
        f"and the label contrast {found[1]}, {found[2]} beyond its floors."
    )
    note = "Abstract label words, one list of demonstrations a row."
    return f"{said}\n\n{shown}\n\n{note}\n\n{source('cells', 'controls')}"


def left() -> str:
    """Of every arm of the study: how many cells there are of those that were planned, by size."""
    study = second.read_study()
    everything = argparse.Namespace(arms=None, models=None, seeds=None, tasks=None, device="auto")
    cells = table("cells")
    there = set(cells["asked"])
    matched = cells[(cells["lr_asked"] != "auto") & (cells["controls"] == "full")]
    counts: dict[tuple[str, str], list[int]] = {}
    for stage in second.stages(study, everything):
        count = counts.setdefault((stage.arm, stage.model), [0, 0])
        asked = [asked_id(cell) for grid_ in stage.grids for cell in Spec.make(grid_).cells()]
        own = matched[(matched["model"] == stage.model) & (matched["seed"].astype(str) == stage.seed)]
        count[0] += len(own) if stage.match is not None else len(there.intersection(asked))
        count[1] += len(asked)
    rows = [
        [f"`{arm}`", *("{} of {}".format(*counts[arm, model]) for model in reversed(SIZES))] for arm in study["arms"]
    ]
    return (
        f"{grid(['arm of the study', *reversed(SIZES.values())], rows)}\n\nCells that are there, of those that "
        f"`studies/second.yaml` lists; of `matched`, those that could be.\n\n{source('cells')}"
    )


PARTS: Mapping[str, Callable[..., str]] = {
    "answer": answer,
    "limits": limits,
    "claim": claim,
    "ceiling": ceiling,
    "full_controls": full_controls,
    "abstract": abstract,
    "left": left,
}
"""`claim` takes the section's name."""
