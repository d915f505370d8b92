"""How much of in-context learning's and fine-tuning's updates lies in the subspace of the task's vectors?

Δh = h − h_zsl of the attention outputs, as SimAOU has them, is split by each of `subspaces`; the cosine of the two
updates is taken inside and outside. Nothing of a subspace comes from a reported query or a reported draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, MinLen

from dualview.comparison.finetuning import fine_tune
from dualview.comparison.prepare import Prepared, prepare
from dualview.lab.harness import Findings, Job, lab
from dualview.lab.settings import ComparisonSettings
from dualview.lab.task_vectors.report import figures, summarise, tables
from dualview.lab.task_vectors.subspaces import KINDS, ZERO_SHOT, Bases, estimate, inside_and_outside, random_bases
from dualview.lab.units import TrainingState
from dualview.metrics.cosine import defined_mean
from dualview.metrics.sim_aou import sim_aou
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import ask
from dualview.options import AtLeastOne, option
from dualview.tasks.task import load_task

RANDOM = 5
"""Random subspaces over which that floor is averaged."""


@dataclass(frozen=True, kw_only=True)
class TaskVectorsSettings(ComparisonSettings):
    """Options of `dualview lab task-vectors`."""

    model: str = option("embedded", "embedded, a hub id, a folder, or a .gguf file")
    tasks: Annotated[tuple[str, ...], MinLen(2)] = option(
        ("movie", "source"), "two or more tasks of the library, or tasks' YAML files; each is another's floor"
    )
    draws: AtLeastOne = option(5, "reported draws of demonstrations, from --seed on")
    rank: Annotated[int, Ge(1)] = option(5, "dimension: other draws for task vectors, heads for function vectors")
    rows: Annotated[int, Ge(2)] = option(16, "selection rows on which the subspaces are estimated")

    COUNT = "draws"
    ACROSS = ("seed", "draws")

    def __post_init__(self) -> None:
        if self.rank > self.rows:
            raise ValueError(f"option --rank: {self.rank} needs as many selection rows; --rows is {self.rows}")

    @property
    def other_draws(self) -> list[int]:
        """The draws on which the subspaces are estimated."""
        first = self.seed + self.draws
        return list(range(first, first + self.rank))


@lab(TaskVectorsSettings, tables, figures)
def task_vectors(job: Job[TaskVectorsSettings]) -> Findings:
    """Measure how much of the updates of in-context learning and fine-tuning lies in the task-vector subspace.

    And in that of function vectors; with the updates' similarity inside and outside, and random, zero-shot and another
    task's subspaces of equal dimension as floors.
    """
    settings = job.settings
    for task in settings.tasks:
        load_task(task, settings.data)  # before the model loads: mistakes show at once
    lm = job.load_model(settings.model)
    known: dict[str, Mapping[str, Bases]] = {}
    with job.progress.part("estimating subspaces", len(settings.tasks)) as advance:
        for task in settings.tasks:
            known[task] = _estimated(job, lm, task)
            advance(1)
    job.clock.lap("subspaces")
    found = {task: _draws(job, lm, task, known) for task in settings.tasks}
    job.clock.lap("updates")
    return Findings({"tasks": found, **summarise(found)})


def _draws(
    job: Job[TaskVectorsSettings], lm: LanguageModel, task: str, known: Mapping[str, Mapping[str, Bases]]
) -> list[dict[str, Any]]:
    """The updates of every reported draw."""
    return job.each(
        f"splitting updates on {task}",
        job.settings.all_seeds,
        lambda seed: _split(job, lm, task, seed, known),
        lambda seed: {"seed": seed, "other_draws": job.settings.other_draws, "task": task},
    )


def _prepared(job: Job[TaskVectorsSettings], lm: LanguageModel, task: str, seed: int) -> Prepared:
    return prepare(job.settings.run_options(lm, task, seed), lm)


def _estimated(job: Job[TaskVectorsSettings], lm: LanguageModel, task: str) -> Mapping[str, Bases]:
    """A task's subspaces: from before, or estimated now."""
    settings = job.settings
    unit = job.unit(settings.other_draws[0], other_draws=settings.other_draws, subspaces=task)
    state = unit.load()
    if state is None:
        several = [_prepared(job, lm, task, seed) for seed in settings.other_draws]
        made = estimate(several, settings.rank, settings.rows)
        state = TrainingState({name: torch.from_numpy(each).contiguous() for name, each in made.items()}, {})
        unit.save(lambda: state, now=True)
    return {name: each.numpy() for name, each in state.tensors.items()}


def _split(
    job: Job[TaskVectorsSettings], lm: LanguageModel, task: str, seed: int, known: Mapping[str, Mapping[str, Bases]]
) -> dict[str, Any]:
    """One draw's updates in every subspace, by query and third of the layers, and by layer."""
    prepared = _prepared(job, lm, task, seed)
    tuned, queries = fine_tune(prepared, job.progress).tuned, prepared.prompts.queries
    passes = {
        "zsl": ask(lm, queries, prepared.zero_shot).settings[0],
        "icl": ask(lm, queries, prepared.in_context).settings[0],
        "ft": ask(lm, queries, prepared.zero_shot, tuned.patch).settings[0],
    }
    h = {name: np.asarray(each.h, dtype=np.float64) for name, each in passes.items()}
    icl, ft = h["icl"] - h["zsl"], h["ft"] - h["zsl"]
    _, layers, width = icl.shape
    others = [name for name in known if name != task]
    found: dict[str, Any] = {"whole": {"whole": _reduced(sim_aou(h["zsl"], h["icl"], h["ft"]))}}
    for kind in KINDS:
        rank = known[task][kind].shape[2]
        every = {
            "own": [known[task][kind]],
            "another task's": [known[other][kind] for other in others],
            ZERO_SHOT: [known[task][ZERO_SHOT][:, :, :rank]],
            "random": [random_bases(layers, width, rank, f"random {n}") for n in range(RANDOM)],
        }
        for name, several in every.items():
            split = [inside_and_outside(icl, ft, bases) for bases in several]
            found[f"{kind}/{name}"] = {
                key: _reduced(np.mean([each[key] for each in split], axis=0)) for key in split[0]
            }
    right = {name: [int(x) for x in s.log_probs.argmax(1) == [q.gold for q in queries]] for name, s in passes.items()}
    return {"seed": seed, "lr": tuned.lr, "status": tuned.status, "right": right, "split": found}


def _reduced(values: np.ndarray) -> dict[str, Any]:
    """Means over thirds of the layers for each query, and over queries for each layer; undefined is null."""

    def plain(array: np.ndarray) -> list[Any]:
        return [None if np.isnan(x) else round(float(x), 6) for x in array]

    thirds = np.array_split(values, 3, axis=1)  # a model of one or two layers leaves some of them empty
    return {"queries": [plain(defined_mean(third, 1)) for third in thirds], "layers": plain(defined_mean(values, 0))}
