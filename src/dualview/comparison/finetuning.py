"""The fine-tuning that is reported: at the given learning rate, or at the best of a grid on the selection rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from dualview.anatomy.layers import Projection
from dualview.comparison.cache import recall
from dualview.comparison.prepare import Prepared, selection_queries
from dualview.io.progress import Advance, Progress
from dualview.learning.batch import Watch
from dualview.learning.finetune import batches, train_steps
from dualview.learning.recipe import (
    DISTILLING_RATE,
    Rule,
    Training,
    TrainingRecipe,
    Tuned,
    projections_of,
    step_count,
    steps_of,
)
from dualview.learning.selection import SelectionTrial, best, judge_rates
from dualview.learning.traces import Follower, TrainingTrace
from dualview.learning.turns import Steps, finish
from dualview.tasks.prompts import PromptSet

_TRACE_BYTES = 1 << 30
"""What the traces of the rates that are trained together may take."""


@dataclass(frozen=True)
class FineTuning:
    """The fine-tuned model that is reported, and how its learning rate was chosen."""

    tuned: Tuned
    trials: list[SelectionTrial]
    grid: Sequence[Tuned] = ()
    """Every rate that was tried, where the controls need them."""
    kept: list[TrainingTrace] = field(default_factory=list[TrainingTrace])
    """Its trace, if it was kept. It is large: who reads it takes it out."""

    def spent(self) -> FineTuning:
        """The same without the change, which takes memory that other trainings need; those of the grid stay."""
        return replace(self, tuned=self.tuned.spent())


def fine_tune(prepared: Prepared, progress: Progress, taps: Sequence[Projection] | None = None) -> FineTuning:
    """Train at the given rate, or at every rate of the grid and keep the best on the selection rows.

    taps   also keep the trace, with the outputs of these, where the traces of all rates that are trained together
           have room; without it the training must be repeated to have its trace
    """
    options = prepared.options
    rates = _rates(prepared, options.ft_rule) if options.lr == "auto" else (options.lr,)
    steps = step_count(training_of(prepared, prepared.prompts, 0.0), recipe_of(prepared)) * len(rates)
    what = f"fine-tuning ({len(rates)} learning rates)" if len(rates) > 1 else "fine-tuning"
    if options.lr != "auto" or options.ft_rule == "distilled":
        with progress.part(what, steps) as advance:
            followed = _followed(prepared, rates, options.ft_rule, taps)
            [tuned] = finish(_train_steps(prepared, rates, options.ft_rule, advance, _watch(followed)))
            return FineTuning(tuned, [], kept=_trace(followed, [tuned], 0))
    if options.controls == "full":  # the controls ask for all of them again
        with progress.part(what, steps) as advance:
            grid = finish(train_grid_steps(prepared, options.ft_rule, advance))
        trials = _judged(prepared, grid, progress)
        return FineTuning(grid[best(trials)], trials, grid)
    trials: list[SelectionTrial] = []
    kept: Tuned | None = None
    trace: list[TrainingTrace] = []
    with progress.part(what, steps) as advance:
        for batch in _rate_batches(prepared, options.ft_rule):
            followed = _followed(prepared, batch, options.ft_rule, taps)
            tuned = finish(_train_steps(prepared, batch, options.ft_rule, advance, _watch(followed)))
            trials += _judged(prepared, tuned, progress)
            number = next((i for i, each in enumerate(tuned) if each.lr == trials[best(trials)].value), None)
            if number is not None:
                kept = None  # before the other is copied
                kept, trace = tuned[number].alone(), _trace(followed, tuned, number)
            del tuned, followed  # before the next batch: both together would only take memory
    assert kept is not None
    return FineTuning(kept, trials, kept=trace)


def _judged(prepared: Prepared, tuned: Sequence[Tuned], progress: Progress) -> list[SelectionTrial]:
    selection = selection_queries(prepared)
    with progress.part("choosing the learning rate", len(selection)) as advance:
        return judge_rates(prepared.lm, tuned, selection, prepared.zero_shot, advance)


def train_grid_steps(prepared: Prepared, rule: Rule, advance: Advance | None = None) -> Steps[Sequence[Tuned]]:
    """A rule at every rate of the grid; trained once for runs that differ only in the rule they report."""
    rates, recipe = _rates(prepared, rule), recipe_of(prepared, rule)
    key = (prepared.prompts.prefix, prepared.prompts.training_sequences, rates, recipe, prepared.options.batch_size)
    known = recall(prepared.cache, f"trained by {rule}", key)
    if known is not None:
        return known
    made = yield from _train_steps(prepared, rates, rule, advance)
    return prepared.cache(f"trained by {rule}", key, lambda: made)


def _rates(prepared: Prepared, rule: Rule) -> tuple[float, ...]:
    """The rates to choose from; distillation fits at one."""
    return (DISTILLING_RATE,) if rule == "distilled" else prepared.options.lr_grid


def _followed(
    prepared: Prepared, rates: Sequence[float], rule: Rule, taps: Sequence[Projection] | None
) -> Follower | None:
    """What follows a batch of rates, if their traces have room next to the model.

    Not on a GPU: its memory is scarce, and there repeating a training costs little.
    """
    lm, recipe = prepared.lm, recipe_of(prepared, rule)
    if taps is None or lm.device.type != "cpu" or lm.dtype not in (torch.float32, torch.float64):
        return None
    trainings = [training_of(prepared, prepared.prompts, rate) for rate in rates]
    if _together(prepared, rates) < len(rates) or len(batches(lm, trainings, recipe)) > 1:
        return None
    tokens = sum(len(sequence.ids) for sequence in steps_of(prepared.prompts.training_sequences, recipe))
    numbers = sum(p.d_out for p in projections_of(lm, recipe)) + sum(layer.d_model for layer in lm.anatomy.layers)
    if len(rates) * tokens * numbers * max(4, lm.dtype.itemsize) > _TRACE_BYTES:
        return None
    return Follower(lm, trainings, recipe, range(len(rates)), taps)


def _trace(followed: Follower | None, tuned: Sequence[Tuned], number: int) -> list[TrainingTrace]:
    return [] if followed is None else followed.traces(tuned, [number])


def _together(prepared: Prepared, rates: Sequence[float]) -> int:
    return prepared.options.batch_size or len(rates)


def _watch(followed: Follower | None) -> Watch | None:
    return None if followed is None else followed.watch


def _train_steps(
    prepared: Prepared, rates: Sequence[float], rule: Rule, advance: Advance | None, watch: Watch | None = None
) -> Steps[list[Tuned]]:
    recipe, together = recipe_of(prepared, rule), _together(prepared, rates)
    trainings = [training_of(prepared, prepared.prompts, rate) for rate in rates]
    tuned: list[Tuned] = []
    for start in range(0, len(rates), together):  # rates are rows of a batch, too
        tuned += yield from train_steps(prepared.lm, trainings[start : start + together], recipe, advance, watch)
    return tuned


def _rate_batches(prepared: Prepared, rule: Rule) -> list[list[float]]:
    """The grid's rates in parts that are trained as one batch."""
    recipe, rates = recipe_of(prepared, rule), prepared.options.lr_grid
    if recipe.params == "all":
        return [[rate] for rate in rates]
    trainings = [training_of(prepared, prepared.prompts, rate) for rate in rates]
    return [[training.rate for training in batch] for batch in batches(prepared.lm, trainings, recipe)]


def training_of(prepared: Prepared, prompts: PromptSet, rate: float) -> Training:
    """Fine-tuning on a prompt's demonstrations, or distillation of what they do in context."""
    return Training(prompts.training_sequences, rate, replace(prepared.in_context, prefix=prompts.prefix))


def recipe_of(prepared: Prepared, rule: Rule | None = None) -> TrainingRecipe:
    """The recipe that the options name, or the same with another rule."""
    options = prepared.options
    rule = rule or options.ft_rule
    rows = selection_queries(prepared) if rule == "distilled" else ()
    return TrainingRecipe(options.ft_params, options.ft_loss, options.epochs, rule, options.ft_precision, rows)
