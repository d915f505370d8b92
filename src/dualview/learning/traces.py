"""The factors of every projection's update in fine-tuning, token by token.

    ΔW = Σ_t e_t x_tᵀ,      e_t = −lr · ∂loss/∂(W x_t)

x_t is what the projection read at training token t, e_t the error signal it got back, both at the weights of that
step (Irie et al. 2022: a trained linear layer is attention over its training data, keys x_t, values e_t).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.anatomy.layers import Projection
from dualview.anatomy.onednn_products import onednn_gradients
from dualview.learning.batch import Kept, Step, Watch
from dualview.learning.finetune import batches, check_trainings, moved_to, rows_of_logits, train_steps
from dualview.learning.recipe import (
    LetGo,
    Training,
    TrainingRecipe,
    Tuned,
    differentiable,
    projections_of,
    steps_of,
)
from dualview.learning.training_step import Shown, Tape, differentiated, finite
from dualview.learning.turns import Steps, finish
from dualview.learning.weight_patches import Deltas, Linearised
from dualview.models.language_model import LanguageModel
from dualview.tasks.prompts import TrainingSequence

_TOKENS = 256
"""The most tokens of one pass at the base weights: products gain little from more, and activations take memory."""


@dataclass(frozen=True)
class Factors:
    """One projection's training tokens: inputs and error signals, in the order of the steps."""

    projection: Projection
    inputs: Float[Tensor, "token d_in"]
    errors: Float[Tensor, "token row"]


@dataclass(frozen=True)
class TrainingTokens:
    """Which token each row of the factors is."""

    step: Int[Tensor, " token"]
    demo: Int[Tensor, " token"]
    position: Int[Tensor, " token"]
    """In the training sequence, BOS included."""


@dataclass(frozen=True)
class TrainingTrace:
    """One fine-tuning run with its factors, and the tapped projections' outputs at every training token."""

    tuned: Tuned
    tokens: TrainingTokens
    factors: tuple[Factors, ...]
    tapped: tuple[Float[Tensor, "token row"], ...]
    """Of each projection in `taps`, as it was during training."""


def trace_training(
    lm: LanguageModel,
    sequences: Sequence[TrainingSequence],
    rates: Sequence[float],
    recipe: TrainingRecipe,
    taps: Sequence[Projection] = (),
    progress: Callable[[int], None] | None = None,
) -> list[TrainingTrace]:
    """Fine-tune once more, keeping every projection's inputs and error signals; one trace for each rate.

    At a rate of 0 the weights stay the base's and the error signals are those of a rate of 1: what the gradient says
    at the first pass. `progress` is called for every step, once for each rate.
    """
    trainings = [Training(sequences, rate) for rate in rates]
    return finish(train_followed_steps(lm, trainings, recipe, range(len(rates)), taps, progress))[1]


def train_followed_steps(
    lm: LanguageModel,
    trainings: Sequence[Training],
    recipe: TrainingRecipe,
    followed: Sequence[int],
    taps: Sequence[Projection] = (),
    progress: Callable[[int], None] | None = None,
    kept: Kept | None = None,
    *,
    factors_only: bool = False,
) -> Steps[tuple[list[Tuned], list[TrainingTrace]]]:
    """Train as `train_steps` does, and trace some of the trainings, which must be shown the same sequences.

    factors_only   of those, nobody asks for the changes themselves: the memory of the batch is let go of before the
                   traces are put together
    """
    check_trainings(trainings, recipe)
    wide = differentiable(lm, recipe)  # if a copy is trained, it is the copy that is watched
    tuned: dict[int, Tuned] = {}
    traces: dict[int, TrainingTrace] = {}
    # What does not move takes no steps, except to be told that its rule has no trace.
    still = [i for i in followed if trainings[i].rate == 0 and recipe.rule != "distilled"]
    for i in still:  # first: the changes of the others take memory
        traces[i] = yield from _still_steps(wide, trainings[i], recipe, taps, progress, factors_only=factors_only)
        tuned[i] = traces[i].tuned
    rest = [i for i in range(len(trainings)) if i not in still]
    for batch in batches(wide, [trainings[i] for i in rest], recipe) if rest else ():
        numbers, rest = rest[: len(batch)], rest[len(batch) :]
        within = [at for at, i in enumerate(numbers) if i in followed]
        follower = Follower(wide, batch, recipe, within, taps) if within else None
        watch = None if follower is None else follower.watch
        made = yield from train_steps(wide, batch, recipe, progress, watch, kept)
        if factors_only:
            made = [each.spent() if at in within else each.alone() for at, each in enumerate(made)]
        if follower is not None:
            own = follower.traces(made, range(len(within)))
            traces.update(zip((numbers[at] for at in within), own, strict=True))
        tuned.update(zip(numbers, made, strict=True))
    every = [tuned[i] for i in range(len(trainings))]
    return (every if wide is lm else moved_to(every, lm)), [traces[i] for i in followed]


