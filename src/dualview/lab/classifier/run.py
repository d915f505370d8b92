"""`dualview lab classifier`: is what training finds one gradient step?

The exact model's in-context learning is one gradient step because its weights were set so. Here the same architecture
learns to classify in context, with linear and with softmax attention. Each trained model is saved as a language model
with its task, then `dualview run` compares its in-context learning with fine-tuning as for any other. Rivals: the exact
model on the same task, and the untrained weights.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, MinLen

from dualview.comparison.run import run
from dualview.io.progress import Advance
from dualview.lab.classifier.report import figures, tables
from dualview.lab.classifier.rules import measure
from dualview.lab.classifier.training import (
    ATTENTIONS,
    WARM_UP,
    AttentionName,
    ProblemShape,
    fresh_model,
    predict,
    train,
)
from dualview.lab.harness import Findings, Job, lab
from dualview.lab.problems import named_generator
from dualview.lab.settings import Positive, SeveralSeeds
from dualview.lab.training import Schedule
from dualview.models.exact import RATE, MadeUp, exact
from dualview.models.loading import load_model
from dualview.options import AtLeastOne, RunOptions, option

ARMS = ("exact", "linear", "softmax", "untrained linear", "untrained softmax")
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Fine-tuning's rates to choose from; wider than for other models, since nothing bounds the scale of these weights."""
_TEST = 512
"""Fresh problems on which rules and models are compared; as many others choose a rule's parameter."""


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings(SeveralSeeds):
    """Options of `dualview lab classifier`."""

    only: Annotated[tuple[str, ...], MinLen(1)] = option(ARMS, "models to compare")
    features: AtLeastOne = option(5, "numbers that describe a word")
    classes: Annotated[int, Ge(2)] = option(4, "labels of the task")
    spread: Positive = option(0.7, "how far words are from the centre of their class")
    train_steps: AtLeastOne = option(1500, "training steps of each model")
    train_batch: AtLeastOne = option(32, "problems a step")
    train_lr: Positive = option(0.01, "of Adam; it falls to 0 along a cosine")
    shots: AtLeastOne = option(16, "demonstrations: in the prompt, and at the end of a training problem")
    n_queries: AtLeastOne = option(100, "queries of the comparison")
    seeds: Annotated[int, Ge(2)] = option(5, "trainings, each with its own task, from --seed on")

    ACROSS = ("seed", "seeds", "only")

    @property
    def shape(self) -> ProblemShape:
        return ProblemShape(self.features, self.classes, self.spread, self.shots + 1)

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.only) - set(ARMS)):
            raise ValueError(f"option --only: there is no model {unknown[0]!r}; there are {', '.join(ARMS)}")
        if self.features < self.classes:
            raise ValueError(f"{self.classes} classes need at least as many features, not {self.features}")


@lab(ClassifierSettings, tables, figures, single_thread=True)
def classifier(job: Job[ClassifierSettings]) -> Findings:
    """Train a small language model to classify in context, and compare what it found with one gradient step.

    Its answers against one step, class means and ridge regression; its in-context learning against its fine-tuning, by
    `dualview run`. With --out the models stay there, each with its task, for `dualview run --model`.
    """
    settings = job.settings
    place = job.out or Path(job.until_written.enter_context(tempfile.TemporaryDirectory()))
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in settings.only}
    steps = {arm: settings.train_steps if arm in ATTENTIONS else 0 for arm in settings.only}
    with job.progress.part("training and comparing", settings.seeds * sum(n + 1 for n in steps.values())) as advance:
        for seed in settings.all_seeds:
            for arm in settings.only:
                unit = job.unit(seed, arm=arm)
                if (done := unit.finished()) is not None:
                    advance(steps[arm])
                found[arm].append(done or unit.finish(_one(settings, arm, seed, place, advance)))
                advance(1)
    job.clock.lap("training and comparing")
    return Findings({"arms": found})


def folder_of(place: Path, arm: str, seed: int) -> Path:
    """Where a model is saved: `exact-1`, `linear-1`, `untrained-linear-1`."""
    return place / f"{arm.replace(' ', '-')}-{seed}"


def _one(settings: ClassifierSettings, arm: str, seed: int, place: Path, advance: Advance) -> dict[str, Any]:
    """Write the model, measure it against the rules, and compare its in-context learning with its fine-tuning."""
    folder = folder_of(place, arm, seed)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    task = write(folder, settings, arm, seed, advance)
    lm = load_model(str(folder), device=settings.device)
    problems = settings.shape.draw(named_generator(seed, "test problems"), 2 * _TEST)
    with torch.no_grad():
        model: Any = lm.model
        answers = predict(model.cpu(), problems, settings.classes)[:, -1]
        model.to(lm.device)
    options = RunOptions.make(
        model=lm.name,
        task=str(task),
        shots=settings.shots,
        n_queries=settings.n_queries,
        ft_loss="label",
        lr=RATE if arm == "exact" else "auto",
        lr_grid=RATES,
        seed=seed,
        device=str(lm.device),
    )
    return measure(answers, problems, settings.classes, _TEST) | _numbers(run(options, lm=lm))


def write(folder: Path, settings: ClassifierSettings, arm: str, seed: int, advance: Advance) -> Path:
    """One model and its task; returns the task's file."""
    given: Any = {"features": settings.features, "classes": settings.classes, "spread": settings.spread, "seed": seed}
    if arm == "exact":
        return exact(folder, **given).task
    made = MadeUp.draw(**given)
    attention: AttentionName = "linear" if arm.endswith("linear") else "softmax"
    model = fresh_model(made, attention, seed)
    if arm == attention:
        schedule = Schedule(settings.train_steps, settings.train_batch, settings.train_lr, warm_up=WARM_UP)
        train(model, settings.shape, schedule, seed, advance)
    return made.save(folder, model, "classifier")


def _numbers(result: Any) -> dict[str, Any]:
    """What of a comparison the tables show."""
    verdict, floors = result.verdict, result.controls["sim_aou"].floors
    return {
        "accuracy": {name: getattr(result.accuracy, name) for name in ("zsl", "icl", "ft")},
        "sim_aou": result.sim_aou.raw,
        "sim_aou floor": max((floor for floor in floors.values() if floor is not None), default=None),
        "agreement": result.agreement.value,
        "label contrast": result.label_contrast.value,
        "lr": result.ft.lr,
        "verdict": verdict.overall,
        "levels": {name: level.outcome for name, level in verdict.levels.items()},
    }
