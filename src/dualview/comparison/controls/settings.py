"""Asking the same queries again under a control: another context, another fine-tuning, another model.

Each control is one more `Setting`, next to zsl, icl and ft, under the name by which `metrics.controls` knows it.
`quick` takes two more passes: the demonstrations in another order (the ceiling), and the query moved to its in-context
position without them. `full` takes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from dualview.comparison.prepare import Prepared, make_prompts, selection_queries
from dualview.io.errors import UserError
from dualview.io.progress import Progress
from dualview.learning.finetune import Training, TrainingRecipe, Tuned, finetune, steps_of, train
from dualview.learning.selection import best, judge_rates
from dualview.learning.training_step import Rule
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Asked, PassPlan, ask
from dualview.models.untrained import UNTRAINED_SEED, untrained
from dualview.records import Setting
from dualview.tasks.prompts import PromptSet
from dualview.tasks.rows import Row
from dualview.tasks.sampling import sample_demos
from dualview.tasks.task import Task, load_task, shuffled

Grid = Callable[[Rule], Sequence[Tuned]]
"""Trains a rule at every learning rate of the grid."""
PERMUTATIONS = 5
"""Orders of the demonstrations that order sensitivity compares, the prompt's own included."""


@dataclass(frozen=True)
class FullControls:
    """What the full controls need besides the quick ones."""

    grid: Grid
    tuned: Mapping[str, Tuned]
    """The trainings of `control_trainings`, by name."""
    problems: Mapping[str, UserError]
    """Why some of them could not be run."""


def control_trainings(prepared: Prepared, lr: float) -> dict[str, Callable[[], Training]]:
    """Every control that is fine-tuning at the run's own rate on other demonstrations, by name."""
    prompts = prepared.prompts

    def on(made: Callable[[], PromptSet], rate: float = lr) -> Callable[[], Training]:
        return lambda: Training(made().training_sequences, rate)

    return {
        "ft_sign_flipped": on(lambda: prompts, -lr),
        "ft_random_labels": on(lambda: _random_labels(prepared)),
        "ft_other_task": on(lambda: _other_task(prepared)),
        **{f"order {i}": on(lambda i=i: reordered(prompts, f"order {i}")) for i in range(1, PERMUTATIONS)},
    }


def full_controls(
    prepared: Prepared, lr: float, recipe: TrainingRecipe, grid: Grid, progress: Progress
) -> FullControls:
    """Train every control of `control_trainings`, all as rows of one batch."""
    trainings: dict[str, Training] = {}
    problems: dict[str, UserError] = {}
    for name, make in control_trainings(prepared, lr).items():
        try:
            trainings[name] = make()
        except UserError as error:
            problems[name] = error
    steps = sum(len(steps_of(training.sequences, recipe)) for training in trainings.values())
    with progress.part(f"fine-tuning {len(trainings)} controls", steps) as advance:
        tuned = train(prepared.lm, list(trainings.values()), recipe, advance)
    return FullControls(grid, dict(zip(trainings, tuned, strict=True)), problems)


