"""One step of a batch of trainings: what is shown, the logits and losses of every row, and the error signals."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dualview.anatomy.dispatch import run_forward
from dualview.anatomy.hooks import hooked
from dualview.anatomy.layers import Projection
from dualview.io.errors import UserError
from dualview.learning.recipe import Loss, Rule
from dualview.learning.weight_patches import Deltas, added
from dualview.models.language_model import LanguageModel
from dualview.models.prefix import Causal
from dualview.models.probe import Tap, Whole, tapping
from dualview.tasks.prompts import TrainingSequence

_STACK_BYTES = 1 << 28


@dataclass(frozen=True)
class Shown:
    """One sequence for each row of a step, padded on the right, and which of its tokens the loss predicts.

    Attention is causal, so the padding changes nothing before it, and no loss reads it.
    """

    ids: Int[Tensor, "row token"]
    first: int
    """The first position whose next token some row's loss predicts."""
    targets: Int[Tensor, "row predicted"]
    weights: Float[Tensor, "row predicted"]
    """One over the number of predicted tokens of the row; 0 for what its loss does not read."""
    moving: Bool[Tensor, " training"]
    """Which trainings take this step; the others have ended."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[TrainingSequence],
        loss: Loss,
        lm: LanguageModel,
        moving: Sequence[bool] = (True,),
        *,
        longest: int = 0,
        first: int | None = None,
    ) -> Shown:
        """The sequences as tensors; with `longest` and `first`, of a shape that does not depend on them."""
        [shown] = cls.of_each([(sequences, moving)], loss, lm, longest=longest, first=first)
        return shown

    @classmethod
    def of_each(
        cls,
        steps: Sequence[tuple[Sequence[TrainingSequence], Sequence[bool]]],
        loss: Loss,
        lm: LanguageModel,
        *,
        longest: int = 0,
        first: int | None = None,
    ) -> list[Shown]:
        """Steps of one shape, each with what is shown and which trainings move; sent to the model's device together,
        because a GPU that gets them one by one has to be waited for each time."""
        every = [sequence for sequences, _ in steps for sequence in sequences]
        longest = longest or max(len(sequence.ids) for sequence in every)
        first = min(_first_predicted(sequence, loss) for sequence in every) - 1 if first is None else first
        # Padded with a real token: any id is in the vocabulary, and a mask would rule out the fast kernels.
        ids = [
            [[*sequence.ids, *[sequence.ids[-1]] * (longest - len(sequence.ids))] for sequence in sequences]
            for sequences, _ in steps
        ]
        weights = torch.zeros(len(steps), len(ids[0]), longest, dtype=torch.float64)
        for number, (sequences, _) in enumerate(steps):
            for row, sequence in enumerate(sequences):
                start = _first_predicted(sequence, loss)
                weights[number, row, start : len(sequence.ids)] = 1 / (len(sequence.ids) - start)
        exact = torch.float64 if lm.dtype == torch.float64 else torch.float32
        tokens, moves = (torch.tensor(side, device=lm.device) for side in (ids, [list(moving) for _, moving in steps]))
        read = weights[..., first + 1 :].to(lm.device, exact)
        return [
            cls(shown, first, shown[:, first + 1 :], own, moving)
            for shown, own, moving in zip(tokens, read, moves, strict=True)
        ]

    @classmethod
    def widest(cls, steps: Sequence[Sequence[TrainingSequence]], loss: Loss) -> dict[str, int]:
        """`longest` and `first` that suit every step."""
        every = [sequence for own in steps for sequence in own]
        return {
            "longest": max(len(sequence.ids) for sequence in every),
            "first": min(_first_predicted(sequence, loss) for sequence in every) - 1,
        }

    def fill(self, other: Shown) -> None:
        """Take over the contents of another of the same shape, in place."""
        for name in ("ids", "targets", "weights", "moving"):
            getattr(self, name).copy_(getattr(other, name), non_blocking=True)

    def losses(self, logits: Float[Tensor, "layer_or_1 row predicted vocab"]) -> Float[Tensor, " row"]:
        """The mean cross-entropy of each row's predicted tokens, summed over layers where there are several."""
        wide = logits.to(self.weights.dtype)
        picked = wide.gather(-1, self.targets[..., None].expand(*wide.shape[:-1], 1))[..., 0]
        return ((torch.logsumexp(wide, -1) - picked) * self.weights).sum((0, -1))


