"""The fine-tuning that is reported: at the given learning rate, or at the best of a grid on the selection rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dualview.comparison.prepare import Prepared, selection_queries
from dualview.io.progress import Advance, Progress
from dualview.learning.finetune import Rule, TrainingRecipe, Tuned, finetune, steps_of
from dualview.learning.selection import SelectionTrial, best, judge_rates
from dualview.options import RunOptions


@dataclass(frozen=True)
class FineTuning:
    """The fine-tuned model that is reported, and how its learning rate was come by."""

    tuned: Tuned
    trials: list[SelectionTrial]
    grid: Sequence[Tuned] = ()
    """Every rate that was tried."""


def fine_tune(prepared: Prepared, progress: Progress) -> FineTuning:
    """Train at the given rate, or at every rate of the grid and keep the best on the selection rows."""
    options, lm, prompts = prepared.options, prepared.lm, prepared.prompts
    rates = options.lr_grid if options.lr == "auto" else (options.lr,)
    steps = len(steps_of(prompts.training_sequences, recipe_of(options))) * len(rates)
    what = f"fine-tuning ({len(rates)} learning rates)" if len(rates) > 1 else "fine-tuning"
    with progress.part(what, steps) as advance:
        if options.lr != "auto":
            return FineTuning(_train(prepared, [options.lr], options.ft_rule, advance)[0], [])
        tuned = train_grid(prepared, options.ft_rule, advance)
    selection = selection_queries(prepared)
    with progress.part("choosing the learning rate", len(selection)) as advance:
        trials = judge_rates(lm, tuned, selection, prepared.zero_shot, advance)
    return FineTuning(tuned[best(trials)], trials, tuned)


def train_grid(prepared: Prepared, rule: Rule, advance: Advance | None = None) -> Sequence[Tuned]:
    """A rule at every rate of the grid; trained once for runs that differ in the rule they report."""
    options = prepared.options

    def train() -> Sequence[Tuned]:
        return _train(prepared, options.lr_grid, rule, advance)

    if options.controls != "full":  # no other run asks for it
        return train()
    recipe = replace(recipe_of(options), rule=rule)
    key = (prepared.prompts.training_sequences, options.lr_grid, recipe, options.batch_size)
    return prepared.cache(f"trained by {rule}", key, train)


def _train(prepared: Prepared, rates: Sequence[float], rule: Rule, advance: Advance | None) -> list[Tuned]:
    recipe, sequences = replace(recipe_of(prepared.options), rule=rule), prepared.prompts.training_sequences
    together = prepared.options.batch_size or len(rates)  # rates are rows of a batch, too
    batches = [rates[start : start + together] for start in range(0, len(rates), together)]
    return [tuned for batch in batches for tuned in finetune(prepared.lm, sequences, batch, recipe, advance)]


def recipe_of(options: RunOptions) -> TrainingRecipe:
    return TrainingRecipe(options.ft_params, options.ft_loss, options.epochs, options.ft_rule)