@dataclass(frozen=True)
class Controls:
    """What the controls gave."""

    settings: dict[str, Setting] = field(default_factory=dict[str, Setting])
    """Every control's setting by name."""
    passes: dict[str, Asked] = field(default_factory=dict[str, Asked])
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Why some could not be run."""
    trained: dict[str, dict[str, Any]] = field(default_factory=dict[str, "dict[str, Any]"])
    """Of each control that is a fine-tuning: its learning rate and how it ended."""


def control_settings(
    prepared: Prepared, lr: float, recipe: TrainingRecipe, *, full: FullControls | None, progress: Progress
) -> Controls:
    """Run the quick controls, or all of them."""
    found = Controls()
    for name, run in _controls(prepared, lr, recipe, full, found.trained):
        with progress.part(f"control {name}", 1) as advance:
            try:
                made = run()
            except UserError as error:
                found.skipped[name] = str(error)
                continue
            advance(1)
        found.settings.update({f"{name}{suffix}": asked.settings[0] for suffix, asked in made.items()})
        found.passes.update({f"{name}{suffix}": asked for suffix, asked in made.items()})
    return found


Control = Callable[[], dict[str, Asked]]
"""Runs one control; the passes it made, by the suffix of their names (none, or _zsl, _icl and _ft)."""


def _controls(
    prepared: Prepared, lr: float, recipe: TrainingRecipe, full: FullControls | None, trained: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Control]]:
    lm, prompts = prepared.lm, prepared.prompts

    def untouched(name: str, how: Callable[[], PassPlan]) -> tuple[str, Control]:
        """A pass at the base weights: no learning rate or rule decides it."""
        return name, lambda: {"": _cached_pass(prepared, name, lm, how())}

    def context(name: str, prefix: Callable[[], tuple[int, ...]], *, demo_logits: bool = False) -> tuple[str, Control]:
        return untouched(name, lambda: replace(prepared.in_context, prefix=prefix(), demo_logits=demo_logits))

    def patched(name: str, tuned: Tuned) -> dict[str, Asked]:
        trained[name] = {"lr": tuned.lr, "status": tuned.status}
        return {"": ask(lm, prompts.queries, prepared.zero_shot, tuned.patch)}

    shift = len(prompts.prefix) - len(prompts.zero_prefix)
    yield context("icl_reordered", lambda: reordered(prompts, REORDERED).prefix, demo_logits=True)
    yield untouched("zsl_shifted", lambda: replace(prepared.zero_shot, shift=shift))
    if full is None:
        return

    def training(name: str) -> dict[str, Asked]:
        if name in full.problems:
            raise full.problems[name]
        return patched(name, full.tuned[name])

    yield context("icl_other_demos", lambda: _other_demos(prepared).prefix)
    yield context("icl_random_labels", lambda: _random_labels(prepared).prefix)
    yield context("icl_other_task", lambda: _other_task(prepared).prefix)
    yield context("icl_random_text", lambda: _random_text(prepared))
    for name in ("ft_sign_flipped", "ft_random_labels", "ft_other_task"):
        yield name, lambda name=name: training(name)
    if recipe.params != "all":
        whole = replace(recipe, params="all", rule="sgd")
        yield (
            "ft_all_params",
            lambda: patched("ft_all_params", finetune(lm, prompts.training_sequences, [lr], whole)[0]),
        )
        for rule, name in RULE_CONTROLS.items():
            if rule != recipe.rule:
                yield name, lambda rule=rule, name=name: patched(name, _best(prepared, full.grid(rule)))
    for name, keep in (("untrained", False), ("untrained_but_embeddings", True)):
        yield name, lambda name=name, keep=keep: _untrained(prepared, lr, recipe, trained, name, keep=keep)


RULE_CONTROLS: Mapping[Rule, str] = {
    "sgd": "ft_sgd",
    "layer-causal": "ft_layer_causal",
    "linearised": "ft_linearised",
}
"""The other rules, each at its own best learning rate."""
REORDERED = "reordered"


def control_seeds(prepared: Prepared) -> dict[str, Any]:
    """Every seed that a control draws with; orders are shuffled by a key and the number of demonstrations alone."""
    seed = prepared.seed or 0
    return {
        "other_demos": 1000 + seed,
        "random_labels": [0, seed],
        "random_text": [1, seed],
        "other_task": seed,
        "untrained": UNTRAINED_SEED,
        "reordered": REORDERED,
    }


def reordered(prompts: PromptSet, key: str) -> PromptSet:
    """The same demonstrations in another order, which depends on `key` and their number alone."""
    if prompts.shots_used < 2:
        raise UserError("One demonstration has no other order.")
    order = shuffled(prompts.shots_used, key)
    if order == list(range(len(order))):
        order = order[1:] + order[:1]
    return replace(prompts, demos=tuple(prompts.demos[i] for i in order))


def _rebuilt(prepared: Prepared, rows: list[Row], task: Task | None = None) -> PromptSet:
    options, task = prepared.options, task or prepared.task
    options = replace(options, separator=options.separator or prepared.task.separator)
    made = make_prompts(options, prepared.lm, task, rows, rows[:1], prepared.prompts.queries)
    return made.with_queries(prepared.prompts.queries)


def _other_demos(prepared: Prepared) -> PromptSet:
    seed = control_seeds(prepared)["other_demos"]
    return _rebuilt(prepared, sample_demos(prepared.task, seed, prepared.prompts.shots_used))


def _random_labels(prepared: Prepared) -> PromptSet:
    """The demonstrations with labels drawn evenly, independent of the text; drawn again if all are the true ones."""
    draw = np.random.default_rng(control_seeds(prepared)["random_labels"])
    true = list(prepared.demos[: prepared.prompts.shots_used])
    rows = true
    while rows == true:
        rows = [replace(row, label=int(draw.integers(len(prepared.task.candidates(row))))) for row in true]
    return _rebuilt(prepared, rows)


def _other_task(prepared: Prepared) -> PromptSet:
    name = "product" if prepared.task.name == "source" else "source"
    other = _embedded_task(name)
    seed = control_seeds(prepared)["other_task"]
    return _rebuilt(prepared, sample_demos(other, seed, prepared.prompts.shots_used), other)


@cache
def _embedded_task(name: str) -> Task:
    """A task whose rows come with the package: they never change, so they are read once."""
    return load_task(name)


def _random_text(prepared: Prepared) -> tuple[int, ...]:
    """As many tokens as the demonstrations have, drawn evenly from the vocabulary without BOS and EOS.

    (Which other tokens count as special depends on the version of transformers that reads the tokenizer.)
    """
    prompts, tokenizer = prepared.prompts, prepared.lm.tokenizer
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    plain = np.array([t for t in range(min(len(tokenizer), prepared.lm.vocab)) if t not in ends])
    draw = np.random.default_rng(control_seeds(prepared)["random_text"])
    count = len(prompts.prefix) - len(prompts.zero_prefix)
    return (*prompts.zero_prefix, *(int(t) for t in draw.choice(plain, count)))


def _best(prepared: Prepared, tuned: Sequence[Tuned]) -> Tuned:
    """Another rule at its own best learning rate, chosen as the main one was."""
    trials = judge_rates(prepared.lm, tuned, selection_queries(prepared), prepared.zero_shot)
    return tuned[best(trials)]


def _untrained(
    prepared: Prepared, lr: float, recipe: TrainingRecipe, trained: dict[str, dict[str, Any]], name: str, *, keep: bool
) -> dict[str, Asked]:
    lm, queries = untrained(prepared.lm, keep_embeddings=keep, seed=UNTRAINED_SEED), prepared.prompts.queries
    tuned = finetune(lm, prepared.prompts.training_sequences, [lr], recipe)[0]
    trained[name] = {"lr": tuned.lr, "status": tuned.status}

    return {
        "_zsl": _cached_pass(prepared, f"{name}_zsl", lm, prepared.zero_shot),
        "_icl": _cached_pass(prepared, f"{name}_icl", lm, prepared.in_context),
        "_ft": ask(lm, queries, prepared.zero_shot, tuned.patch),
    }


def _cached_pass(prepared: Prepared, name: str, lm: LanguageModel, how: PassPlan) -> Asked:
    """A pass that the next run takes again, where its queries and its plan are the same."""
    queries = prepared.prompts.queries
    return prepared.cache(name, (how, queries), lambda: ask(lm, queries, how))
