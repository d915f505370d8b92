"""Fine-tuning as the comparison means it: plain SGD on the demonstrations, one a step, in the order of the prompt.

For the projections (k and v, or q, k and v, or v) the update is computed in its dual form,

    ΔW ← ΔW − lr · Σ_t g_t x_tᵀ,      g_t = ∂loss/∂(W x_t)

so nothing is differentiated that nothing reads, the base weights stay untouched, and every learning rate of a grid is
one row of the same batch. Dai et al. 2022, appendix B (their release: SGD, batch 1, one epoch, all-token loss).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.anatomy.dispatch import run_forward
from dualview.anatomy.layers import Projection, Role
from dualview.io.errors import UserError
from dualview.learning.weight_patches import Deltas, Linearised, Parameters, added
from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt
from dualview.models.prefix import Causal, as_row
from dualview.models.probe import Tap, Whole, first_order, tapping
from dualview.models.scoring import Patch
from dualview.tasks.prompts import TrainingSequence

Params = Literal["kv", "qkv", "v", "all"]
Loss = Literal["all", "label"]
Rule = Literal["sgd", "layer-causal", "linearised"]
Status = Literal["ok", "diverged", "collapsed"]

ROLES_OF: dict[str, tuple[Role, ...]] = {"kv": ("k", "v"), "qkv": ("q", "k", "v"), "v": ("v",)}
# Logits of one step, all learning rates and (layer-causal) all layers together, stay below this.
_LOGIT_BYTES = 1 << 29


@dataclass(frozen=True)
class TrainingRecipe:
    """How to fine-tune; the learning rate comes apart, since a grid of them shares the work."""

    params: Params = "kv"
    loss: Loss = "all"
    epochs: int = 1
    rule: Rule = "sgd"


@dataclass(frozen=True)
class Tuned:
    """One fine-tuned model: the patch to wear, and how training went."""

    lr: float
    patch: Patch
    losses: tuple[float, ...]
    """The loss before each step."""
    status: Status = "ok"


@dataclass(frozen=True)
class Watch:
    """Tells of a training run as it goes: `told` gets each step's tape and, for each of its calls, the signals g_t."""

    told: Callable[[Tape, list[Float[Tensor, "rate_or_1 token row"]]], None]
    taps: tuple[Projection, ...] = ()
    """Projections whose inputs and outputs the tape keeps besides, as they are at the weights of the step."""


def finetune(
    lm: LanguageModel,
    sequences: Sequence[TrainingSequence],
    rates: Sequence[float],
    recipe: TrainingRecipe = TrainingRecipe(),
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
) -> list[Tuned]:
    """Train from the base weights once for each learning rate; `lm` itself is not changed.

    A negative rate climbs the loss. With `watch` (not for params `all`) the rates must fit one batch: `rate_groups`.
    """
    for rate in rates:
        if not math.isfinite(rate):
            raise UserError(f"The learning rate must be a finite number, not {rate}.")
    if recipe.epochs < 1:
        raise UserError(f"--epochs must be at least 1, not {recipe.epochs}.")
    wide = in_single_precision(lm)
    if recipe.params == "all":
        tuned = [_train_parameters(wide, sequences, rate, recipe, progress) for rate in rates]
    else:
        groups = rate_groups(lm, sequences, rates, recipe)
        assert watch is None or len(groups) == 1, "one batch of learning rates can be watched at a time"
        tuned = [t for group in groups for t in _train_projections(wide, sequences, group, recipe, progress, watch)]
    return tuned if wide is lm else [replace(t, patch=_moved(t.patch, lm)) for t in tuned]


