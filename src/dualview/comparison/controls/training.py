"""Controls that are fine-tunings: of other labels, other demonstrations, other orders, or other weights.

Similarity grows with the size of an update, so a control is read at the size of FT's: its learning rate is corrected
until its update is as large, relative to the zero-shot output, on the first queries. All controls of one model are rows
of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from dualview.anatomy.layers import Projection
from dualview.comparison.prepare import Prepared
from dualview.io.errors import UserError
from dualview.io.progress import Advance, Progress
from dualview.learning.batch import Kept
from dualview.learning.finetune import train_steps
from dualview.learning.recipe import Training, TrainingRecipe, Tuned, step_count
from dualview.learning.selection import ask_each
from dualview.learning.traces import TrainingTrace, train_followed_steps
from dualview.learning.turns import Steps, have_room_together, uninterrupted
from dualview.metrics.cosine import overall_mean
from dualview.metrics.floors.controls import base_name
from dualview.metrics.sim_aou import relative_update_norm
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Patch, ask
from dualview.records import Setting

SIZED_ON = 64
"""Queries on which the size of an update is compared."""
CLOSE = 1.1
"""Sizes within this factor count as equal."""
_ROUNDS, _LARGEST_CORRECTION = 4, 30.0
_POWERS = (0.25, 4.0)
"""Between what an update's size may grow as a power of its rate; outside, it is noise or a training that ran away."""
_STEADY = 1.5
"""How many times the untouched model's a loss may be: training lowers it, unless a step was too long."""


@dataclass(frozen=True)
class TrainedControls:
    """The fine-tunings of the controls, by name."""

    tuned: Mapping[str, Tuned]
    sizes: Mapping[str, float]
    """Each one's update over FT's, where they were made equal: near 1."""
    problems: Mapping[str, UserError]
    """Why some could not be run."""
    traces: Mapping[str, TrainingTrace] = field(default_factory=dict[str, TrainingTrace])
    """Of the trainings that were followed. They are large: use them before the next pass."""

    def get(self, name: str) -> Tuned:
        if name in self.problems:
            raise self.problems[name]
        return self.tuned[name]

    def report(self, name: str) -> dict[str, Any]:
        tuned = self.tuned[name]
        size = {} if name not in self.sizes else {"size_over_ft": self.sizes[name]}
        return {"lr": tuned.lr, "status": tuned.status, **size}


def train_controls_steps(
    prepared: Prepared,
    wanted: Mapping[str, Callable[[], Training]],
    recipe: TrainingRecipe,
    progress: Progress,
    *,
    sized: Sequence[str] = (),
    size: float | None = None,
    lm: LanguageModel | None = None,
    followed: Mapping[str, Training] = {},
    taps: Sequence[Projection] = (),
) -> Steps[TrainedControls]:
    """Train the controls, all as rows of one batch; those named in `sized` until their updates are as large as `size`.

    A control that cannot be made (one demonstration has no other order) is left out, with the reason. `followed` are
    further rows, shown the same sequences, of which the traces are kept, with the outputs of `taps`.
    """
    lm = lm or prepared.lm
    trainings: dict[str, Training] = {}
    problems: dict[str, UserError] = {}
    for name, make in wanted.items():
        try:
            trainings[name] = make()
        except UserError as error:
            problems[name] = error
    if not trainings and not followed:
        return TrainedControls({}, {}, problems)
    # What distillation fits decides its size, not its rate.
    corrected = size is not None and size > 0 and recipe.rule != "distilled"
    names = [name for name in sized if name in trainings] if corrected else []
    # Controls are corrected by repeating their training, so its recorded step is kept where there is room for it.
    kept = Kept() if names and have_room_together(lm) else None
    steps = sum(step_count(training, recipe) for training in (*trainings.values(), *followed.values()))
    with progress.part(f"fine-tuning {len(trainings)} controls", steps) as advance:
        tuned, traces = yield from _train_all(lm, trainings, followed, recipe, taps, advance, kept)
    if size is None or not names:
        return TrainedControls(tuned, {}, problems, traces)
    sizes = yield from _corrected(prepared, lm, recipe, trainings, tuned, names, size, kept)
    return TrainedControls(tuned, sizes, problems, traces)


train_controls = uninterrupted(train_controls_steps)


def _train_all(
    lm: LanguageModel,
    trainings: Mapping[str, Training],
    followed: Mapping[str, Training],
    recipe: TrainingRecipe,
    taps: Sequence[Projection],
    advance: Advance,
    kept: Kept | None,
) -> Steps[tuple[dict[str, Tuned], dict[str, TrainingTrace]]]:
    if not followed:
        made = yield from train_steps(lm, list(trainings.values()), recipe, advance, kept=kept)
        return dict(zip(trainings, made, strict=True)), {}
    every = {**followed, **trainings}  # those that are followed first: then they are one batch, if they fit in one
    tuned, traces = yield from train_followed_steps(
        lm, list(every.values()), recipe, range(len(followed)), taps, advance, kept, factors_only=True
    )
    found = dict(zip(every, tuned, strict=True))
    return {name: found[name] for name in trainings}, dict(zip(followed, traces, strict=True))


