"""The cost of a run before it starts: token counts, the demonstrations that fit, and a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from rich.table import Table

from dualview.comparison.finetuning import recipe_of, training_of
from dualview.comparison.prepare import Prepared, prepare
from dualview.io.progress import Progress
from dualview.learning.recipe import DISTILLING_ROWS, step_count, steps_of
from dualview.models.language_model import LanguageModel
from dualview.models.packing.rows import grow
from dualview.models.scoring import ask
from dualview.options import SELECTION_ROWS, RunOptions

WITH_CONTROLS = {"none": 1.0, "quick": 1.6, "full": 10.0}
"""How many times as long a run takes with its controls, about (measured on the embedded model)."""


@dataclass(frozen=True)
class Estimate:
    """Tokens through the model, by part, and the seconds they would take at the speed just measured."""

    shots: int
    shots_used: int
    prefix_tokens: int
    query_tokens: int
    """Of all queries with their candidates' branches."""
    training_tokens: int
    """Of all steps at all learning rates."""
    selection_tokens: int
    controls: str
    seconds: float
    """With the requested controls."""

    def table(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_row("demonstrations kept", f"{self.shots_used} of {self.shots}")
        table.add_row("prefix tokens", str(self.prefix_tokens))
        table.add_row("query tokens, a setting", str(self.query_tokens))
        table.add_row("training tokens", str(self.training_tokens))
        table.add_row("selection tokens", str(self.selection_tokens))
        table.add_row("estimated time", f"about {self.seconds:.0f} s (controls: {self.controls})")
        return table


def estimate(options: RunOptions, progress: Progress | None = None, lm: LanguageModel | None = None) -> Estimate:
    """Count every token of a run, and time a few queries to guess how long it takes."""
    prepared = prepare(options, lm, progress)
    prompts = prepared.prompts
    counts = [len(grow(query, options.at).ids) for query in prompts.queries]
    choosing = options.lr == "auto" and options.ft_rule != "distilled"
    rates, mean = len(options.lr_grid) if choosing else 1, sum(counts) / len(counts)
    if options.ft_rule == "distilled":
        read = step_count(training_of(prepared, prompts, 0.0), recipe_of(prepared)) * DISTILLING_ROWS
        training = int(read * mean)
    else:
        training = sum(len(s.ids) for s in steps_of(prompts.training_sequences, recipe_of(prepared))) * rates
    selection = int(SELECTION_ROWS * mean) * rates if choosing else 0
    speed = _tokens_per_second(prepared, counts)
    # A training token costs a forward and a backward pass, the latter about as much: weights get no gradient.
    work = 3 * sum(counts) + len(prompts.prefix) + 2 * training + selection
    return Estimate(
        shots=prompts.shots,
        shots_used=prompts.shots_used,
        prefix_tokens=len(prompts.prefix),
        query_tokens=sum(counts),
        training_tokens=training,
        selection_tokens=selection,
        controls=options.controls,
        seconds=work / speed * WITH_CONTROLS[options.controls],
    )


def _tokens_per_second(prepared: Prepared, counts: list[int]) -> float:
    some = prepared.prompts.queries[:32]
    how = replace(prepared.zero_shot, record=False)
    ask(prepared.lm, some[:2], how)  # the first pass pays for warming up
    start = time.perf_counter()
    ask(prepared.lm, some, how)
    return sum(counts[: len(some)]) / (time.perf_counter() - start)
