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
from contextlib import nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.io.errors import UserError
from dualview.learning.batch import Batch, Kept, Watch
from dualview.learning.captured_step import record
from dualview.learning.distill import distil_steps
from dualview.learning.recipe import (
    LetGo,
    Status,
    Training,
    TrainingRecipe,
    Tuned,
    differentiable,
    projections_of,
    steps_of,
)
from dualview.learning.training_step import Shown, step_logits
from dualview.learning.turns import Steps, finish
from dualview.learning.weight_patches import Deltas, Parameters
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Patch
from dualview.tasks.prompts import TrainingSequence

# What one batch may take besides the weights: logits of all rows and (layer-causal) layers together, and the changes of
# all rows, which may also be a quarter of the weights.
_LOGIT_BYTES = {"cpu": 1 << 29, "cuda": 1 << 31}
_DELTA_BYTES = 1 << 31


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
    return finish(train_steps(lm, trainings, recipe, progress, watch))


def train_steps(
    lm: LanguageModel,
    trainings: Sequence[Training],
    recipe: TrainingRecipe = TrainingRecipe(),
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
    kept: Kept | None = None,
) -> Steps[list[Tuned]]:
    """`train`, to be advanced in turns with others; with `kept`, what is shown the same again is not recorded again."""
    check_trainings(trainings, recipe)
    wide = differentiable(lm, recipe)
    tuned: list[Tuned] = []
    if recipe.rule == "distilled":
        if watch is not None:
            raise UserError(
                "Distillation is not a sum over the demonstrations' tokens, so it has no dual form to follow; "
                "use --ft-rule sgd or layer-causal."
            )
        for training in trainings:
            tuned.append((yield from distil_steps(wide, training, recipe, progress)))
    elif recipe.params == "all":
        for training in trainings:
            tuned.append((yield from _train_parameters(wide, training, recipe, progress)))
    else:
        together = batches(wide, trainings, recipe)
        assert watch is None or len(together) == 1, "one batch of trainings can be watched at a time"
        for batch in together:
            tuned += yield from _train_batch(wide, batch, recipe, progress, watch, kept)
    return tuned if wide is lm else moved_to(tuned, lm)


def check_trainings(trainings: Sequence[Training], recipe: TrainingRecipe) -> None:
    """That there is something to do, and at a rate that is a number."""
    for training in trainings:
        if not math.isfinite(training.rate):
            raise UserError(f"The learning rate must be a finite number, not {training.rate}.")
    if recipe.epochs < 1:
        raise UserError(f"--epochs must be at least 1, not {recipe.epochs}.")


def moved_to(tuned: Sequence[Tuned], lm: LanguageModel) -> list[Tuned]:
    """What was trained on a copy of the model, for the model itself."""
    return [replace(t, patch=_moved(t.patch, lm)) for t in tuned]


def batches(lm: LanguageModel, trainings: Sequence[Training], recipe: TrainingRecipe) -> list[Sequence[Training]]:
    """The trainings, in order, in batches that fit in memory."""
    longest = max(len(sequence.ids) for training in trainings for sequence in training.sequences)
    delta = sum(4 * p.d_out * p.d_in for p in projections_of(lm, recipe))
    weights = sum(p.numel() * p.element_size() for p in lm.model.parameters())
    room = min(rows_of_logits(lm, longest, recipe), max(_DELTA_BYTES, weights // 4) // max(1, delta))
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


def rows_of_logits(lm: LanguageModel, longest: int, recipe: TrainingRecipe) -> int:
    """How many sequences of this length have room for their logits in one step; 0 if not even one has."""
    layers = len(lm.anatomy.blocks) if recipe.rule == "layer-causal" else 1
    return _LOGIT_BYTES.get(lm.device.type, _LOGIT_BYTES["cpu"]) // (4 * lm.vocab * longest * layers)


def _train_batch(
    lm: LanguageModel,
    trainings: Sequence[Training],
    recipe: TrainingRecipe,
    progress: Callable[[int], None] | None,
    watch: Watch | None,
    kept: Kept | None,
) -> Steps[list[Tuned]]:
    rows = None if kept is None or watch is not None else kept.rows(lm, trainings, recipe)
    if kept is not None and rows is not None:
        return (yield from kept.train(trainings, rows))
    sequences = [training.sequences for training in trainings]
    batch = Batch(lm, sequences, recipe, () if watch is None else watch.taps)
    tuned = yield from batch.train([training.rate for training in trainings], progress, watch)
    if kept is None or batch.recorded is None:
        return tuned
    kept.keep(batch)
    return [each.alone() for each in tuned]


def _train_parameters(
    lm: LanguageModel, training: Training, recipe: TrainingRecipe, progress: Callable[[int], None] | None
) -> Steps[Tuned]:
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

    still = Shown.of([steps[0]], recipe.loss, lm, [True], **shape)
    recorded = record(differentiate, still, len(steps), lm)
    with nullcontext() if recorded is None else recorded.running():
        for sequence in steps:
            with nullcontext() if recorded is None else recorded.turn():
                if recorded is not None:
                    loss, gradients = recorded.replay(Shown.of([sequence], recipe.loss, lm, [True], **shape))
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
            yield
    return Tuned(
        training.rate, Parameters(lm.model, {n: v.detach() for n, v in values.items()}), tuple(history), status
    )


def _moved(patch: Patch, lm: LanguageModel) -> Patch:
    if isinstance(patch, LetGo):
        return patch
    if isinstance(patch, Deltas):
        return patch.moved_to(lm.anatomy)
    assert isinstance(patch, Parameters)
    return Parameters(lm.model, {name: value.to(lm.dtype) for name, value in patch.values.items()})
