"""Training a small GPT on a row of tokens: next-token cross-entropy, AdamW, a warm-up and a cosine.

The order of the data is a function of the seed and the step alone, so every variant of a seed reads the same blocks in
the same order, and a killed training continues as if it had not been.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualview.lab.gpt.throughput import LOSS_ROWS, batch_loss, compiled_layers, has_plain_head, throughput
from dualview.lab.units import Unit, capture, restore
from dualview.variants import variant_parameters

TrainingStatus = Literal["ok", "diverged", "time limit"]
EVERY = 20
"""Steps between two checks of the losses, when the state may be saved. In between nothing waits for the GPU."""
_WARM = 1
"""Stretches of EVERY steps at the start that are not timed."""


@dataclass(frozen=True)
class CorpusRecipe:
    """How a model is trained."""

    steps: int
    batch: int
    context: int
    lr: float
    warmup: int
    weight_decay: float = 0.1
    """Of matrices; norms and coefficients have none."""
    clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: the forward pass under autocast; the weights and the optimiser's state stay float32."""
    compile: bool = False
    """Compile each layer; where that fails, a warning says so and the training goes on without."""
    time_limit: float | None = None
    coefficient_lr: float | None = None
    """The highest learning rate of what a variant adds (η, α, σ); None: the same as of all weights."""
    micro_batch: int = 0
    """Rows of a batch that are in memory at once: their gradients are added up. 0: all rows."""
    loss_rows: int = 0
    """Tokens whose logits are held at once; 0: all on a CPU, LOSS_ROWS on a GPU."""

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: a straight rise, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class TrainingOutcome:
    """How a training went; the model itself is changed in place."""

    status: TrainingStatus
    losses: list[float]
    """The training loss before each step, in nats per token."""
    seconds_per_step: float | None
    """The median over stretches of 20 steps, without the first; None if there were no others."""
    processor_seconds_per_step: float | None
    """The same in processor time of all threads, which other programs do not affect; None on a GPU."""
    peak_bytes: int | None
    """The peak of allocated GPU memory; None on a CPU."""
    first_bytes: int | None
    """Allocated before the first step: weights, and anything that earlier trainings left behind."""
    resumed: bool
    seconds: float
    """In this process; the time before a restart is not counted."""
    compiled: bool = False
    """Whether the layers were compiled."""

    @property
    def steps(self) -> int:
        return len(self.losses)


