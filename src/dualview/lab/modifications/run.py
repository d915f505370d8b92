"""`dualview lab modifications`: do the attentions that the dual view suggests learn better? (Ren & Liu, 2310.13220)

Regularised, negative and augmented attention (and sign attention) compared with softmax attention on problems learnt in
context, with 1 to 3 layers. Their figure shows one training curve each; here the best setting of each family is found
by search on held-out problems, over a range that includes where it hurts, and confirmed on fresh seeds and problems.

What it shows: differences on these problems at this size. Learning rate and sizes are the same for all, chosen so that
softmax attention learns: they favour softmax attention if anything.

Search: every setting is trained with `search_seeds` seeds, and the setting of each family with the lowest mean loss on
held-out problems is chosen, for each kind of problem and number of layers. Confirmation: the chosen ones are trained
again, with other seeds, and measured on other problems. Each is compared with softmax attention seed by seed, by
Student's paired t-test, two-sided; Holm's correction runs over all comparisons. A difference survives if its corrected
p is below .05.

All models of a seed start from the same weights and see the same problems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.io.progress import Advance
from dualview.lab.harness import Findings, Job, lab
from dualview.lab.modifications.model import SOFTMAX, Modification, Rows, modifications_of
from dualview.lab.modifications.report import figures, tables
from dualview.lab.modifications.settings import ModificationsSettings
from dualview.lab.problems import LinearTasks, Tasks, named_generator
from dualview.lab.summaries import student_over_draws
from dualview.lab.training import Schedule, clip_each, training_steps
from dualview.metrics.statistics import holm
from dualview.metrics.summary import plain

LEVEL = 0.05
CLIP = 1.0
Losses = dict[str, list[float | None]]
"""By `family/name`: one loss for each seed, None where the training diverged."""


@lab(ModificationsSettings, tables, figures, single_thread=True)
def modifications(job: Job[ModificationsSettings]) -> Findings:
    """Search where regularised, negative, augmented or sign attention beats softmax attention, and confirm it.

    Regression and classification in context, 1 to 3 layers; the best setting of each family on held-out problems is
    trained again with fresh seeds, with a paired test, corrected for the number of comparisons.
    """
    settings, every = job.settings, modifications_of(job.settings)
    cells = [(problem, layers) for problem in settings.problems for layers in settings.layers]
    families = {each.family for each in every}
    total = len(cells) * (len(every) * settings.search_seeds + len(families) * settings.seeds)
    searched: dict[str, Losses] = {}
    chosen: dict[str, list[Modification]] = {}
    confirmed: dict[str, Losses] = {}
    with job.progress.part(f"training {total} models", total) as advance:
        for problem, layers in cells:
            cell = f"{problem}, {layers}"
            searched[cell] = train_all(job, every, "search", problem, layers, advance)
            chosen[cell] = [SOFTMAX, *best(every, searched[cell])]
            confirmed[cell] = train_all(job, chosen[cell], "confirm", problem, layers, advance)
    job.clock.lap("training")
    results = {
        "cells": [{"problem": problem, "layers": layers} for problem, layers in cells],
        "settings": [{"family": m.family, "name": m.name, "coefficient": m.coefficient} for m in every],
        "search": searched,
        "confirm": confirmed,
        "compared": compare(confirmed),
    }
    return Findings(results)


def key(modification: Modification) -> str:
    return f"{modification.family}/{modification.name}"


def best(every: Sequence[Modification], losses: Mapping[str, Sequence[float | None]]) -> list[Modification]:
    """Each family's setting with the lowest mean loss; one that diverged on a seed only if all did."""

    def loss(each: Modification) -> float:
        values = [math.inf if value is None else value for value in losses[key(each)]]
        return sum(values) / len(values)

    families = dict.fromkeys(each.family for each in every if each is not SOFTMAX)
    return [min((each for each in every if each.family == family), key=loss) for family in families]


def train_all(
    job: Job[ModificationsSettings],
    chosen: Sequence[Modification],
    stage: str,
    problem: str,
    layers: int,
    advance: Advance,
) -> Losses:
    """The losses of every modification on every seed of a stage, those of one path together."""
    settings = job.settings
    count = settings.seeds if stage == "confirm" else settings.search_seeds
    seeds = list(range(settings.seed, settings.seed + count))
    found: Losses = {}
    for path in dict.fromkeys(each.path for each in chosen):
        together = [each for each in chosen if each.path == path]
        names = [key(each) for each in together]
        unit = job.unit(settings.seed, stage=stage, problem=problem, depth=layers, models=names, trained_seeds=seeds)
        done = unit.once(lambda _, them=together: {"losses": train(job, them, seeds, stage, problem, layers)})
        found |= dict(zip(names, done["losses"], strict=True))
        advance(len(names) * len(seeds))
    return {key(each): found[key(each)] for each in chosen}


