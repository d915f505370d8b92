"""Training every modification on every seed, and which differences from softmax attention survive the seeds.

One unit for each training; the same data and the same start for all of a seed. Two outcomes of each: the test loss
after the last epoch, and its mean over all epochs (how fast it fell). Each model's is compared with softmax attention's
seed by seed, by Student's paired t-test, two-sided; Holm's correction runs over all comparisons of both outcomes. A
difference survives if its corrected p is below .05.

With five seeds the t-test assumes nearly normal differences; `seeds_lower` counts signs and assumes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dualview.io.progress import Advance
from dualview.lab.harness import Findings, Job
from dualview.lab.modifications.model import Attention, AttentionKind, kinds
from dualview.lab.modifications.settings import ModificationsSettings
from dualview.lab.problems import LinearTasks, Tasks, named_generator
from dualview.lab.summaries import student_over_draws
from dualview.lab.units import Unit, capture, restore
from dualview.metrics.statistics import holm
from dualview.metrics.summary import plain

LEVEL = 0.05
OUTCOMES = {"last": "test loss after the last epoch", "mean": "test loss, mean over epochs"}
Curves = Mapping[str, Mapping[str, Sequence[float | None]]]
"""Test losses by model and seed: before training, then after each epoch."""


def run(job: Job[ModificationsSettings]) -> Findings:
    """Train all, and test which differences survive the seeds."""
    settings = job.settings
    base = LinearTasks(settings.dims, settings.demos, settings.input_range)
    wanted = wanted_kinds(settings, settings.seed)
    curves: dict[str, dict[str, list[float | None]]] = {}
    parameters: dict[str, int] = {}
    total = len(wanted) * settings.seeds * settings.epochs
    with job.progress.part(f"training {len(wanted)} models, {settings.seeds} seeds", total) as advance:
        for seed in settings.all_seeds:
            for kind in wanted_kinds(settings, seed):
                unit = job.unit(seed, kind=kind.name)
                done = unit.finished()
                if done is None:
                    done = unit.finish(one_training(settings, base, kind, seed, job.device, unit, advance))
                else:
                    advance(settings.epochs)
                curves.setdefault(kind.name, {})[str(seed)] = done["test_loss"]
                parameters[kind.name] = done["parameters"]
    job.clock.lap("training")
    results = {
        "steps_per_epoch": -(-settings.train_tasks // settings.batch_size),
        "models": [
            {
                "name": kind.name,
                "family": kind.family,
                "parameters": parameters[kind.name],
                "variant": None if kind.variant is None else kind.variant.to_dict(),
            }
            for kind in wanted
        ],
        "test_loss": curves,
        "differences": differences(curves, "softmax"),
    }
    return Findings(results)


def wanted_kinds(settings: ModificationsSettings, seed: int) -> list[AttentionKind]:
    """Softmax attention and the families asked for."""
    every = kinds(settings.alphas, settings.ks, settings.betas, settings.rank, seed)
    return [kind for kind in every if kind.family in ("softmax", *settings.only)]


def one_training(
    settings: ModificationsSettings,
    base: LinearTasks,
    kind: AttentionKind,
    seed: int,
    device: torch.device,
    unit: Unit,
    advance: Advance,
) -> dict[str, Any]:
    """One model on one seed: its test loss before training and after each epoch (null once it is not finite)."""
    model = Attention(base.n_x + 1, settings.heads, kind.variant, named_generator(seed, "weights", device))
    training = base.draw(named_generator(seed, "training set", device), settings.train_tasks)
    test = base.draw(named_generator(seed, "test set", device), settings.test_tasks)
    order = named_generator(seed, "order", device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    curve, done = [held_out_loss(model, test)], 0
    if (state := unit.load()) is not None:
        info = restore(state, model, optimiser, {"order": order})
        curve, done = info["test_loss"], info["epoch"]
    advance(done)
    for epoch in range(done + 1, settings.epochs + 1):
        shuffled = torch.randperm(len(training), generator=order, device=device)
        for batch in training.pick(shuffled).chunks(settings.batch_size):
            optimiser.zero_grad()
            batch.loss(model(batch)).backward()
            optimiser.step()
        curve.append(held_out_loss(model, test))
        advance(1)
        unit.save(lambda at=epoch: capture(model, optimiser, {"order": order}, epoch=at, test_loss=curve))
    return {"test_loss": curve, "parameters": sum(p.numel() for p in model.parameters())}


def held_out_loss(model: nn.Module, test: Tasks) -> float | None:
    """½ (ŷ − y)², averaged."""
    with torch.no_grad():
        return plain(float((model(test) - test.y_query).double().square().mean() / 2))


# -------------------------------------------------------------------------------------------------------- comparison


def differences(curves: Curves, reference: str) -> dict[str, Any]:
    """Every model against the reference, by outcome and model."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in OUTCOMES:
        values = {name: [outcome_of(outcome, curve) for curve in seeds.values()] for name, seeds in curves.items()}
        found[outcome] = {name: compared(values[name], values[reference]) for name in values}
    tests = [row for rows in found.values() for name, row in rows.items() if name != reference]
    corrected = holm(np.array([math.nan if row["p"] is None else row["p"] for row in tests], dtype=np.float64))
    for row, p in zip(tests, corrected.tolist(), strict=True):
        row["p_holm"] = None if math.isnan(p) else p
        row["survives"] = row["p_holm"] is not None and row["p_holm"] < LEVEL
    return found


def outcome_of(outcome: str, curve: Sequence[float | None]) -> float | None:
    """One training's number; None if it diverged."""
    after = [value for value in curve[1:] if value is not None]
    if len(after) < len(curve) - 1:
        return None
    return after[-1] if outcome == "last" else sum(after) / len(after)


def compared(values: Sequence[float | None], reference: Sequence[float | None]) -> dict[str, Any]:
    """Mean, mean paired difference, Student's 95 % interval over trainings, and p; all null where a seed diverged."""
    row: dict[str, Any] = {"values": list(values), "mean": None, "difference": None, "ci": None, "p": None}
    row |= {"p_holm": None, "survives": False, "seeds_lower": None}
    if any(value is None for value in (*values, *reference)):
        return row
    own = np.array(values, dtype=np.float64)
    gap = own - np.array(reference, dtype=np.float64)
    row |= {"mean": float(own.mean()), "difference": float(gap.mean()), "seeds_lower": int((gap < 0).sum())}
    return row | student_over_draws(gap)
