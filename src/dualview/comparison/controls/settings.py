"""Asking the same queries again under a control: another context, another fine-tuning, another model.

Each control is one more `Setting`, next to zsl, icl and ft, under the name by which `metrics.floors.controls` knows it.
`quick` runs four: the demonstrations in another order (the ceiling), the query moved to its in-context position without
them, and flipped labels in context and in fine-tuning. `full` runs the rest, those with a random draw several times:
the second draw of `icl_random_labels` is `icl_random_labels@2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import numpy as np

from dualview.comparison.controls.training import Scalable, TrainedControls, as_large
from dualview.comparison.controls.untrained import UNTRAINED_DRAWS, TrainedModel, drawn
from dualview.comparison.finetuning import training_of
from dualview.comparison.inputs import make_prompts
from dualview.comparison.prepare import Prepared, selection_queries
from dualview.io.errors import UserError
from dualview.io.progress import Progress
from dualview.learning.finetune import finetune
from dualview.learning.recipe import Rule, Training, TrainingRecipe, Tuned
from dualview.learning.selection import best, judge_rates
from dualview.learning.turns import Run
from dualview.metrics.cosine import UNDEFINED_BELOW
from dualview.metrics.floors.controls import base_name
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Asked, PassPlan, ask
from dualview.models.untrained import UNTRAINED_SEED
from dualview.options import Labels
from dualview.records import Setting
from dualview.records.setting import to_host
from dualview.tasks.prompts import PromptSet, Query
from dualview.tasks.rows import Row
from dualview.tasks.sampling import sample_demos
from dualview.tasks.task import Task, load_task, shuffled

Grid = Callable[[Rule], Sequence[Tuned]]
"""Trains a rule at every learning rate of the grid."""
PERMUTATIONS = 5
"""Orders of the demonstrations that order sensitivity compares, the prompt's own included."""


DRAWS = 5
"""How often `full` draws a control with a random draw."""


def control_trainings(prepared: Prepared, lr: float, *, full: bool) -> dict[str, Callable[[], Training]]:
    """Every control that is fine-tuning of the model itself at the run's own rate, by name."""
    prompts = prepared.prompts

    def on(made: Callable[[], PromptSet], rate: float = lr) -> Callable[[], Training]:
        return lambda: training_of(prepared, made(), rate)

    wanted = {"ft_flipped_labels": on(lambda: flipped_labels(prepared))}
    if not full:
        return wanted
    descends = prepared.options.ft_rule != "distilled"
    if descends:
        wanted["ft_sign_flipped"] = on(lambda: prompts, -lr)
    for number in range(DRAWS):
        wanted[drawn("ft_random_labels", number)] = on(lambda n=number: _random_labels(prepared, n))
        wanted[drawn("ft_other_task", number)] = on(lambda n=number: _other_task(prepared, n))
    for number in range(1, PERMUTATIONS if descends else 1):
        wanted[f"order {number}"] = on(lambda n=number: reordered(prompts, f"order {n}"))
    return wanted


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
    prepared: Prepared,
    lr: float,
    recipe: TrainingRecipe,
    trained: TrainedControls,
    *,
    sizes: Mapping[str, float],
    grid: Grid | None,
    progress: Progress,
    zsl: Asked | None = None,
    untrained: Mapping[str, Run[TrainedModel]] = {},
) -> Controls:
    """Run the quick controls or, given a `grid`, all of them.

    `sizes` are those of FT's and the learners' updates, `zsl` is the run's pass, `untrained` are `untrained_runs`.
    """
    found = Controls()
    for name, run in _controls(prepared, lr, recipe, trained, sizes, grid, found, zsl, dict(untrained)):
        with progress.part(f"control {name}", 1) as advance:
            try:
                made = run()
            except UserError as error:
                found.skipped.setdefault(base_name(name), str(error))
                continue
            advance(1)
        found.settings.update({f"{name}{suffix}": asked.settings[0] for suffix, asked in made.items()})
        found.passes.update({f"{name}{suffix}": asked for suffix, asked in made.items()})
    return found


Control = Callable[[], dict[str, Asked]]
"""Runs one control; the passes it made, by the suffix of their names (none, or _zsl, _icl and _ft)."""


