"""Asking the same queries again under a control: another context, another fine-tuning, another model.

Each control is one more `Setting` beside zsl, icl and ft, under the name by which `metrics.controls` knows it. `quick`
takes two more passes: the demonstrations in another order (the ceiling), and the query moved to its in-context
position without them. `full` takes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dualview.controls.untrained import UNTRAINED_SEED, untrained
from dualview.errors import UserError
from dualview.learning.finetune import Recipe, Tuned, finetune
from dualview.learning.selection import best, judge_rates
from dualview.models.passes import Asked, Patch, Plan, ask
from dualview.progress import Progress
from dualview.records import Setting
from dualview.tasks.prompt import PromptSet, build_prompts
from dualview.tasks.rows import Row
from dualview.tasks.sampling import sample_demos
from dualview.tasks.task import load_task, shuffled

if TYPE_CHECKING:
    from dualview.comparison import Prepared


def control_settings(
    prepared: Prepared,
    lr: float,
    recipe: Recipe,
    *,
    full: bool,
    by_layer: Callable[[], Sequence[Tuned]],
    progress: Progress,
) -> tuple[dict[str, Setting], dict[str, Asked], dict[str, str]]:
    """Every control's setting by name, the passes behind the quick ones, and why some could not be run.

    `by_layer` trains the layer-causal rule at every rate of the grid.
    """
    settings: dict[str, Setting] = {}
    passes: dict[str, Asked] = {}
    skipped: dict[str, str] = {}
    for name, run in _controls(prepared, lr, recipe, full=full, by_layer=by_layer):
        with progress.part(f"control {name}", 1) as advance:
            try:
                found = run()
            except UserError as error:
                skipped[name] = str(error)
                continue
            advance(1)
        settings |= {f"{name}{suffix}": asked.settings[0] for suffix, asked in found.items()}
        passes |= {f"{name}{suffix}": asked for suffix, asked in found.items()}
    return settings, passes, skipped


Control = Callable[[], dict[str, Asked]]
"""Runs one control; the passes it made, by the suffix of their names (none, or _zsl, _icl and _ft)."""


def _controls(
    prepared: Prepared, lr: float, recipe: Recipe, *, full: bool, by_layer: Callable[[], Sequence[Tuned]]
) -> Iterator[tuple[str, Control]]:
    lm, prompts = prepared.lm, prepared.prompts

    def context(other: PromptSet | tuple[int, ...]) -> dict[str, Asked]:
        prefix = other.prefix if isinstance(other, PromptSet) else other
        return {"": ask(lm, prompts.queries, replace(prepared.in_context, prefix=prefix))}

    def tuned(patch: Patch) -> dict[str, Asked]:
        return {"": ask(lm, prompts.queries, prepared.zero_shot, patch)}

    def trained(on: PromptSet, rate: float = lr, how: Recipe = recipe) -> dict[str, Asked]:
        return tuned(finetune(lm, on.training_sequences, [rate], how)[0].patch)

    shift = len(prompts.prefix) - len(prompts.zero_prefix)
    yield "icl_reordered", lambda: context(reordered(prompts, "reordered"))
    yield "zsl_shifted", lambda: {"": ask(lm, prompts.queries, replace(prepared.zero_shot, shift=shift))}
    if not full:
        return
    yield "icl_other_demos", lambda: context(_other_demos(prepared))
    yield "icl_random_labels", lambda: context(_random_labels(prepared))
    yield "icl_other_task", lambda: context(_other_task(prepared))
    yield "icl_random_text", lambda: context(_random_text(prepared))
    yield "ft_sign_flipped", lambda: trained(prompts, -lr)
    yield "ft_random_labels", lambda: trained(_random_labels(prepared))
    yield "ft_other_task", lambda: trained(_other_task(prepared))
    yield "ft_all_params", lambda: trained(prompts, lr, replace(recipe, params="all", rule="sgd"))
    if recipe.params != "all" and recipe.rule == "sgd":
        yield "ft_layer_causal", lambda: tuned(_best(prepared, by_layer()))
        yield "ft_linearised", lambda: trained(prompts, lr, replace(recipe, rule="linearised"))
    for name, keep in (("untrained", False), ("untrained_but_embeddings", True)):
        yield name, lambda keep=keep: _untrained(prepared, lr, recipe, keep=keep)


def reordered(prompts: PromptSet, key: str) -> PromptSet:
    """The same demonstrations in another order, which depends on `key` and their number alone."""
    order = shuffled(prompts.shots_used, key)
    if order == list(range(len(order))):
        order = order[1:] + order[:1]
    return replace(prompts, demos=tuple(prompts.demos[i] for i in order))


def _rebuilt(prepared: Prepared, rows: list[Row], task: str | None = None) -> PromptSet:
    options, lm = prepared.options, prepared.lm
    limits = [limit for limit in (lm.context, options.max_context) if limit is not None]
    source = prepared.task if task is None else load_task(task)
    made = build_prompts(
        source,
        lm.tokenizer,
        rows,
        rows[:1],
        bos=options.bos,
        separator=options.separator or prepared.task.separator,
        max_context=min(limits, default=None),
        room_for=prepared.prompts.queries,
    )
    return made.with_queries(prepared.prompts.queries)


def _other_demos(prepared: Prepared) -> PromptSet:
    seed = 1000 + (prepared.seed or 0)
    return _rebuilt(prepared, sample_demos(prepared.task, seed, prepared.prompts.shots_used))


def _random_labels(prepared: Prepared) -> PromptSet:
    """The demonstrations with labels drawn evenly, whatever the text says."""
    draw = np.random.default_rng([0, prepared.seed or 0])
    rows = [
        replace(row, label=int(draw.integers(len(prepared.task.candidates(row)))))
        for row in prepared.demos[: prepared.prompts.shots_used]
    ]
    return _rebuilt(prepared, rows)


def _other_task(prepared: Prepared) -> PromptSet:
    other = "product" if prepared.task.name == "source" else "source"
    return _rebuilt(prepared, sample_demos(load_task(other), prepared.seed or 0, prepared.prompts.shots_used), other)


def _random_text(prepared: Prepared) -> tuple[int, ...]:
    """As many tokens as the demonstrations have, drawn evenly from the vocabulary's plain tokens."""
    prompts, tokenizer = prepared.prompts, prepared.lm.tokenizer
    special = set(tokenizer.all_special_ids)
    plain = np.array([t for t in range(min(len(tokenizer), prepared.lm.vocab)) if t not in special])
    draw = np.random.default_rng([1, prepared.seed or 0])
    count = len(prompts.prefix) - len(prompts.zero_prefix)
    return (*prompts.zero_prefix, *(int(t) for t in draw.choice(plain, count)))


def _best(prepared: Prepared, tuned: Sequence[Tuned]) -> Patch:
    """Another rule at its own best learning rate, chosen as the main one was."""
    from dualview.comparison import selection_queries

    trials = judge_rates(prepared.lm, tuned, selection_queries(prepared), prepared.zero_shot)
    return tuned[best(trials)].patch


def _untrained(prepared: Prepared, lr: float, recipe: Recipe, *, keep: bool) -> dict[str, Asked]:
    lm, queries = untrained(prepared.lm, keep_embeddings=keep, seed=UNTRAINED_SEED), prepared.prompts.queries
    patch = finetune(lm, prepared.prompts.training_sequences, [lr], recipe)[0].patch

    def asked(how: Plan, worn: Patch | None = None) -> Asked:
        return ask(lm, queries, how, worn)

    return {
        "_zsl": asked(prepared.zero_shot),
        "_icl": asked(prepared.in_context),
        "_ft": asked(prepared.zero_shot, patch),
    }
