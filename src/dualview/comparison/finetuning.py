"""The fine-tuning that is reported: at the given learning rate, or at the best of a grid on the selection rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dualview.comparison.prepare import Prepared, selection_queries
from dualview.io.progress import Advance, Progress
from dualview.learning.finetune import Training, TrainingRecipe, Tuned, batches, finetune, steps_of
from dualview.learning.selection import SelectionTrial, best, judge_rates
from dualview.learning.training_step import Rule
from dualview.options import RunOptions


@dataclass(frozen=True)
class FineTuning:
    """The fine-tuned model that is reported, and how its learning rate was chosen."""

    tuned: Tuned
    trials: list[SelectionTrial]
    grid: Sequence[Tuned] = ()
    """Every rate that was tried, where the controls need them."""


def fine_tune(prepared: Prepared, progress: Progress) -> FineTuning:
    """Train at the given rate, or at every rate of the grid and keep the best on the selection rows."""
    options, prompts = prepared.options, prepared.prompts
    rates = options.lr_grid if options.lr == "auto" else (options.lr,)
    steps = len(steps_of(prompts.training_sequences, recipe_of(options))) * len(rates)
    what = f"fine-tuning ({len(rates)} learning rates)" if len(rates) > 1 else "fine-tuning"
    if options.lr != "auto":
        with progress.part(what, steps) as advance:
            return FineTuning(_train(prepared, rates, options.ft_rule, advance)[0], [])
    if options.controls == "full":  # the controls ask for all of them again
        with progress.part(what, steps) as advance:
            grid = train_grid(prepared, options.ft_rule, advance)
        trials = _judged(prepared, grid, progress)
        return FineTuning(grid[best(trials)], trials, grid)
    trials: list[SelectionTrial] = []
    kept: dict[float, Tuned] = {}
    with progress.part(what, steps) as advance:
        for batch in _rate_batches(prepared, options.ft_rule):
            tuned = _train(prepared, batch, options.ft_rule, advance)
            trials += _judged(prepared, tuned, progress)
            kept |= {each.lr: each for each in tuned}
            chosen = trials[best(trials)].value
            kept = {chosen: kept[chosen].alone()}  # the others would only take memory
    return FineTuning(next(iter(kept.values())), trials)


def _judged(prepared: Prepared, tuned: Sequence[Tuned], progress: Progress) -> list[SelectionTrial]:
    selection = selection_queries(prepared)
    with progress.part("choosing the learning rate", len(selection)) as advance:
        return judge_rates(prepared.lm, tuned, selection, prepared.zero_shot, advance)


def train_grid(prepared: Prepared, rule: Rule, advance: Advance | None = None) -> Sequence[Tuned]:
    """A rule at every rate of the grid; trained once for runs that differ only in the rule they report."""
    options = prepared.options
    recipe = replace(recipe_of(options), rule=rule)
    key = (prepared.prompts.training_sequences, options.lr_grid, recipe, options.batch_size)
    return prepared.cache(f"trained by {rule}", key, lambda: _train(prepared, options.lr_grid, rule, advance))


def _train(prepared: Prepared, rates: Sequence[float], rule: Rule, advance: Advance | None) -> list[Tuned]:
    recipe, sequences = replace(recipe_of(prepared.options), rule=rule), prepared.prompts.training_sequences
    together = prepared.options.batch_size or len(rates)  # rates are rows of a batch, too
    parts = [rates[start : start + together] for start in range(0, len(rates), together)]
    return [tuned for part in parts for tuned in finetune(prepared.lm, sequences, part, recipe, advance)]


def _rate_batches(prepared: Prepared, rule: Rule) -> list[list[float]]:
    """The grid's rates in parts that are trained as one batch."""
    recipe, sequences = replace(recipe_of(prepared.options), rule=rule), prepared.prompts.training_sequences
    rates = prepared.options.lr_grid
    if recipe.params == "all":
        return [[rate] for rate in rates]
    trainings = [Training(sequences, rate) for rate in rates]
    return [[training.rate for training in batch] for batch in batches(prepared.lm, trainings, recipe)]


def recipe_of(options: RunOptions) -> TrainingRecipe:
    return TrainingRecipe(options.ft_params, options.ft_loss, options.epochs, options.ft_rule, options.ft_precision)