def _corrected(
    prepared: Prepared,
    lm: LanguageModel,
    recipe: TrainingRecipe,
    trainings: Mapping[str, Training],
    tuned: dict[str, Tuned],
    names: Sequence[str],
    size: float,
    kept: Kept | None,
) -> Steps[dict[str, float]]:
    """Train again, at corrected rates, what is not as large as `size`; each one's size over it in the end."""
    queries = prepared.prompts.queries[:SIZED_ON]
    base = ask(lm, queries, prepared.zero_shot).settings[0]
    latest, open_ = {name: tuned[name] for name in names}, list(names)
    tried: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for round_ in range(_ROUNDS):
        asked = ask_each(lm, queries, prepared.zero_shot, [latest[name] for name in open_])
        for name, setting in zip(open_, asked, strict=True):
            tried[name].append((latest[name].lr, update_size(base, setting) / size))
            if nearest(tried[name]) == tried[name][-1]:
                tuned[name] = latest[name]
        open_ = [name for name in open_ if not is_close(tried[name][-1][1])]
        if not open_ or round_ == _ROUNDS - 1:
            break
        again = [replace(trainings[name], rate=next_rate(tried[name])) for name in open_]
        made = yield from train_steps(lm, again, recipe, kept=kept)
        latest = dict(zip(open_, made, strict=True))
    return {name: nearest(tried[name])[1] for name in names}


def unsteady(trained: Mapping[str, Tuned], still: Tuned) -> list[str]:
    """A warning for each training on the run's own texts, of which rounding may decide where it ends.

    Where steps are too long for the curvature, the loss jumps and a difference in the last digit grows a millionfold:
    the same training ends elsewhere on another processor. `still` is the training at a rate of 0, whose losses are the
    untouched model's. Of texts alone: a wrong label costs a text little, but is all of the loss of labels.
    """
    found: list[str] = []
    for name, tuned in trained.items():
        own_texts = base_name(name) in ("ft", "ft_flipped_labels", "ft_random_labels")
        # Not strict: where other labels are longer, fewer demonstrations may fit, and the last are dropped.
        steps = zip(tuned.losses, still.losses, strict=False) if own_texts and tuned.status == "ok" else ()
        jumps = [(step, *losses) for step, losses in enumerate(steps, 1) if losses[0] > _STEADY * losses[1]]
        if jumps:
            step, loss, before = jumps[0]
            found.append(
                f"{name} is unstable at learning rate {tuned.lr:g}: its loss is {loss:.3g} at step {step}, "
                f"the untouched model's {before:.3g}. Where it ends depends on rounding; give a smaller --lr."
            )
    return found


class Scalable(Patch, Protocol):
    """A patch that can be made larger or smaller."""

    def scaled(self, factor: float) -> Any: ...


def as_large(prepared: Prepared, lm: LanguageModel, zsl: Setting, patch: Scalable, size: float) -> Scalable:
    """A change of weights, scaled until its update is as large as `size` on the first queries."""
    queries = prepared.prompts.queries[:SIZED_ON]
    factor, tried = 1.0, list[tuple[float, float]]()
    for _ in range(_ROUNDS if size > 0 else 0):
        made = ask(lm, queries, prepared.zero_shot, patch.scaled(factor) if tried else patch)
        tried.append((factor, update_size(zsl, made.settings[0]) / size))
        if is_close(tried[-1][1]):
            break
        factor = next_rate(tried)
    best = nearest(tried)[0] if tried else 1.0
    return patch if best == 1.0 else patch.scaled(best)


def update_size(zsl: Setting, setting: Setting) -> float:
    """The mean of ‖Δh‖ / ‖h_zsl‖ over queries and layers; infinite where training diverged."""
    assert zsl.h is not None and setting.h is not None
    # The control may have been asked fewer queries.
    found = overall_mean(relative_update_norm(zsl.h[: len(setting.h)], setting.h))
    return found if np.isfinite(found) else float("inf")


def is_close(size: float) -> bool:
    """Whether an update's size over the wanted one counts as equal."""
    return 1 / CLOSE <= size <= CLOSE


def nearest(tried: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of rates and the sizes over the wanted one that they gave: where the size is nearest, as a factor; the smallest
    rate, where none has a size."""
    return min(tried, key=lambda each: (abs(np.log(each[1])) if each[1] > 0 else float("inf"), _rate(each)))


def next_rate(tried: Sequence[tuple[float, float]]) -> float:
    """The rate to try next, from those that were tried and the sizes over the wanted one that they gave.

    An update grows as a power of its rate, log size = p · log rate + c, with p near 1 while it is small: the line
    through a rate that gave too little and one that gave too much, or through the last two. A training that ran away
    has no size, or a far larger one.
    """
    less, more = [each for each in tried if 0 < each[1] < 1], [each for each in tried if each[1] >= 1]
    if less and more:
        (low, little), (high, much) = max(less, key=_rate), min(more, key=_rate)
        if abs(low) < abs(high):
            if np.isfinite(much):
                return float(low * (high / low) ** (np.log(little) / np.log(little / much)))
            straight = low / little
            return straight if abs(straight) < 0.9 * abs(high) else float(low * (high / low) ** 0.5)
    known = [each for each in tried if 0 < each[1] < float("inf")]
    if not known:  # a much smaller rate is the only way back
        return tried[-1][0] / _LARGEST_CORRECTION
    rate, size = known[-1]
    if tried[-1] != known[-1]:  # the last has no size: between it and the last that has one
        return float(rate * np.sqrt(tried[-1][0] / rate))
    power = 1.0
    if len(known) > 1:
        rate_before, size_before = known[-2]
        power = float(np.clip(np.log(size / size_before) / np.log(rate / rate_before), *_POWERS))
    return rate * float(np.clip(size ** (-1 / power), 1 / _LARGEST_CORRECTION, _LARGEST_CORRECTION))


def _rate(tried: tuple[float, float]) -> float:
    return abs(tried[0])
