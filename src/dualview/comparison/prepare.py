"""The first step of a comparison: task, model, demonstrations and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dualview.comparison.cache import PassCache, no_cache
from dualview.comparison.inputs import encode, read_inputs
from dualview.io.errors import UserError
from dualview.io.progress import Progress, Silent
from dualview.learning.selection import SelectionTrial, best
from dualview.metrics.predictions import accuracy
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.models.scoring import PassPlan, ask
from dualview.models.untrained import redrawn
from dualview.options import SEEDS, SELECTION_ROWS, RunOptions
from dualview.tasks.prompts import PromptSet, Query, encode_queries, resolve_bos
from dualview.tasks.rows import Row
from dualview.tasks.sampling import read_rows, sample_demos, selection_rows
from dualview.tasks.task import Task


@dataclass(frozen=True)
class Prepared:
    """Everything that is fixed before the first reported pass."""

    options: RunOptions
    lm: LanguageModel
    task: Task
    seed: int | None
    demos: Sequence[Row]
    """All requested demonstrations; the prompts hold those that fit."""
    prompts: PromptSet
    seed_trials: list[SelectionTrial] = field(default_factory=list[SelectionTrial])
    cache: PassCache = no_cache

    @property
    def zero_shot(self) -> PassPlan:
        bare = self.prompts.zero_prefix
        return PassPlan(bare, len(bare), at=self.options.at, batch_size=self.options.batch_size)

    @property
    def in_context(self) -> PassPlan:
        special = len(self.prompts.zero_prefix)
        return PassPlan(self.prompts.prefix, special, at=self.options.at, batch_size=self.options.batch_size)


def prepare(
    options: RunOptions,
    lm: LanguageModel | None = None,
    progress: Progress | None = None,
    cache: PassCache = no_cache,
) -> Prepared:
    """Read the task and the model, choose the demonstrations, and make every prompt."""
    progress = progress or Silent()
    inputs = read_inputs(options, cache)  # before the model loads: mistakes show at once
    task, given, asked = inputs.task, inputs.demos, inputs.queries
    lm = lm or load(options, progress)
    if given is not None:
        seed = None if options.demos else int(options.seed)
        return Prepared(options, lm, task, seed, given, encode(options, lm.reader, task, given, asked), cache=cache)
    trials = _seed_trials(options, lm, task, progress, cache)
    seed = SEEDS[best(trials)]
    given = sample_demos(task, seed, options.shots)
    return Prepared(options, lm, task, seed, given, encode(options, lm.reader, task, given, asked), trials, cache)


def load(options: RunOptions, progress: Progress) -> LanguageModel:
    """The model that the options name."""
    with progress.part(f"loading {options.model}", 1) as advance:
        lm = load_model(
            options.model,
            dtype=options.dtype,
            device=options.device,
            trust_remote_code=options.trust_remote_code,
        )
        lm = redrawn(lm, options.weights)
        advance(1)
    return lm


def _seed_trials(
    options: RunOptions, lm: LanguageModel, task: Task, progress: Progress, cache: PassCache
) -> list[SelectionTrial]:
    """ICL accuracy of each seed's demonstrations on the selection rows."""
    rows = _fitting(options, lm, task)
    drawn = {seed: encode(options, lm.reader, task, sample_demos(task, seed, options.shots), rows) for seed in SEEDS}

    def tried() -> list[SelectionTrial]:
        trials: list[SelectionTrial] = []
        with progress.part("choosing the seed", len(SEEDS) * len(rows)) as advance:
            for seed, prompts in drawn.items():
                how = PassPlan(prompts.prefix, len(prompts.zero_prefix), record=False, batch_size=options.batch_size)
                scores = ask(lm, prompts.queries, how, progress=advance).settings[0].log_probs
                gold = np.array([query.gold for query in prompts.queries])
                trials.append(SelectionTrial(seed, accuracy(scores, gold), "ok"))
        return trials

    return cache("seed trials", (tuple(drawn.values()), options.batch_size), tried)


def selection_queries(prepared: Prepared) -> tuple[Query, ...]:
    """The selection rows as queries, without those too long for the context."""
    return encode_queries(prepared.task, prepared.lm.tokenizer, _fitting(prepared.options, prepared.lm, prepared.task))


def _fitting(options: RunOptions, lm: LanguageModel, task: Task) -> list[Row]:
    """The selection rows that fit the context; rows that are shown or may be reported are left out."""
    given = [row for path in (options.queries, options.demos) if path is not None for row in read_rows(task, path)]
    # By text, not by row: the same text may be in several splits, and a reported query must not choose the rate.
    known = {task.render(row) for row in (*given, *task.rows("validation"))}
    rows = [row for row in selection_rows(task, SELECTION_ROWS) if task.render(row) not in known]
    limit, special = lm.room(options.max_context), int(resolve_bos(lm.tokenizer, options.bos) is not None)
    queries = encode_queries(task, lm.tokenizer, rows)
    fitting = [r for r, q in zip(rows, queries, strict=True) if limit is None or special + q.longest <= limit]
    if not fitting:
        raise UserError(
            f"Task {task.name} has no selection row that fits the context and is neither asked nor shown; "
            "give --lr and --seed as numbers."
        )
    return fitting