def train(
    job: Job[ModificationsSettings],
    chosen: Sequence[Modification],
    seeds: Sequence[int],
    stage: str,
    problem: str,
    layers: int,
) -> list[list[float | None]]:
    """Train modifications of one path on all seeds at once, and measure each on its seed's held-out problems."""
    settings, device = job.settings, job.device
    rows = Rows.fresh(chosen, seeds, stage, layers, settings.dims + 1, settings.heads, device)
    models = nn.ParameterList(rows.weights.values())
    generators = [named_generator(seed, f"{stage} problems", device) for seed in seeds]
    # A layer's step costs the same at any depth, and deeper models need fewer.
    for _ in training_steps(models, Schedule(-(-settings.steps // layers), settings.batch_size, settings.lr)):
        drawn = [draw(settings, problem, generator, settings.batch_size) for generator in generators]
        losses(rows, drawn, problem, len(chosen)).sum().backward()
        clip_each(models.parameters(), CLIP)
    others = [named_generator(seed, f"{stage} test", device) for seed in seeds]
    held_out = [draw(settings, problem, generator, settings.test_tasks) for generator in others]
    with torch.no_grad():
        parts = [losses(rows, part, problem, len(chosen)) for part in _chunks(held_out, 128)]
    measured = torch.stack(parts).double().mean(0).unflatten(0, (len(chosen), len(seeds)))
    return [[plain(value) for value in row] for row in measured.tolist()]


def draw(settings: ModificationsSettings, problem: str, generator: torch.Generator, count: int) -> Tasks:
    """Linear problems y = wᵀx; for classification the sign of it."""
    found = LinearTasks(settings.dims, settings.demos, settings.input_range).draw(generator, count)
    if problem == "regression":
        return found
    return Tasks(found.x, found.y.sign(), found.x_query, found.y_query.sign())


def losses(rows: Rows, drawn: Sequence[Tasks], problem: str, copies: int) -> Float[Tensor, " row"]:
    """½ (ŷ − y)² or, for classification, log(1 + exp(−y ŷ)): the mean over each row's problems."""
    tokens = torch.stack([torch.cat([tasks.context, tasks.query], 1) for tasks in drawn])
    target = torch.stack([tasks.y_query for tasks in drawn]).repeat(copies, 1)
    predicted = rows.predict(tokens.repeat(copies, 1, 1, 1))
    if problem == "regression":
        return 0.5 * (predicted - target).square().mean(1)
    return nn.functional.softplus(-target * predicted).mean(1)


def _chunks(held_out: Sequence[Tasks], size: int) -> list[tuple[Tasks, ...]]:
    """All seeds' problems, `size` at a time; what is left over would count more than its share, so it is dropped."""
    parts = list(zip(*(tasks.chunks(size) for tasks in held_out), strict=True))
    return [part for part in parts if len(part[0]) == len(parts[0][0])]


# -------------------------------------------------------------------------------------------------------- comparison


def compare(confirmed: Mapping[str, Losses]) -> dict[str, dict[str, dict[str, Any]]]:
    """Every confirmed model against softmax attention, by cell and `family/name`."""
    reference = key(SOFTMAX)
    found = {
        cell: {name: compared(values, losses[reference]) for name, values in losses.items() if name != reference}
        for cell, losses in confirmed.items()
    }
    tests = [row for rows in found.values() for row in rows.values()]
    corrected = holm(np.array([math.nan if row["p"] is None else row["p"] for row in tests], dtype=np.float64))
    for row, p in zip(tests, corrected.tolist(), strict=True):
        row["p_holm"] = None if math.isnan(p) else p
        row["survives"] = row["p_holm"] is not None and row["p_holm"] < LEVEL
    return found


def compared(values: Sequence[float | None], reference: Sequence[float | None]) -> dict[str, Any]:
    """Mean, mean paired difference, Student's 95 % interval over trainings, and p; all null where a seed diverged."""
    row: dict[str, Any] = {"mean": None, "reference": None, "difference": None, "ci": None, "p": None}
    row |= {"p_holm": None, "survives": False, "seeds_lower": None}
    if any(value is None for value in (*values, *reference)):
        return row
    own, other = (np.array(each, dtype=np.float64) for each in (values, reference))
    gap = own - other
    row |= {"mean": float(own.mean()), "reference": float(other.mean()), "difference": float(gap.mean())}
    return row | {"seeds_lower": int((gap < 0).sum())} | student_over_draws(gap)