def rate_groups(
    lm: LanguageModel, sequences: Sequence[TrainingSequence], rates: Sequence[float], recipe: TrainingRecipe
) -> list[Sequence[float]]:
    """The learning rates in batches whose logits fit in memory together."""
    longest = max(len(sequence.ids) for sequence in sequences)
    layers = len(lm.anatomy.blocks) if recipe.rule == "layer-causal" else 1
    together = max(1, _LOGIT_BYTES // (4 * lm.vocab * longest * layers))
    return [rates[start : start + together] for start in range(0, len(rates), together)]


def steps_of(sequences: Sequence[TrainingSequence], recipe: TrainingRecipe) -> list[TrainingSequence]:
    """The order of the steps: the prompt's, again for each epoch."""
    return [sequence for _ in range(recipe.epochs) for sequence in sequences]


def _train_projections(
    lm: LanguageModel,
    sequences: Sequence[TrainingSequence],
    rates: Sequence[float],
    recipe: TrainingRecipe,
    progress: Callable[[int], None] | None,
    watch: Watch | None,
) -> list[Tuned]:
    projections = lm.anatomy.projections(ROLES_OF[recipe.params])
    if not projections:
        raise UserError(f"dualview found no {recipe.params} projections to train in {lm.name}.")
    deltas = Deltas.zero(projections, len(rates), lm.dtype)
    lr = torch.tensor(rates, dtype=lm.dtype, device=lm.device)
    alive = torch.ones_like(lr, dtype=torch.bool)
    history: list[list[float]] = []
    for step, sequence in enumerate(steps_of(sequences, recipe)):
        # Before the first step all learning rates are the same model: one row does for all.
        rows = 1 if step == 0 else len(rates)
        worn = deltas if step and recipe.rule != "linearised" else None
        tape = Tape(projections, worn, () if watch is None else watch.taps)
        with torch.enable_grad(), tape.running():
            logits = sequence_logits(lm, sequence, recipe, rows)
        if recipe.rule == "linearised" and step:
            losses, pull = _at_first_order(lm, sequence, recipe, deltas)
            signals = tape.signals((logits * pull).sum())
        else:
            losses = token_losses(logits, sequence, recipe)
            signals = tape.signals(losses.sum())
        if watch is not None:
            watch.told(tape, signals)
        alive &= torch.isfinite(losses.detach()).to(alive.device)
        for g in signals:
            alive &= torch.isfinite(g.sum((1, 2))).to(alive.device)
        for (index, x, _), g in zip(tape.calls, signals, strict=True):
            # e_t = −lr · g_t, the error signals; a diverged row stops moving, its neighbours in the batch go on
            e = torch.where(alive.to(g.device)[:, None, None], -lr.to(g.device)[:, None, None] * g, 0.0)
            deltas.weights[index].baddbmm_(e.mT, x.to(e.dtype).expand(len(rates), -1, -1))
            bias = deltas.biases[index]
            if bias is not None:
                bias.add_(e.sum(1))
        history.append(losses.detach().expand(len(rates)).tolist())
        if progress is not None:
            progress(len(rates))
    if recipe.rule == "linearised":
        deltas = Linearised(deltas.projections, deltas.weights, deltas.biases)
    return [
        Tuned(rate, deltas.pick(r), tuple(row[r] for row in history), "ok" if bool(alive[r]) else "diverged")
        for r, rate in enumerate(rates)
    ]


@dataclass
class Tape:
    """Watches the projections of one training pass: their inputs x_t, and, once the loss is known, the g_t."""

    projections: tuple[Projection, ...]
    worn: Deltas | None = None
    """The change of the steps so far, if the pass is at the tuned weights."""
    taps: tuple[Projection, ...] = ()
    tapped: list[Tap] = field(default_factory=list[Tap])
    calls: list[tuple[int, Tensor, Tensor]] = field(default_factory=list[tuple[int, Tensor, Tensor]])
    """(projection, its input, its output), in the order of the pass."""

    @contextmanager
    def running(self) -> Generator[None]:
        def watch(index: int) -> Any:
            def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                x = inputs[0]
                if self.worn is not None:
                    output = added(output, self.worn.change(index, x), self.projections[index])
                if not output.requires_grad:  # nothing before the first projection is trained
                    output = output.detach().requires_grad_()
                self.calls.append((index, x.detach().flatten(1, -2), output))
                return output.clone()  # some architectures (clip_qkv) go on to change it in place

            return hook

        hooks = [p.module.register_forward_hook(watch(i)) for i, p in enumerate(self.projections)]
        try:
            with tapping(self.taps, self.tapped):  # after the others, so that a tap sees the change
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def signals(self, total: Float[Tensor, ""]) -> list[Float[Tensor, "rate token row"]]:
        """g_t of every call on the tape; each row's loss depends on its own row alone, so their sum serves all."""
        outputs = [output for _, _, output in self.calls]
        found = torch.autograd.grad(total, outputs, materialize_grads=True)
        signals: list[Tensor] = []
        for (index, _, _), gradient in zip(self.calls, found, strict=True):
            rows = self.projections[index].rows
            signals.append((gradient if rows is None else gradient[..., rows]).flatten(1, -2))
        return signals


def _at_first_order(
    lm: LanguageModel, sequence: TrainingSequence, recipe: TrainingRecipe, deltas: Deltas
) -> tuple[Float[Tensor, " rate"], Float[Tensor, "1 rate token vocab"]]:
    """The losses of the model's first-order expansion at the base weights, and their gradient by its logits."""
    with torch.no_grad(), Linearised(deltas.projections, deltas.weights, deltas.biases).applied():
        logits = first_order(sequence_logits(lm, sequence, recipe, deltas.rows))
    with torch.enable_grad():
        losses = token_losses(logits.requires_grad_(), sequence, recipe)
        [pull] = torch.autograd.grad(losses.sum(), [logits])
    return losses.detach(), pull


def first_predicted(sequence: TrainingSequence, recipe: TrainingRecipe) -> int:
    """The first token whose prediction counts."""
    return sequence.label_start if recipe.loss == "label" else 1


def token_losses(
    logits: Float[Tensor, "layer_or_1 rate token vocab"], sequence: TrainingSequence, recipe: TrainingRecipe
) -> Float[Tensor, " rate"]:
    """The loss of one demonstration for each row: the mean cross-entropy of its (or its label's) next tokens."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = torch.tensor(sequence.ids[first_predicted(sequence, recipe) :], device=logits.device)
    picked = logits.gather(-1, targets[:, None].expand(*logits.shape[:2], -1, 1))[..., 0]
    return (torch.logsumexp(logits, -1) - picked).mean(-1).sum(0)


def sequence_logits(
    lm: LanguageModel, sequence: TrainingSequence, recipe: TrainingRecipe, rows: int
) -> Float[Tensor, "layer_or_1 rate token vocab"]:
    """The logits that the loss of one demonstration reads, the same tokens in every row.

    `layer-causal` (Deutch et al. 2024, section 5): every block reads a detached input, the final norm and the
    unembedding read every block's output, and the layers' losses are summed.
    """
    ids = as_row(sequence.ids, lm.device, rows)
    at = torch.arange(ids.shape[1], device=lm.device)
    keep = at[first_predicted(sequence, recipe) - 1 : -1]
    strategy = Causal(at) if lm.fast else Whole(at, range(ids.shape[1]), 0, None)
    causal = recipe.rule == "layer-causal"
    with _layer_causal(lm) if causal else nullcontext():
        try:
            logits = run_forward(lm.model, strategy, ids, at[None].expand(rows, -1), keep, native=not lm.fast)
        except RuntimeError as error:
            if recipe.rule == "sgd":
                raise
            why = str(error).splitlines()[0]
            raise UserError(
                f"{recipe.rule} fine-tuning cannot follow {type(lm.model).__name__} ({why}); use --ft-rule sgd."
            ) from error
    return logits.unflatten(0, (-1, rows))


@contextmanager
def _layer_causal(lm: LanguageModel) -> Generator[None]:
    outputs: list[Tensor] = []

    def cut(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        detached = tuple(a.detach() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        kwargs = {**kwargs, **{k: kwargs[k].detach() for k in ("hidden_states",) if k in kwargs}}
        return detached, kwargs

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    def all_layers(_module: nn.Module, args: tuple[Any, ...]) -> Any:
        # NanoChat norms its embeddings with the same module, before any block has run.
        if len(outputs) < len(lm.anatomy.blocks):
            return None
        return (torch.cat([output.to(outputs[-1].device) for output in outputs]), *args[1:])

    hooks = [block.register_forward_pre_hook(cut, with_kwargs=True) for block in lm.anatomy.blocks]
    hooks += [block.register_forward_hook(keep) for block in lm.anatomy.blocks]
    hooks.append(lm.anatomy.final.register_forward_pre_hook(all_layers))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _train_parameters(
    lm: LanguageModel,
    sequences: Sequence[TrainingSequence],
    rate: float,
    recipe: TrainingRecipe,
    progress: Callable[[int], None] | None,
) -> Tuned:
    """SGD on every parameter of the model, on a copy of them."""
    values = {name: p.detach().clone().requires_grad_() for name, p in lm.model.named_parameters()}
    patch = Parameters(lm.model, values)
    history: list[float] = []
    status: Status = "ok"
    for sequence in steps_of(sequences, recipe):
        with torch.enable_grad(), patch.applied():
            loss = token_losses(sequence_logits(lm, sequence, recipe, 1), sequence, recipe).sum()
        history.append(float(loss.detach()))
        if not math.isfinite(history[-1]):
            status = "diverged"
            break
        gradients = torch.autograd.grad(loss, list(values.values()), materialize_grads=True)
        with torch.no_grad():
            for value, gradient in zip(values.values(), gradients, strict=True):
                value.sub_(rate * gradient)
        if progress is not None:
            progress(1)
    return Tuned(rate, Parameters(lm.model, {n: v.detach() for n, v in values.items()}), tuple(history), status)


def in_single_precision(lm: LanguageModel) -> LanguageModel:
    """Training needs at least float32: a narrower model is copied for it."""
    if lm.dtype in (torch.float32, torch.float64):
        return lm
    return adopt(copy.deepcopy(lm.model).float(), lm.tokenizer, lm.name)


def _moved(patch: Patch, lm: LanguageModel) -> Patch:
    if isinstance(patch, Deltas):
        return patch.moved_to(lm.anatomy)
    assert isinstance(patch, Parameters)
    return Parameters(lm.model, {name: value.to(lm.dtype) for name, value in patch.values.items()})
