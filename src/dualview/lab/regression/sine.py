"""The regression lab on sine waves: an MLP before the attention computes the features that descent fits.

Von Oswald et al. 2023 (arXiv 2212.07677, Prop. 2 and Fig. 4): embedding 2 → 40, a residual MLP 40 → 160 → 40 with GELU,
one (or more) attention layers of width 40. The meta-learner it should match is trained on the same problems:
an MLP φ of the same size, a head W_0 and a rate η, all learnt, and one step of gradient descent on the head,

    ŷ = (W_0 − η/N Σ_i (W_0 φ(x_i) − y_i) φ(x_i)ᵀ) φ(x_q).

The two are not nested: the transformer's MLP sees y_i too, and its attention need not be that step.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.lab.harness import Findings, Job
from dualview.lab.problems import SineTasks, Tasks, named_generator
from dualview.lab.regression.linear import CURVE_TASKS, by_seed, zero_loss
from dualview.lab.regression.measure import losses, mean_loss, paired
from dualview.lab.regression.models import InContext, Predictor
from dualview.lab.regression.settings import RegressionSettings
from dualview.lab.regression.training import train
from dualview.lab.training import Schedule
from dualview.lab.units import Unit

WIDTH, HIDDEN = 40, 160
GRID = 50
"""Inputs at which two predicted functions are compared."""
GRID_TASKS = 2_000


class Features(nn.Module):
    """h + W₂ GELU(W₁ h), h a linear embedding; with biases."""

    def __init__(self, d_in: int, generator: torch.Generator) -> None:
        super().__init__()
        self.embed = _linear(d_in, WIDTH, generator)
        self.widen, self.narrow = _linear(WIDTH, HIDDEN, generator), _linear(HIDDEN, WIDTH, generator)

    def forward(self, tokens: Float[Tensor, "*token d_in"]) -> Float[Tensor, "*token width"]:
        embedded = self.embed(tokens)
        return embedded + self.narrow(nn.functional.gelu(self.widen(embedded)))


class Transformer(nn.Module):
    """Features of (x, y), then attention; the query's y is 0, and the prediction is minus its last coordinate."""

    def __init__(self, settings: RegressionSettings, generator: torch.Generator) -> None:
        super().__init__()
        self.features = Features(2, generator)
        self.attention = InContext.fresh(WIDTH, settings, generator)

    def forward(self, tasks: Tasks) -> Float[Tensor, " task"]:
        return self.attention.transform(self.features(tasks.context), self.features(tasks.query))


class MetaLearner(nn.Module):
    """A learnt start and learnt features; one step of gradient descent on the head, at a learnt rate."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.features = Features(1, generator)
        self.head = nn.Parameter(torch.zeros(WIDTH, device=generator.device))
        self.rate = nn.Parameter(torch.full((), 0.1, device=generator.device))

    def forward(self, tasks: Tasks) -> Float[Tensor, " task"]:
        seen = self.features(tasks.x)
        errors = seen @ self.head - tasks.y
        gradient = (errors[..., None] * seen).mean(1)
        return ((self.head - self.rate * gradient) * self.features(tasks.x_query)).sum(-1)


def _linear(d_in: int, d_out: int, generator: torch.Generator) -> nn.Linear:
    made = nn.Linear(d_in, d_out, device=generator.device)
    with torch.no_grad():
        made.weight.normal_(std=d_in**-0.5, generator=generator)
        made.bias.zero_()
    return made


def run(job: Job[RegressionSettings]) -> Findings:
    """Everything the lab reports on sine waves: both models are trained on the same problems and compared."""
    settings, device = job.settings, job.device
    base = SineTasks(settings.demos, noise=settings.noise)
    tasks = base.draw(named_generator(0, "evaluation/sine", device), settings.eval_tasks)
    few = tasks.first(CURVE_TASKS)
    steps, batch = settings.steps or 20_000, settings.batch_size or 512
    schedule = Schedule(steps, batch, settings.lr or 1e-3, settings.clip or 100.0)

    def one_seed(seed: int, unit: Unit) -> dict[str, Any]:
        transformer = Transformer(settings, named_generator(seed, "weights/sine", device))
        meta = MetaLearner(named_generator(seed, "weights/meta", device))
        both = nn.ModuleDict({"transformer": transformer, "meta": meta})

        def loss(batch: Tasks) -> Float[Tensor, ""]:
            return batch.loss(transformer(batch)) + batch.loss(meta(batch))

        def measure() -> dict[str, float]:
            return {"loss": mean_loss(transformer, few), "meta_loss": mean_loss(meta, few)}

        with job.progress.part(f"training, seed {seed}", schedule.steps) as advance:
            generator = named_generator(seed, "training/sine", device)
            curve = train(both, loss, measure, base, schedule, unit, generator, advance)
        own, other = losses(transformer, tasks), losses(meta, tasks)
        near = function_similarity(transformer, meta, tasks.first(GRID_TASKS), base.half_width)
        return {
            "loss": float(own.mean()),
            "meta": {"reference_loss": float(other.mean()), "rate": meta.rate.item(), **paired(own, other), **near},
            "curve": curve,
        }

    results = by_seed(job, schedule, one_seed, tasks, {"zero": zero_loss(tasks)})
    job.clock.lap("training")
    return Findings(results)


def function_similarity(one: Predictor, other: Predictor, tasks: Tasks, half_width: float) -> dict[str, float]:
    """Mean |ŷ − ŷ'| and cosine of the two predicted functions on a grid of inputs, averaged over problems.

    The slope over one input has no direction, so the functions themselves are compared.
    """
    values: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for at in torch.linspace(-half_width, half_width, GRID).tolist():
            asked = tasks.with_query(torch.full_like(tasks.x_query, at))
            for kept, predict in zip(values, (one, other), strict=True):
                kept.append(predict(asked).double())
    a, b = (torch.stack(kept, -1) for kept in values)
    return {
        "prediction_difference": float((a - b).abs().mean()),
        "function_cosine": float(torch.cosine_similarity(a, b, dim=-1).mean()),
    }