def _controls(
    prepared: Prepared,
    lr: float,
    recipe: TrainingRecipe,
    trained: TrainedControls,
    sizes: Mapping[str, float],
    grid: Grid | None,
    found: Controls,
    zsl: Asked | None,
    untrained: dict[str, Run[TrainedModel]],
) -> Iterator[tuple[str, Control]]:
    lm, prompts, report = prepared.lm, prepared.prompts, found.trained

    def untouched(name: str, how: Callable[[], PassPlan]) -> tuple[str, Control]:
        """A pass at the base weights: no learning rate or rule decides it."""
        return name, lambda: {"": _cached_pass(prepared, name, lm, how())}

    def context(name: str, prefix: Callable[[], tuple[int, ...]], *, demo_logits: bool = False) -> tuple[str, Control]:
        return untouched(name, lambda: replace(prepared.in_context, prefix=prefix(), demo_logits=demo_logits))

    def patched(name: str, tuned: Tuned) -> dict[str, Asked]:
        report[name] = {"lr": tuned.lr, "status": tuned.status}
        return {"": ask(lm, prompts.queries, replace(prepared.zero_shot, stay=True), tuned.patch)}

    def training(name: str) -> tuple[str, Control]:
        def run() -> dict[str, Asked]:
            made = patched(name, trained.get(name))
            report[name] = trained.report(name)
            return made

        return name, run

    # Zero-shot at the query's in-context position: how far the position alone changes the output.
    shift = len(prompts.prefix) - len(prompts.zero_prefix)
    yield context("icl_reordered", lambda: reordered(prompts, REORDERED).prefix, demo_logits=True)
    moved = replace(prepared.zero_shot, shift=shift)
    if zsl is not None and _stays(lm, prompts.queries, moved, zsl):
        yield "zsl_shifted", lambda: {"": zsl}
    else:
        yield untouched("zsl_shifted", lambda: moved)
    yield context("icl_flipped_labels", lambda: flipped_labels(prepared).prefix)
    yield training("ft_flipped_labels")
    if grid is None:
        return
    yield context("icl_other_demos", lambda: _other_demos(prepared).prefix)
    for n in range(DRAWS):
        yield context(drawn("icl_random_labels", n), lambda n=n: _random_labels(prepared, n).prefix)
        yield context(drawn("icl_other_task", n), lambda n=n: _other_task(prepared, n).prefix)
        yield context(drawn("icl_random_text", n), lambda n=n: _random_text(prepared, n))
        yield training(drawn("ft_random_labels", n))
        yield training(drawn("ft_other_task", n))
    if "ft_sign_flipped" in trained.tuned:
        yield training("ft_sign_flipped")
    if recipe.params != "all":
        whole = replace(recipe, params="all", rule="sgd")
        name = "ft_all_params"
        yield name, lambda: patched("ft_all_params", finetune(lm, prompts.training_sequences, [lr], whole)[0])
        for rule, name in RULE_CONTROLS.items():
            if rule != recipe.rule:
                yield name, lambda rule=rule, name=name: patched(name, _best(prepared, grid(rule)))
    for name in list(untrained):  # taken out, so that no more models are kept than have to be
        yield name, lambda name=name: _untrained(prepared, sizes, found, name, untrained.pop(name).result())


def _stays(lm: LanguageModel, queries: Sequence[Query], moved: PassPlan, zsl: Asked) -> bool:
    """Whether moving the queries changes nothing but rounding: with relative positions only, and no BOS to move from.

    The longest query tells: positions do not depend on the text, and the others' are among its own.
    """
    base = zsl.settings[0]
    if moved.prefix or not moved.record or base.h is None or base.m is None:
        return False
    longest = int(zsl.columns.argmax())
    alone = ask(lm, [queries[longest]], moved).settings[0]
    if alone.h is None or alone.m is None:
        return False
    for there, here in ((alone.h[0], base.h[longest]), (alone.m[0], base.m[longest, ..., : alone.m.shape[-1]])):
        here = to_host(here)
        sides = [side.astype(np.float64).reshape(len(here), -1) for side in (there - here, here)]
        change, size = (np.linalg.norm(side, axis=1) for side in sides)
        if not bool((change <= UNDEFINED_BELOW * size).all()):
            return False
    return True


RULE_CONTROLS: Mapping[Rule, str] = {
    "sgd": "ft_sgd",
    "layer-causal": "ft_layer_causal",
    "linearised": "ft_linearised",
    "distilled": "ft_distilled",
}
"""The other rules, each at its own best learning rate. Distillation is the ceiling of what K and V can carry."""
REORDERED = "reordered"


def control_seeds(prepared: Prepared) -> dict[str, Any]:
    """Every seed that a control draws with, and the number of draws (`_generator`, `_other_task`: how the seeds of
    further draws follow). Orders are shuffled by a key and the number of demonstrations alone."""
    seed = prepared.seed or 0
    return {
        "other_demos": 1000 + seed,
        "random_labels": [0, seed],
        "random_text": [1, seed],
        "other_task": seed,
        "untrained": UNTRAINED_SEED,
        "reordered": REORDERED,
        "draws": {"random": DRAWS, "untrained": UNTRAINED_DRAWS},
    }


def _generator(prepared: Prepared, name: str, number: int) -> np.random.Generator:
    """The generator of one draw of a control; the first has the seed of `control_seeds` alone."""
    seed = control_seeds(prepared)[name]
    return np.random.default_rng([*seed, number] if number else seed)


def reordered(prompts: PromptSet, key: str) -> PromptSet:
    """The same demonstrations in another order, which depends on `key` and their number alone."""
    if prompts.shots_used < 2:
        raise UserError("One demonstration has no other order.")
    order = shuffled(prompts.shots_used, key)
    # A shuffle of few demonstrations may leave them as they are, and the control needs another order.
    if order == list(range(len(order))):
        order = order[1:] + order[:1]
    return replace(prompts, demos=tuple(prompts.demos[i] for i in order))