def _first_predicted(sequence: TrainingSequence, loss: Loss) -> int:
    """The first token whose prediction counts."""
    return sequence.label_start if loss == "label" else 1


@dataclass
class Tape:
    """Watches the projections of one training pass: their inputs x_t, and, once the loss is known, the g_t."""

    projections: tuple[Projection, ...]
    patch: Deltas | None = None
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
                if self.patch is not None:
                    output = added(output, self.patch.change(index, x), self.projections[index])
                if not output.requires_grad:  # nothing before the first projection is trained
                    output = output.detach().requires_grad_()
                self.calls.append((index, x.detach().flatten(1, -2), output))
                return output.clone()  # some architectures (clip_qkv) go on to change it in place

            return hook

        handles = (p.module.register_forward_hook(watch(i)) for i, p in enumerate(self.projections))
        with hooked(handles), tapping(self.taps, self.tapped):  # taps after the others: they see the change
            yield

    def signals(self, total: Float[Tensor, ""]) -> list[Float[Tensor, "rate token row"]]:
        """g_t of every call on the tape; each row's loss depends on its own row alone, so their sum serves all."""
        outputs = [output for _, _, output in self.calls]
        # With respect to outputs, not weights: the update is wanted as its two factors, and no gradient of a weight is
        # formed.
        found = torch.autograd.grad(total, outputs, materialize_grads=True)
        signals: list[Tensor] = []
        for (index, _, _), gradient in zip(self.calls, found, strict=True):
            rows = self.projections[index].rows
            signals.append((gradient if rows is None else gradient[..., rows]).flatten(1, -2))
        return signals


def step_logits(lm: LanguageModel, shown: Shown, rule: Rule) -> Float[Tensor, "layer_or_1 row predicted vocab"]:
    """The logits that the losses of one step read.

    `layer-causal` (Deutch et al. 2024, section 5): every block reads a detached input, the final norm and the
    unembedding read every block's output, and the layers' losses are summed.
    """
    rows, length = shown.ids.shape
    at = torch.arange(length, device=lm.device)
    keep = at[shown.first : -1]
    strategy = Causal(at) if lm.fast else Whole(at, range(length), 0, None)
    with _layer_causal(lm) if rule == "layer-causal" else nullcontext():
        try:
            logits = run_forward(lm.model, strategy, shown.ids, at[None].expand(rows, -1), keep, native=not lm.fast)
        except RuntimeError as error:
            if rule == "sgd":
                raise
            why = str(error).splitlines()[0]
            raise UserError(
                f"{rule} fine-tuning cannot follow {type(lm.model).__name__} ({why}); use --ft-rule sgd."
            ) from error
    return logits.unflatten(0, (-1, rows))


def differentiated(
    lm: LanguageModel, shown: Shown, rule: Rule, tape: Tape
) -> tuple[Float[Tensor, " row"], list[Float[Tensor, "row token d_out"]]]:
    """Every row's loss, and the error signals of the projections that the tape watches."""
    with torch.enable_grad(), tape.running():
        losses = shown.losses(step_logits(lm, shown, rule))
    return losses.detach(), tape.signals(losses.sum())


def stacked(
    signals: Sequence[Float[Tensor, "row token d_out"]],
) -> list[tuple[list[int], Float[Tensor, "call row token d_out"]]]:
    """The error signals of the calls of one shape in one tensor, with their numbers: one kernel instead of many small
    ones. Each by itself where they are large, since their copies would be, too."""
    if sum(g.nbytes for g in signals) > _STACK_BYTES:
        return [([number], g[None]) for number, g in enumerate(signals)]
    alike: dict[tuple[torch.Size, torch.device], list[int]] = {}
    for number, g in enumerate(signals):
        alike.setdefault((g.shape, g.device), []).append(number)
    return [(numbers, torch.stack([signals[number] for number in numbers])) for numbers in alike.values()]


def finite(
    losses: Float[Tensor, " row"], signals: Sequence[Float[Tensor, "call row token d_out"]]
) -> Bool[Tensor, " row"]:
    """Which rows have a finite loss and finite error signals."""
    sums = torch.stack([g.sum((0, 2, 3), dtype=losses.dtype).to(losses.device) for g in signals])
    return torch.isfinite(losses) & torch.isfinite(sums).all(0)


@contextmanager
def _layer_causal(lm: LanguageModel) -> Generator[None]:
    outputs: list[Tensor] = []

    def cut(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        detached = tuple(a.detach() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        # Some architectures pass the hidden states by name.
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
    with hooked(hooks):
        yield