def _still_steps(
    lm: LanguageModel,
    training: Training,
    recipe: TrainingRecipe,
    taps: Sequence[Projection],
    progress: Callable[[int], None] | None,
    *,
    factors_only: bool,
) -> Steps[TrainingTrace]:
    """The trace at a rate of 0. No step waits for another there: sequences are rows of one pass at the base weights."""
    steps, follower = steps_of(training.sequences, recipe), Follower(lm, [training], recipe, [0], taps)
    projections, exact = projections_of(lm, recipe), torch.promote_types(lm.dtype, torch.float32)
    losses: dict[TrainingSequence, Tensor] = {}
    well: list[Tensor] = []
    for group in _shown_together(lm, steps, recipe):
        tape = Tape(projections, None, follower.watch.taps)
        shown = Shown.of(group, recipe.loss, lm, [False] * len(group))
        # Nothing descends here, so nothing multiplies what this rounds differently from a training.
        with onednn_gradients(lm.model, lm.dtype, lm.device):
            found, signals = differentiated(lm, shown, recipe.rule, tape)
        rows = {sequence: row for row, sequence in enumerate(group)}
        taken = [(number, rows[sequence]) for number, sequence in enumerate(steps) if sequence in rows]
        losses.update(zip(group, found, strict=True))
        well.append(finite(found, [g[None] for g in signals]).all())
        for number, row in taken:
            follower.keep(number, tape, signals, [row])
            if progress is not None:
                progress(1)
        yield
    # Read once, at the end: reading a number makes a GPU wait.
    before = tuple(torch.stack([losses[sequence] for sequence in steps]).tolist())
    status = "ok" if bool(torch.stack(well).all()) else "diverged"
    kind = Linearised if recipe.rule == "linearised" else Deltas
    patch = LetGo() if factors_only else kind.zero(projections, 1, exact)
    [trace] = follower.traces([Tuned(training.rate, patch, before, status)], [0])
    return trace


