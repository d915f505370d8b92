"""Which training examples does a trained layer attend to, and does their class predict the answer?

Irie, Csordás & Schmidhuber (2022, arXiv 2202.05798) let the training examples of a layer vote by attention mass. The
lab repeats this on a small classifier (`classifier`) and on the fine-tuned keys and values of a language model
(`on_model`), each against votes that need no training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dualview.comparison.prepare import prepare
from dualview.io.errors import UserError
from dualview.lab.harness import Findings, Job, lab, one_thread
from dualview.lab.settings import Positive, SeveralSeeds
from dualview.lab.votes import classifier, on_model
from dualview.lab.votes.report import figures, summarise, tables
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.options import AtLeastOne, RunOptions, option
from dualview.tasks.task import load_task

DATA = ("gaussian", "sentences")


@dataclass(frozen=True, kw_only=True)
class VotesSettings(SeveralSeeds):
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
    data: Path | None = option(None, "read <task>/{train,validation}.jsonl from this folder")
    shots: AtLeastOne = option(16, "demonstrations, as many as fit")
    n_queries: AtLeastOne = option(30, "queries")
    lr: Positive | Literal["auto"] = option(0.03, "fine-tuning's rate; auto: the best of the grid")
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
    settings, progress = job.settings, job.progress
    for task in settings.tasks:  # before the model loads: mistakes show at once
        if not load_task(task, settings.data).labels:
            raise UserError(f"Task {task} has no fixed classes to vote for; use a task with labels.")
    with progress.part(f"loading {settings.model}", 1) as advance:
        lm = load_model(settings.model, device=settings.device)
        advance(1)
    classifiers = {name: _classified(job, lm, name) for name in settings.classify}
    job.clock.lap("classifiers")
    drawn = {name: _voted(job, lm, name) for name in settings.tasks}
    job.clock.lap("language model")
    facts = {"model": lm.name, "model_commit": lm.commit, "weights_hash": lm.weights_hash}
    results = {"classifiers": classifiers, "tasks": drawn, **summarise(classifiers, drawn)}
    return Findings(results, facts, device=lm.device)


def _classified(job: Job[VotesSettings], lm: LanguageModel, name: str) -> list[dict[str, Any]]:
    """One classifier for each seed."""
    settings = job.settings
    made: list[classifier.Samples] = []  # the sentences' states are computed once, and not where all is resumed

    def samples(seed: int) -> classifier.Samples:
        if name == "gaussian":
            return classifier.gaussian(settings.rows, seed)
        if not made:
            made.append(classifier.sentences(lm, settings.rows))
        return made[0]

    def train(seed: int) -> dict[str, Any]:
        how = {"steps": settings.steps, "batch": settings.batch_size, "rate": settings.rate}
        given = samples(seed)
        with one_thread():  # so that the votes do not depend on the number of cores
            return classifier.measure(given, settings.trained_rows, settings.width, seed, **how)

    found: list[dict[str, Any]] = []
    with job.progress.part(f"classifying {name}", settings.seeds) as advance:
        for seed in settings.all_seeds:
            unit = job.unit(seed, lm.device, classifier=name, weights_hash=lm.weights_hash)
            found.append(unit.once(lambda _unit, seed=seed: train(seed)))
            advance(1)
    return found


def _voted(job: Job[VotesSettings], lm: LanguageModel, task: str) -> list[dict[str, Any]]:
    """One fine-tuning for each draw of demonstrations."""
    settings = job.settings

    def measured(seed: int) -> dict[str, Any]:
        options = RunOptions.make(
            model=lm.name,
            task=task,
            data=settings.data,
            shots=settings.shots,
            n_queries=settings.n_queries,
            seed=seed,
            lr=settings.lr,
            device=str(lm.device),
        )
        return on_model.measure(prepare(options, lm), job.progress)

    found: list[dict[str, Any]] = []
    with job.progress.part(f"voting on {task}", settings.seeds) as advance:
        for seed in settings.all_seeds:
            unit = job.unit(seed, lm.device, task=task, weights_hash=lm.weights_hash)
            found.append(unit.once(lambda _unit, seed=seed: measured(seed)))
            advance(1)
    return found