@dataclass
class Blocks:
    """The batches: blocks of `context` + 1 tokens, each overlapping the next by one, all once before any twice."""

    tokens: Int[Tensor, " token"]
    context: int
    batch: int
    seed: int
    _orders: dict[int, Int[np.ndarray, " block"]] = field(default_factory=dict[int, np.ndarray])

    @property
    def count(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def numbers(self, step: int) -> Int[np.ndarray, " batch"]:
        """Which blocks a step reads."""
        at = np.arange(step * self.batch, (step + 1) * self.batch)
        return np.array([self._order(int(i) // self.count)[int(i) % self.count] for i in at])

    def _order(self, epoch: int) -> Int[np.ndarray, " block"]:
        if epoch not in self._orders:
            words = np.random.PCG64([self.seed, epoch]).random_raw(self.count)
            self._orders[epoch] = np.argsort(words, kind="stable")
        return self._orders[epoch]

    def take(self, step: int) -> Int[Tensor, "batch token"]:
        """The tokens of a step's blocks, the last of each only predicted."""
        starts = torch.from_numpy(self.numbers(step) * self.context).to(self.tokens.device, non_blocking=True)
        return self.tokens[starts[:, None] + torch.arange(self.context + 1, device=self.tokens.device)].long()


def token_losses(
    forward: Callable[..., Any], tokens: Int[Tensor, "batch token"], precision: str = "float32"
) -> Float[Tensor, "batch predicted"]:
    """−log p of every token but the first of each row."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        logits: Tensor = forward(input_ids=tokens[:, :-1], use_cache=False).logits
    losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(tokens.shape[0], -1)


def make_optimiser(model: nn.Module, recipe: CorpusRecipe, device: torch.device) -> torch.optim.AdamW:
    apart = [] if recipe.coefficient_lr is None else list(variant_parameters(model).values())
    rest = [p for p in model.parameters() if id(p) not in set(map(id, apart))]
    matrices = [p for p in rest if p.ndim >= 2]
    others = [p for p in rest if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if apart:
        groups.append({"params": apart, "weight_decay": 0.0, "times": (recipe.coefficient_lr or 0.0) / recipe.lr})
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), eps=1e-8, fused=device.type == "cuda")


def train(
    model: PreTrainedModel,
    blocks: Blocks,
    recipe: CorpusRecipe,
    unit: Unit,
    *,
    advance: Callable[[int], None] = lambda _steps: None,
    keep: Callable[[int], None] = lambda _step: None,
    keep_at: Iterable[int] = (),
) -> TrainingOutcome:
    """Train the model in place, from the state in `unit`.

    `keep` is called after each step in `keep_at` (0: before the first), and where the time limit stops the training.
    """
    model.train()
    loss_of = _loss_of(model, blocks, recipe)

    def trial() -> None:
        _backward(loss_of, blocks.take(0), recipe.micro_batch)

    with compiled_layers(model, recipe.compile, trial) as compiled:
        return replace(_train(model, blocks, recipe, unit, loss_of, advance, keep, set(keep_at)), compiled=compiled)


def _loss_of(model: PreTrainedModel, blocks: Blocks, recipe: CorpusRecipe) -> Callable[[Tensor], Tensor]:
    """The loss of a batch: in chunks where asked for or on a GPU, if the model's head allows it."""
    rows = recipe.loss_rows or (LOSS_ROWS if model.device.type == "cuda" else 0)
    if rows and has_plain_head(model, blocks.tokens):
        return batch_loss(model, recipe.precision, rows)
    return lambda tokens: token_losses(model, tokens, recipe.precision).mean()


def _backward(loss_of: Callable[[Tensor], Tensor], tokens: Int[Tensor, "batch token"], rows: int) -> Float[Tensor, ""]:
    """The batch's mean loss, `rows` rows at a time (0: all at once); adds its gradients to those of the parameters."""
    total = torch.zeros((), device=tokens.device)
    for part in tokens.split(rows or len(tokens)):
        loss = loss_of(part) * (len(part) / len(tokens))
        cast(Any, loss).backward()
        total = total + loss.detach()
    return total


def _train(
    model: PreTrainedModel,
    blocks: Blocks,
    recipe: CorpusRecipe,
    unit: Unit,
    loss_of: Callable[[Tensor], Tensor],
    advance: Callable[[int], None],
    keep: Callable[[int], None],
    wanted: set[int],
) -> TrainingOutcome:
    device = model.device
    optimiser = make_optimiser(model, recipe, device)
    losses = torch.zeros(recipe.steps, device=device)
    step = _resume(unit, model, optimiser, losses)
    advance(step)
    if step == 0 and 0 in wanted:
        keep(0)
    watch, first = _Watch(device), step
    status: TrainingStatus = "ok"
    while step < recipe.steps and status == "ok":
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate(step) * group.get("times", 1.0)
        optimiser.zero_grad(set_to_none=True)
        loss = _backward(loss_of, blocks.take(step), recipe.micro_batch)
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip, foreach=device.type == "cuda")
        optimiser.step()
        losses[step] = loss
        step += 1
        if step in wanted:
            keep(step)
        if step % EVERY and step < recipe.steps:
            continue
        if not bool(torch.isfinite(losses[:step]).all()):
            status = "diverged"
        elif recipe.time_limit is not None and watch.seconds() > recipe.time_limit and step < recipe.steps:
            status = "time limit"
        watch.stretch(step - first)
        advance(step - first)
        first = step
        if status == "ok":
            unit.save(lambda at=step: capture(model, optimiser, {}, step=at, losses=losses[:at].tolist()))
        watch.resume()
    if status == "time limit" and wanted and step not in wanted:
        keep(step)
    return TrainingOutcome(
        status=status,
        losses=cast(list[float], losses[:step].tolist()),
        seconds_per_step=median_of(watch.laps),
        processor_seconds_per_step=median_of(watch.processor_laps) if device.type == "cpu" else None,
        peak_bytes=watch.peak(),
        first_bytes=watch.first_bytes,
        resumed=unit.resumed,
        seconds=watch.seconds(),
    )


def median_of(laps: list[float]) -> float | None:
    """The median of the laps after the warm-up; None if there are none."""
    return statistics.median(laps[_WARM:]) if len(laps) > _WARM else None


def _resume(unit: Unit, model: nn.Module, optimiser: torch.optim.Optimizer, losses: Float[Tensor, " step"]) -> int:
    """Restore the last saved state; returns its number of steps."""
    state = unit.load()
    if state is None:
        return 0
    info = restore(state, model, optimiser, {})
    done = int(info["step"])
    losses[:done] = torch.tensor(info["losses"], dtype=losses.dtype)
    return done


class _Watch:
    """Times stretches of steps, and the memory they take."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.laps: list[float] = []
        self.processor_laps: list[float] = []
        self.begun = time.perf_counter()
        self.resume()
        self.first_bytes: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.first_bytes = torch.cuda.memory_allocated(device)

    def stretch(self, steps: int) -> None:
        if steps == EVERY:
            self.laps.append((time.perf_counter() - self.since) / steps)
            self.processor_laps.append((time.process_time() - self.processor_since) / steps)

    def resume(self) -> None:
        self.since, self.processor_since = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


def saved_bytes(model: PreTrainedModel, tokens: Int[Tensor, "batch token"], precision: str = "float32") -> int:
    """Bytes that one forward pass keeps for the backward pass, parameters not counted.

    What an attention variant costs in memory, on any device: each storage counts once.
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would hold the graph that holds it, and never be freed

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = token_losses(model, tokens, precision).mean()
    del loss  # kept until here: a freed storage's address could be used by another
    return sum(kept.values())


@torch.no_grad()
def block_losses(
    model: PreTrainedModel,
    tokens: Int[Tensor, " token"],
    length: int,
    context: int,
    batch: int,
    precision: str = "float32",
) -> Float[np.ndarray, " block"]:
    """The mean loss of each block of `context` tokens when they are read in pieces of `length`.

    Every length predicts the same tokens, each from at most `length` before it (its own piece); longer pieces see more.
    """
    pieces, count = context // length, (len(tokens) - 1) // context
    device, found = model.device, list[Tensor]()
    model.eval()
    rows = max(1, batch * context // length)
    for at in range(0, count * pieces, rows):
        starts = torch.arange(at, min(at + rows, count * pieces), device=device) * length
        piece = tokens[starts[:, None] + torch.arange(length + 1, device=device)].long()
        found.append(token_losses(model, piece, precision).double().mean(1))
    return torch.cat(found).view(count, pieces).mean(1).cpu().numpy()


def perplexities(
    model: PreTrainedModel,
    tokens: Int[Tensor, " token"],
    lengths: Sequence[int],
    context: int,
    batch: int,
    precision: str = "float32",
) -> dict[str, Any] | None:
    """By length: the loss of every held-out block, its mean in nats per token, and exp of that; None if not finite."""
    found: dict[str, Any] = {}
    for length in lengths:
        losses = block_losses(model, tokens, length, context, batch, precision)
        mean = float(losses.mean())
        if not np.isfinite(mean):
            return None
        found[str(length)] = {"loss": mean, "perplexity": float(np.exp(mean)), "blocks": losses.tolist()}
    return found


def cost_of(model: PreTrainedModel, trained: TrainingOutcome, recipe: CorpusRecipe) -> dict[str, Any]:
    """What the training took on this machine."""
    gpu = model.device.type == "cuda"
    return {
        "seconds_per_step": trained.seconds_per_step,
        "processor_seconds_per_step": trained.processor_seconds_per_step,
        **throughput(model, recipe.precision, recipe.batch, recipe.context, trained.seconds_per_step),
        "compiled": trained.compiled,
        "first_bytes": trained.first_bytes,
        "peak_bytes": trained.peak_bytes,
        "seconds": trained.seconds,
        "resumed": trained.resumed,
        "machine": torch.cuda.get_device_name(model.device) if gpu else f"cpu, {torch.get_num_threads()} threads",
    }
