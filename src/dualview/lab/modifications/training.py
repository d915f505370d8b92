"""Training every modification on every seed: one unit each, the same data and the same start for all of a seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dualview.io.progress import Advance
from dualview.lab.harness import Findings, Job
from dualview.lab.modifications.model import Attention, AttentionKind, kinds
from dualview.lab.modifications.settings import ModificationsSettings
from dualview.lab.modifications.statistics import differences
from dualview.lab.problems import LinearTasks, Tasks, named_generator
from dualview.lab.units import Unit, capture, restore
from dualview.metrics.summary import plain


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
            (0.5 * (model(batch) - batch.y_query).square().mean()).backward()
            optimiser.step()
        curve.append(held_out_loss(model, test))
        advance(1)
        unit.save(lambda at=epoch: capture(model, optimiser, {"order": order}, epoch=at, test_loss=curve))
    return {"test_loss": curve, "parameters": sum(p.numel() for p in model.parameters())}


def held_out_loss(model: nn.Module, test: Tasks) -> float | None:
    """½ (ŷ − y)², averaged."""
    with torch.no_grad():
        return plain(float((model(test) - test.y_query).double().square().mean() / 2))
