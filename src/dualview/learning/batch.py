"""Several trainings as rows of one batch: the step that moves them on, recorded where it can be, and their results.

The update is computed in its dual form, as `finetune` says. A batch whose step is recorded can be trained again at
other rates without recording it again; `Kept` finds it for trainings that are shown the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.anatomy.layers import Projection
from dualview.learning.captured_step import Recorded, record
from dualview.learning.recipe import Training, TrainingRecipe, Tuned, projections_of, steps_of
from dualview.learning.training_step import Shown, Tape, differentiated, finite, stacked, step_logits
from dualview.learning.turns import Steps
from dualview.learning.weight_patches import Deltas, Linearised
from dualview.models.language_model import LanguageModel
from dualview.models.probe import first_order
from dualview.tasks.prompts import TrainingSequence

Made = tuple[Tape, Float[Tensor, " row"], list[Float[Tensor, "row token d_out"]]]
"""What a step leaves: the tape, the losses before it, and every projection's error signals."""
_FEW = 3
"""A batch of more than so many times the rows is not used for them."""
_Shown = tuple[list[TrainingSequence], list[bool]]
"""What each row is shown at a step, and which rows it moves."""


@dataclass(frozen=True)
class Step:
    """One step of a batch of trainings, when it has been taken; the next overwrites its tensors."""

    number: int
    tape: Tape
    signals: list[Float[Tensor, "row token d_out"]]
    """g_t of each of the tape's calls."""
    deltas: Deltas
    """The changes that it leaves."""
    rows: list[int]
    """Which row of the tape and of the signals is each training's: the first step may show a sequence once for all."""


@dataclass(frozen=True)
class Watch:
    """Follows a batch of trainings."""

    on_step: Callable[[Step], None]
    taps: tuple[Projection, ...] = ()
    """Projections whose inputs and outputs the tape also keeps, as they are at the weights of the step."""


