"""Fine-tuning in the comparison: plain SGD on the demonstrations, one per step, in the order of the prompt.

For the projections (k and v, or q, k and v, or v) the update is computed in its dual form,

    ΔW ← ΔW − lr · Σ_t g_t x_tᵀ,      g_t = ∂loss/∂(W x_t)

so nothing is differentiated that nothing reads and the base weights stay untouched. Trainings are independent small
changes of shared weights, so they run as rows of one batch, whether they differ in the learning rate, the order or
the labels. Dai et al. 2022, appendix B (their release: SGD, batch 1, one epoch, all-token loss).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dualview.anatomy.layers import Projection
from dualview.io.errors import UserError
from dualview.learning.captured_step import captured
from dualview.learning.distill import distil
from dualview.learning.recipe import (
    Status,
    Training,
    TrainingRecipe,
    Tuned,
    differentiable,
    projections_of,
    steps_of,
)
from dualview.learning.training_step import Shown, Tape, step_logits
from dualview.learning.weight_patches import Deltas, Linearised, Parameters
from dualview.models.language_model import LanguageModel
from dualview.models.probe import first_order
from dualview.models.scoring import Patch
from dualview.tasks.prompts import TrainingSequence

# What one batch may take besides the weights: logits of all rows and (layer-causal) layers together, and the changes of
# all rows, which may also be a quarter of the weights.
_LOGIT_BYTES = {"cpu": 1 << 29, "cuda": 1 << 31}
_DELTA_BYTES = 1 << 31


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


def finetune(
    lm: LanguageModel,
    sequences: Sequence[TrainingSequence],
    rates: Sequence[float],
    recipe: TrainingRecipe = TrainingRecipe(),
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
) -> list[Tuned]:
    """Train on the same sequences once for each learning rate; `lm` itself is not changed."""
    return train(lm, [Training(sequences, rate) for rate in rates], recipe, progress, watch)


def train(
    lm: LanguageModel,
    trainings: Sequence[Training],
    recipe: TrainingRecipe = TrainingRecipe(),
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
) -> list[Tuned]:
    """Every training from the base weights, as many at once as memory allows; `lm` itself is not changed.

    With `watch` (not for params `all`) the trainings must be one batch: `batches`.
    """
    for training in trainings:
        if not math.isfinite(training.rate):
            raise UserError(f"The learning rate must be a finite number, not {training.rate}.")
    if recipe.epochs < 1:
        raise UserError(f"--epochs must be at least 1, not {recipe.epochs}.")
    wide = differentiable(lm, recipe)
    if recipe.rule == "distilled":
        if watch is not None:
            raise UserError(
                "Distillation is not a sum over the demonstrations' tokens, so it has no dual form to follow; "
                "use --ft-rule sgd or layer-causal."
            )
        tuned = [distil(wide, training, recipe, progress) for training in trainings]
    elif recipe.params == "all":
        tuned = [_train_parameters(wide, training, recipe, progress) for training in trainings]
    else:
        together = batches(wide, trainings, recipe)
        assert watch is None or len(together) == 1, "one batch of trainings can be watched at a time"
        tuned = [t for batch in together for t in _train_batch(wide, batch, recipe, progress, watch)]
    return tuned if wide is lm else moved_to(tuned, lm)


def moved_to(tuned: Sequence[Tuned], lm: LanguageModel) -> list[Tuned]:
    """What was trained on a copy of the model, for the model itself."""
    return [replace(t, patch=_moved(t.patch, lm)) for t in tuned]


def batches(lm: LanguageModel, trainings: Sequence[Training], recipe: TrainingRecipe) -> list[Sequence[Training]]:
    """The trainings, in order, in batches that fit in memory."""
    longest = max(len(sequence.ids) for training in trainings for sequence in training.sequences)
    layers = len(lm.anatomy.blocks) if recipe.rule == "layer-causal" else 1
    delta = sum(4 * p.d_out * p.d_in for p in projections_of(lm, recipe))
    weights = sum(p.numel() * p.element_size() for p in lm.model.parameters())
    logits = 4 * lm.vocab * longest * layers
    by_logits = _LOGIT_BYTES.get(lm.device.type, _LOGIT_BYTES["cpu"]) // logits
    room = min(by_logits, max(_DELTA_BYTES, weights // 4) // max(1, delta))
    # Where positions are scaled by the length of what is read, padding would change a shorter row.
    mixed = lm.shares_prefix(0, longest)
    found: list[list[Training]] = []
    for training in trainings:
        last = found[-1] if found else []
        if last and len(last) < room and (mixed or last[0].sequences == training.sequences):
            last.append(training)
        else:
            found.append([training])
    return list(found)


def _train_batch(
    lm: LanguageModel,
    trainings: Sequence[Training],
    recipe: TrainingRecipe,
    progress: Callable[[int], None] | None,
    watch: Watch | None,
) -> list[Tuned]:
    steps = [steps_of(training.sequences, recipe) for training in trainings]
    batch = _Batch(lm, [training.rate for training in trainings], recipe, () if watch is None else watch.taps)
    history: list[Float[Tensor, " row"]] = []
    shape, count = Shown.widest(steps, recipe.loss), max(map(len, steps))
    still = Shown.of([own[0] for own in steps], recipe.loss, lm, [False] * len(steps), **shape)
    with captured(batch.step, still, count, lm) as replay:
        for number in range(count):
            # A training that has ended is shown its last sequence again and stays where it is.
            sequences = [own[min(number, len(own) - 1)] for own in steps]
            moving = [number < len(own) for own in steps]
            rows = list(range(len(steps)))
            if replay is not None:
                tape, losses, signals = replay(Shown.of(sequences, recipe.loss, lm, moving, **shape))
            else:
                if number == 0:  # all trainings are still the same model: each sequence is shown once
                    distinct = list(dict.fromkeys(sequences))
                    rows, sequences = [distinct.index(sequence) for sequence in sequences], distinct
                shown = Shown.of(sequences, recipe.loss, lm, moving)
                tape, losses, signals = batch.step(shown, rows if number == 0 else None)
            if watch is not None:
                watch.on_step(Step(number, tape, signals, batch.deltas, rows))
            history.append(losses[rows] if number == 0 else losses.clone())
            if progress is not None:
                progress(len(trainings))
    deltas = batch.deltas
    if recipe.rule == "linearised":
        deltas = Linearised(deltas.projections, deltas.weights, deltas.biases)
    losses = torch.stack(history, 1).tolist()  # once, at the end: reading a number makes a GPU wait
    return [
        Tuned(training.rate, deltas.pick(r), tuple(losses[r][: len(steps[r])]), "ok" if well else "diverged")
        for r, (training, well) in enumerate(zip(trainings, batch.alive.tolist(), strict=True))
    ]


class _Batch:
    """Several trainings as rows of one batch: their changes so far, and the step that moves them on."""

    def __init__(
        self, lm: LanguageModel, rates: Sequence[float], recipe: TrainingRecipe, taps: tuple[Projection, ...] = ()
    ) -> None:
        self.lm, self.recipe, self.taps = lm, recipe, taps
        self.exact = torch.promote_types(lm.dtype, torch.float32)
        self.deltas = Deltas.zero(projections_of(lm, recipe), len(rates), self.exact)
        self.lr = torch.tensor(rates, dtype=self.exact, device=lm.device)
        self.alive = torch.ones_like(self.lr, dtype=torch.bool)

    def step(
        self, shown: Shown, rows: list[int] | None = None
    ) -> tuple[Tape, Float[Tensor, " row"], list[Float[Tensor, "row token d_out"]]]:
        """One step of every training; the tape, the losses before it, and every projection's error signals.

        `rows`, at the first step, says which row of what is shown is each training's.
        """
        tape, losses, signals = self._descend(shown, at_base=rows is not None)
        each = slice(None) if rows is None else rows
        self.alive &= _finite(losses, signals)[each]
        moving = self.alive & shown.moving
        for (index, x, _), g in zip(tape.calls, signals, strict=True):
            # e_t = −lr · g_t, the error signals; a diverged row stops moving, its neighbours in the batch go on
            e = -self.lr.to(g.device)[:, None, None] * g[each].to(self.exact)
            e = torch.where(moving.to(g.device)[:, None, None], e, 0.0)
            self.deltas.weights[index].baddbmm_(e.mT, x[each].to(self.exact))
            bias = self.deltas.biases[index]
            if bias is not None:
                bias.add_(e.sum(1))
        return tape, losses, signals

    def _descend(
        self, shown: Shown, *, at_base: bool
    ) -> tuple[Tape, Float[Tensor, " row"], list[Float[Tensor, "row token d_out"]]]:
        lm, rule, deltas = self.lm, self.recipe.rule, self.deltas
        tape = Tape(deltas.projections, None if at_base or rule == "linearised" else deltas, self.taps)
        if at_base or rule != "linearised":
            with torch.enable_grad(), tape.running():
                losses = shown.losses(step_logits(lm, shown, rule))
            return tape, losses.detach(), tape.signals(losses.sum())
        # The gradient at the base weights, along what the loss of the first-order expansion asks of the logits there.
        with torch.no_grad(), Linearised(deltas.projections, deltas.weights, deltas.biases).applied():
            expanded = first_order(step_logits(lm, shown, rule))
        with torch.enable_grad():
            losses = shown.losses(expanded.requires_grad_())
            [pull] = torch.autograd.grad(losses.sum(), [expanded])
            with tape.running():
                logits = step_logits(lm, shown, rule)
        return tape, losses.detach(), tape.signals((logits * pull).sum())


def _finite(losses: Float[Tensor, " row"], signals: Sequence[Float[Tensor, "row token d_out"]]) -> Bool[Tensor, " row"]:
    """Which rows have a finite loss and finite error signals."""
    sums = torch.stack([g.sum((1, 2), dtype=losses.dtype).to(losses.device) for g in signals])
    return torch.isfinite(losses) & torch.isfinite(sums).all(0)


def _train_parameters(
    lm: LanguageModel, training: Training, recipe: TrainingRecipe, progress: Callable[[int], None] | None
) -> Tuned:
    """SGD on every parameter of the model, on a copy of them."""
    values = {name: p.detach().clone().requires_grad_() for name, p in lm.model.named_parameters()}
    patch = Parameters(lm.model, values)
    history: list[float] = []
    status: Status = "ok"
    steps = steps_of(training.sequences, recipe)
    shape = Shown.widest([steps], recipe.loss)

    def differentiate(shown: Shown) -> tuple[Float[Tensor, ""], tuple[Tensor, ...]]:
        with torch.enable_grad(), patch.applied():
            loss = shown.losses(step_logits(lm, shown, recipe.rule)).sum()
        return loss.detach(), torch.autograd.grad(loss, list(values.values()), materialize_grads=True)

    with captured(differentiate, Shown.of([steps[0]], recipe.loss, lm, [True], **shape), len(steps), lm) as replay:
        for sequence in steps:
            if replay is not None:
                loss, gradients = replay(Shown.of([sequence], recipe.loss, lm, [True], **shape))
            else:
                loss, gradients = differentiate(Shown.of([sequence], recipe.loss, lm))
            history.append(float(loss))
            if not math.isfinite(history[-1]):
                status = "diverged"
                break
            with torch.no_grad():
                for value, gradient in zip(values.values(), gradients, strict=True):
                    value.sub_(gradient, alpha=training.rate)
            if progress is not None:
                progress(1)
    return Tuned(
        training.rate, Parameters(lm.model, {n: v.detach() for n, v in values.items()}), tuple(history), status
    )


def _moved(patch: Patch, lm: LanguageModel) -> Patch:
    if isinstance(patch, Deltas):
        return patch.moved_to(lm.anatomy)
    assert isinstance(patch, Parameters)
    return Parameters(lm.model, {name: value.to(lm.dtype) for name, value in patch.values.items()})