def rebuilt(prepared: Prepared, rows: list[Row], task: Task | None = None) -> PromptSet:
    """The prompts with other demonstrations, of the same task or of another."""
    options, task = prepared.options, task or prepared.task
    # Another task's demonstrations are separated as this one's are: only their content may differ.
    options = replace(options, separator=options.separator or prepared.task.separator)
    made = make_prompts(options, prepared.lm.reader, task, rows, rows[:1], prepared.prompts.queries)
    return made.with_queries(prepared.prompts.queries)


def _other_demos(prepared: Prepared) -> PromptSet:
    seed = control_seeds(prepared)["other_demos"]
    return rebuilt(prepared, sample_demos(prepared.task, seed, prepared.prompts.shots_used))


def flipped_labels(prepared: Prepared) -> PromptSet:
    """The demonstrations with permuted labels, none of which is the true one: each label becomes the next."""
    shown = prepared.demos[: prepared.prompts.shots_used]
    counts = [len(prepared.task.candidates(row)) for row in shown]
    if min(counts) < 2:
        raise UserError("A task with a single label has no other to flip it to.")
    return rebuilt(prepared, flipped(prepared.task, shown))


def flipped(task: Task, rows: Sequence[Row]) -> list[Row]:
    """The rows, each with the next label."""
    # A shift, so that no row keeps its label, which a random permutation could allow.
    return [replace(row, label=(row.label + 1) % len(task.candidates(row))) for row in rows]


def _random_labels(prepared: Prepared, number: int = 0) -> PromptSet:
    """The demonstrations with labels drawn evenly, independent of the text; drawn again if all are the true ones."""
    draw = _generator(prepared, "random_labels", number)
    true = list(prepared.demos[: prepared.prompts.shots_used])
    rows = true
    # With few demonstrations a draw may give all true labels, which would be no control.
    while rows == true:
        rows = [replace(row, label=int(draw.integers(len(prepared.task.candidates(row))))) for row in true]
    return rebuilt(prepared, rows)


def _other_task(prepared: Prepared, number: int = 0) -> PromptSet:
    other, rows = other_demos(prepared, number)
    return rebuilt(prepared, rows, other)


def other_demos(prepared: Prepared, number: int = 0) -> tuple[Task, list[Row]]:
    """Another task that comes with the package, and as many demonstrations of it."""
    other = _embedded_task("product" if prepared.task.name == "source" else "source", prepared.options.labels)
    seed = control_seeds(prepared)["other_task"] + 1000 * number
    return other, sample_demos(other, seed, prepared.prompts.shots_used)


@cache
def _embedded_task(name: str, labels: Labels) -> Task:
    """A task whose rows come with the package: they never change, so they are read once."""
    return load_task(name, labels=labels)


def _random_text(prepared: Prepared, number: int = 0) -> tuple[int, ...]:
    """As many tokens as the demonstrations have, drawn evenly from the vocabulary without BOS and EOS.

    (Which other tokens count as special depends on the version of transformers that reads the tokenizer.)
    """
    prompts, tokenizer = prepared.prompts, prepared.lm.tokenizer
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    plain = np.array([t for t in range(min(len(tokenizer), prepared.lm.vocab)) if t not in ends])
    draw = _generator(prepared, "random_text", number)
    count = len(prompts.prefix) - len(prompts.zero_prefix)
    return (*prompts.zero_prefix, *(int(t) for t in draw.choice(plain, count)))


def _best(prepared: Prepared, tuned: Sequence[Tuned]) -> Tuned:
    """Another rule at its own best learning rate, chosen as the main one was."""
    trials = judge_rates(prepared.lm, tuned, selection_queries(prepared), prepared.zero_shot)
    return tuned[best(trials)]


def _untrained(
    prepared: Prepared, sizes: Mapping[str, float], found: Controls, name: str, model: TrainedModel
) -> dict[str, Asked]:
    """The whole comparison with untrained weights."""
    queries, lm, tuned = prepared.prompts.queries, model.lm, model.trained.get(name)
    found.trained[name] = model.trained.report(name)
    zsl = _cached_pass(prepared, f"{name}_zsl", lm, prepared.zero_shot)
    for learner, size in sizes.items():
        if learner != "ft":
            patch = as_large(prepared, lm, zsl.settings[0], cast("Scalable", tuned.patch), size)
            found.settings[f"{learner}/{name}_ft"] = ask(lm, queries, prepared.zero_shot, patch).settings[0]
    return {
        "_zsl": zsl,
        "_icl": _cached_pass(prepared, f"{name}_icl", lm, prepared.in_context),
        "_ft": ask(lm, queries, replace(prepared.zero_shot, stay=True), tuned.patch),
    }


def _cached_pass(prepared: Prepared, name: str, lm: LanguageModel, how: PassPlan) -> Asked:
    """A pass that the next run takes again, where its queries and its plan are the same."""
    queries = prepared.prompts.queries
    how = replace(how, stay=True)
    return prepared.cache(name, (how, queries), lambda: ask(lm, queries, how))
