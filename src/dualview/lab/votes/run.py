"""Which training examples does a trained layer attend to, and does their class predict the answer?

Irie, Csordás & Schmidhuber (2022, arXiv 2202.05798) let the training examples of a layer vote by attention mass. The
lab repeats this on a small classifier (`classifier`) and on the fine-tuned keys and values of a language model
(`on_model`), each against votes that need no training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from dualview.comparison.prepare import prepare
from dualview.io.errors import UserError
from dualview.lab.harness import Findings, Job, lab, one_thread
from dualview.lab.settings import ComparisonSettings, Positive, SeveralSeeds
from dualview.lab.votes import classifier, on_model
from dualview.lab.votes.report import figures, summarise, tables
from dualview.models.language_model import LanguageModel
from dualview.options import AtLeastOne, option
from dualview.tasks.task import load_task

DATA = ("gaussian", "sentences")


@dataclass(frozen=True, kw_only=True)
class VotesSettings(ComparisonSettings, SeveralSeeds):
    """Options of `dualview lab votes`."""

    classify: tuple[str, ...] = option(DATA, "what the classifiers learn: gaussian classes, sentences' states")
    rows: AtLeastOne = option(700, "examples of each")
    trained_rows: AtLeastOne = option(400, "those of them to train on; the others are tested")
    width: AtLeastOne = option(100, "units of the two hidden layers")
    steps: AtLeastOne = option(800, "of SGD")
    batch_size: AtLeastOne = option(32, "examples a step")
    rate: Positive = option(0.05, "the classifier's learning rate")
    model: str = option("embedded", "embedded, a hub id, a folder, or a .gguf file")
    tasks: tuple[str, ...] = option(("movie", "source"), "tasks of the library, or tasks' YAML files")
    seeds: AtLeastOne = option(5, "classifiers, and draws of demonstrations, from --seed on")

    ACROSS = ("seed", "seeds", "classify", "tasks")

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.classify) - set(DATA)):
            raise ValueError(f"option --classify: there is no {unknown[0]!r}; there are {', '.join(DATA)}")
        if self.trained_rows >= self.rows:
            raise ValueError(f"of {self.rows} rows {self.trained_rows} are trained on, and none is left to test")


@lab(VotesSettings, tables, figures)
def votes(job: Job[VotesSettings]) -> Findings:
    """Let training examples vote by how strongly a trained layer attends to them: does their class predict the answer?

    On a small classifier, layer by layer, and on a language model fine-tuned on demonstrations; with votes by untrained
    layers, by class frequency and by shuffled classes as controls.
    """
    settings = job.settings
    for task in settings.tasks:  # before the model loads: mistakes show at once
        if not load_task(task, settings.data).labels:
            raise UserError(f"Task {task} has no fixed classes to vote for; use a task with labels.")
    lm = job.load_model(settings.model)
    classifiers = {name: _classified(job, lm, name) for name in settings.classify}
    job.clock.lap("classifiers")
    drawn = {name: _voted(job, lm, name) for name in settings.tasks}
    job.clock.lap("language model")
    return Findings({"classifiers": classifiers, "tasks": drawn, **summarise(classifiers, drawn)})


def _classified(job: Job[VotesSettings], lm: LanguageModel, name: str) -> list[dict[str, Any]]:
    """One classifier for each seed."""
    settings = job.settings

    @cache
    def sentences() -> classifier.Samples:  # their states are computed once, and not where all is resumed
        return classifier.sentences(lm, settings.rows)

    def train(seed: int) -> dict[str, Any]:
        how = {"steps": settings.steps, "batch": settings.batch_size, "rate": settings.rate}
        given = classifier.gaussian(settings.rows, seed) if name == "gaussian" else sentences()
        with one_thread():  # so that the votes do not depend on the number of cores
            return classifier.measure(given, settings.trained_rows, settings.width, seed, **how)

    return job.each(f"classifying {name}", settings.all_seeds, train, lambda seed: {"seed": seed, "classifier": name})


def _voted(job: Job[VotesSettings], lm: LanguageModel, task: str) -> list[dict[str, Any]]:
    """One fine-tuning for each draw of demonstrations."""

    def measured(seed: int) -> dict[str, Any]:
        return on_model.measure(prepare(job.settings.run_options(lm, task, seed), lm), job.progress)

    return job.each(f"voting on {task}", job.settings.all_seeds, measured, lambda seed: {"seed": seed, "task": task})