def _shown_together(
    lm: LanguageModel, sequences: Sequence[TrainingSequence], recipe: TrainingRecipe
) -> list[list[TrainingSequence]]:
    """Every sequence once, by length, so that little is padded, in groups that have room in one step."""
    ordered = sorted(dict.fromkeys(sequences), key=lambda sequence: len(sequence.ids))
    # Where positions are scaled by the length of what is read, padding would change a shorter row.
    mixed = lm.shares_prefix(0, len(ordered[-1].ids))
    found: list[list[TrainingSequence]] = []
    for sequence in ordered:
        longest, last = len(sequence.ids), found[-1] if found else []
        room = min(_TOKENS // longest, rows_of_logits(lm, longest, recipe))
        if last and len(last) < room and (mixed or len(last[0].ids) == longest):
            last.append(sequence)
        else:
            found.append([sequence])
    return found


class Follower:
    """Keeps the factors of some trainings of a batch, which must be shown the same sequences, while `watch` runs."""

    def __init__(
        self,
        lm: LanguageModel,
        batch: Sequence[Training],
        recipe: TrainingRecipe,
        followed: Sequence[int],
        taps: Sequence[Projection] = (),
    ) -> None:
        """lm   the model that is trained: `differentiable`"""
        self._sequences = batch[followed[0]].sequences
        assert all(batch[i].sequences == self._sequences for i in followed), "they must be shown the same"
        self._projections = projections_of(lm, recipe)
        own = {p.name: p.module for p in lm.anatomy.projections(("q", "k", "v"))}
        self._taps = tuple(Projection(p.name, own[p.name], p.rows) for p in taps)
        self._recipe, self._followed = recipe, list(followed)
        factors = [batch[i].rate or 1.0 for i in followed]
        exact = torch.promote_types(lm.dtype, torch.float32)
        self._scale = torch.tensor(factors, dtype=exact, device=lm.device)[:, None, None]
        self._lengths = [len(sequence.ids) for sequence in steps_of(self._sequences, recipe)]
        # Of each projection by step: sequences that are shown together come in another order.
        self._inputs: dict[int, dict[int, Tensor]] = {}
        self._errors: dict[int, dict[int, Tensor]] = {}
        self._outputs: dict[str, dict[int, Tensor]] = {p.name: {} for p in taps}
        self._source: dict[int, int] = {}  # the first projection that read the same: k and v mostly do
        self._tap_source: dict[str, int] = {}
        self.watch = Watch(self._on_step, self._taps)

    def _on_step(self, step: Step) -> None:
        if step.number < len(self._lengths):  # others of the batch go on
            self.keep(step.number, step.tape, step.signals, [step.rows[i] for i in self._followed])

    def keep(self, number: int, tape: Tape, signals: Sequence[Tensor], rows: list[int]) -> None:
        """Keep a step's factors, which are these rows of what the tape saw and of its error signals."""
        length = self._lengths[number]  # what follows is padding
        # A list of rows would be sent to the GPU, which waits for it, once for every tensor.
        neighbours = list(range(rows[0], rows[0] + len(rows)))
        each = slice(rows[0], rows[0] + len(rows)) if rows == neighbours else rows
        first: dict[tuple[int, torch.Size, tuple[int, ...]], int] = {}
        for (index, x, _), g in zip(tape.calls, signals, strict=True):
            source = self._source[index] = first.setdefault(_place(x), index)
            if source == index:
                self._inputs.setdefault(index, {})[number] = x[each, :length].clone()
            self._errors.setdefault(index, {})[number] = -self._scale.to(g.device) * g[each, :length]
        trained = {id(self._projections[index].module) for index in self._errors}
        for tap in tape.tapped:
            source = first.get(_place(tap.x))
            if source is not None and id(tap.projection.module) not in trained:
                self._tap_source[tap.projection.name] = source  # its output can be made again from its input
            else:
                self._outputs[tap.projection.name][number] = tap.y[each, :length].clone()

    def traces(self, tuned: Sequence[Tuned], which: Sequence[int]) -> list[TrainingTrace]:
        """The traces of `which` of the followed trainings, when the batch is trained; what was kept is let go.

        tuned   of the whole batch
        """
        rows = slice(None) if list(which) == list(range(len(self._followed))) else list(which)
        # One projection at a time: the parts of all of them and the whole of all of them would be twice the memory.
        x, e = (
            {index: _in_order(side.pop(index), rows) for index in list(side)} for side in (self._inputs, self._errors)
        )
        y = [self._output(tap, x, rows) for tap in self._taps]
        tokens = _tokens(self._sequences, self._recipe.epochs)
        return [
            TrainingTrace(
                tuned[self._followed[i]],
                tokens,
                tuple(Factors(self._projections[index], x[self._source[index]][r], e[index][r]) for index in e),
                tuple(output[r] for output in y),
            )
            for r, i in enumerate(which)
        ]

    def _output(
        self, tap: Projection, x: dict[int, Tensor], rows: slice | list[int]
    ) -> Float[Tensor, "training token row"]:
        if tap.name not in self._tap_source:
            return _in_order(self._outputs.pop(tap.name), rows)
        with torch.no_grad():
            y = tap.module(x[self._tap_source[tap.name]])
        return y if tap.rows is None else y[..., tap.rows]


def _in_order(
    parts: dict[int, Float[Tensor, "training token width"]], rows: slice | list[int]
) -> Float[Tensor, "training token width"]:
    """The parts of some trainings, one after another by step."""
    return torch.cat([parts[number][rows] for number in sorted(parts)], 1)


def _place(x: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """Equal for the same tensor in memory."""
    return x.data_ptr(), x.shape, x.stride()


def _tokens(sequences: Sequence[TrainingSequence], epochs: int) -> TrainingTokens:
    steps = [(e * len(sequences) + d, d, len(s.ids)) for e in range(epochs) for d, s in enumerate(sequences)]
    return TrainingTokens(
        torch.cat([torch.full((n,), step) for step, _, n in steps]),
        torch.cat([torch.full((n,), demo) for _, demo, n in steps]),
        torch.cat([torch.arange(n) for _, _, n in steps]),
    )