class Batch:
    """Several trainings as rows of one batch: their changes so far, and the step that moves them on."""

    def __init__(
        self,
        lm: LanguageModel,
        sequences: Sequence[Sequence[TrainingSequence]],
        recipe: TrainingRecipe,
        taps: tuple[Projection, ...] = (),
    ) -> None:
        """sequences   of each row"""
        self.lm, self.sequences, self.recipe, self.taps = lm, list(sequences), recipe, taps
        self.exact = torch.promote_types(lm.dtype, torch.float32)
        self.deltas = Deltas.zero(projections_of(lm, recipe), len(sequences), self.exact)
        self.lr = torch.zeros(len(sequences), dtype=self.exact, device=lm.device)
        self.alive = torch.ones_like(self.lr, dtype=torch.bool)
        self.recorded: Recorded[Shown, Made] | None = None
        self._steps = [steps_of(own, recipe) for own in sequences]
        self._trained = False

    def train(
        self,
        rates: Sequence[float | None],
        progress: Callable[[int], None] | None = None,
        watch: Watch | None = None,
    ) -> Steps[list[Tuned]]:
        """Train from the base weights at these rates, of the rows that have one; the next training overwrites it."""
        count, loss, lm = max(map(len, self._steps)), self.recipe.loss, self.lm
        shape = Shown.widest(self._steps, loss)
        if self._trained:
            for part in (*self.deltas.weights, *self.deltas.biases):
                if part is not None:
                    part.zero_()
            self.alive.fill_(True)
        self.lr.copy_(torch.tensor([rate or 0.0 for rate in rates], dtype=self.exact))
        if not self._trained:
            still = Shown.of([own[0] for own in self._steps], loss, lm, [False] * len(rates), **shape)
            self.recorded, self._trained = record(self.step, still, count, lm), True
            yield  # others record theirs before the GPU has something to do: recording waits for it
        # A training that has ended is shown its last sequence again and stays where it is.
        shown = [
            (
                [own[min(number, len(own) - 1)] for own in self._steps],
                [number < len(own) and rate is not None for own, rate in zip(self._steps, rates, strict=True)],
            )
            for number in range(count)
        ]
        history: list[Float[Tensor, " row"]] = []

        def took(made: Made, rows: list[int] | None = None) -> None:
            tape, losses, signals = made
            if watch is not None:
                watch.on_step(Step(len(history), tape, signals, self.deltas, rows or list(range(len(rates)))))
            history.append(losses.clone() if rows is None else losses[rows])
            if progress is not None:
                progress(len(rates))

        yield from self._taken(shown, took) if self.recorded is None else self._replayed(self.recorded, shown, took)
        return self._tuned(rates, history)

    def _taken(self, steps: Sequence[_Shown], took: Callable[..., None]) -> Steps[None]:
        """The steps one kernel at a time; each is as long as its longest row."""
        for number, (sequences, moving) in enumerate(steps):
            rows = None
            if number == 0:  # all trainings are still the same model: each sequence is shown once
                distinct = list(dict.fromkeys(sequences))
                rows, sequences = [distinct.index(sequence) for sequence in sequences], distinct
            took(self.step(Shown.of(sequences, self.recipe.loss, self.lm, moving), rows), rows)
            yield

    def _replayed(
        self, recorded: Recorded[Shown, Made], steps: Sequence[_Shown], took: Callable[..., None]
    ) -> Steps[None]:
        """The same by the recorded step; nothing waits for the GPU before the last is taken."""
        every = Shown.of_each(steps, self.recipe.loss, self.lm, **Shown.widest(self._steps, self.recipe.loss))
        with recorded.running():
            for shown in every:
                with recorded.turn():
                    took(recorded.replay(shown))
                yield
            yield from recorded.waited()

    def _tuned(self, rates: Sequence[float | None], history: Sequence[Float[Tensor, " row"]]) -> list[Tuned]:
        deltas = self.deltas
        if self.recipe.rule == "linearised":
            deltas = Linearised(deltas.projections, deltas.weights, deltas.biases)
        losses = torch.stack(list(history), 1).tolist()  # once, at the end: reading a number makes a GPU wait
        return [
            Tuned(rate, deltas.pick(r), tuple(losses[r][: len(self._steps[r])]), "ok" if well else "diverged")
            for r, (rate, well) in enumerate(zip(rates, self.alive.tolist(), strict=True))
            if rate is not None
        ]

    def step(self, shown: Shown, rows: list[int] | None = None) -> Made:
        """One step of every training; the tape, the losses before it, and every projection's error signals.

        `rows`, at the first step, says which row of what is shown is each training's.
        """
        tape, losses, signals = self._descend(shown, at_base=rows is not None)
        each = slice(None) if rows is None else rows
        stacks = stacked(signals)
        self.alive &= finite(losses, [stack for _, stack in stacks])[each]
        moving = self.alive & shown.moving
        for numbers, stack in stacks:
            # e_t = −lr · g_t, the error signals; a diverged row stops moving, its neighbours in the batch go on
            errors = -self.lr.to(stack.device)[:, None, None] * stack[:, each].to(self.exact)
            errors = torch.where(moving.to(stack.device)[:, None, None], errors, 0.0)
            for number, e in zip(numbers, errors, strict=True):
                index, x, _ = tape.calls[number]
                self.deltas.weights[index].baddbmm_(e.mT, x[each].to(self.exact))
                bias = self.deltas.biases[index]
                if bias is not None:
                    bias.add_(e.sum(1))
        return tape, losses, signals

    def _descend(self, shown: Shown, *, at_base: bool) -> Made:
        lm, rule, deltas = self.lm, self.recipe.rule, self.deltas
        tape = Tape(deltas.projections, None if at_base or rule == "linearised" else deltas, self.taps)
        if at_base or rule != "linearised":
            return tape, *differentiated(lm, shown, rule, tape)
        # The gradient at the base weights, along what the loss of the first-order expansion asks of the logits there.
        with torch.no_grad(), Linearised(deltas.projections, deltas.weights, deltas.biases).applied():
            expanded = first_order(step_logits(lm, shown, rule))
        with torch.enable_grad():
            losses = shown.losses(expanded.requires_grad_())
            [pull] = torch.autograd.grad(losses.sum(), [expanded])
            with tape.running():
                logits = step_logits(lm, shown, rule)
        return tape, losses.detach(), tape.signals((logits * pull).sum())


class Kept:
    """A batch whose recorded step is kept, for trainings that are shown the same at other rates.

    It keeps the memory of a step and of all changes: only where there is room, and not for longer than needed.
    """

    def __init__(self) -> None:
        self._batch: Batch | None = None

    def keep(self, batch: Batch) -> None:
        """Keep the batch, if repeating it saves a recording."""
        self._batch = batch if batch.recorded is not None else self._batch

    def rows(self, lm: LanguageModel, trainings: Sequence[Training], recipe: TrainingRecipe) -> list[int] | None:
        """For each training a row of the kept batch that is shown the same; None where it does not serve them all.

        Nor does it serve a few: rows that stay still take as long as others, longer than recording a smaller batch.
        """
        batch, found = self._batch, list[int]()
        if batch is None or batch.lm is not lm or batch.recipe != recipe:
            return None
        if len(trainings) * _FEW < len(batch.sequences):
            return None
        for training in trainings:
            free = (r for r, own in enumerate(batch.sequences) if own == training.sequences and r not in found)
            row = next(free, None)
            if row is None:
                return None
            found.append(row)
        return found

    def train(self, trainings: Sequence[Training], rows: Sequence[int]) -> Steps[list[Tuned]]:
        """The trainings as these rows; the others stay still."""
        assert self._batch is not None
        rates = dict(zip(rows, (training.rate for training in trainings), strict=True))
        made = yield from self._batch.train([rates.get(r) for r in range(len(self._batch.sequences))])
        by_row = dict(zip(sorted(rows), made, strict=True))
        return [by_row[r].alone() for r in rows]
