"""Context distillation: K and V trained to reproduce the in-context model without its demonstrations.

The trained model reads rows that are never reported, zero-shot. It must give what the in-context model gives for them:
the scores s of the candidates (centred) and the output h of every attention layer, at the recorded token,

    loss = ½ ‖s − s_icl‖² / ‖s_zsl − s_icl‖² + ½ mean_layers ‖h − h_icl‖² / ‖h_zsl − h_icl‖²

(norms over rows), so the loss is the share of the in-context change that is not reproduced: 1 at the base weights, 0
if K and V can carry all of it. No label of these rows is read: what the trained model knows of the task it has from
the in-context model. Adam, because this is a fit and not a model of learning; its rate is relative to the root mean
square of each projection's weights, and falls to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dualview.anatomy.dispatch import run_forward
from dualview.anatomy.hooks import hooked
from dualview.io.errors import UserError
from dualview.learning.captured_step import record
from dualview.learning.recipe import (
    DISTILLING_PASSES,
    DISTILLING_ROWS,
    Training,
    TrainingRecipe,
    Tuned,
    projections_of,
)
from dualview.learning.turns import Steps
from dualview.learning.weight_patches import Deltas
from dualview.models.language_model import LanguageModel
from dualview.models.packing.rows import At, Pack, Tree, grow, pack
from dualview.models.prefix import Prefix, as_row
from dualview.models.probe import Packed, Whole
from dualview.models.scoring import PassPlan, ask, candidate_scores, token_log_probs
from dualview.tasks.prompts import Query
from dualview.tasks.task import shuffled


def distil_steps(
    lm: LanguageModel, training: Training, recipe: TrainingRecipe, progress: Callable[[int], None] | None = None
) -> Steps[Tuned]:
    """K and V that reproduce `training.teacher` on `recipe.rows`; `lm` itself is not changed."""
    if training.teacher is None or not recipe.rows:
        raise UserError("Distillation needs an in-context prompt to reproduce and rows to reproduce it on.")
    if training.rate < 0:
        raise UserError(f"Distillation's rate must be at least 0, not {training.rate:g}.")
    goal = _Goal.of(lm, recipe.rows, training.teacher)
    deltas = Deltas.zero(projections_of(lm, recipe), 1, torch.promote_types(lm.dtype, torch.float32))
    optimiser, rates, parts = _adam(lm, deltas, training.rate)
    batches = _steps(len(recipe.rows), DISTILLING_PASSES * recipe.epochs)
    # Set once a loss is not finite, from when on the optimiser moves nothing; read at the end, so that no step waits.
    stopped = torch.ones((), device=lm.device)
    optimiser.found_inf = stopped  # pyright: ignore[reportAttributeAccessIssue]

    def step(shown: _ShownRows) -> Float[Tensor, ""]:
        with torch.enable_grad():
            loss = goal.loss(lm, shown, deltas)
        # In place: a recorded step writes to the same memory each time.
        torch._foreach_copy_([part.grad for part in parts], torch.autograd.grad(loss, parts))  # pyright: ignore
        loss = loss.detach()
        stopped.logical_or_(~torch.isfinite(loss))
        optimiser.step()
        return loss

    history: list[Float[Tensor, ""]] = []
    # A step of fewer rows (the last of a pass) has another shape than the recorded one.
    alike = [goal.uniform and len(rows) == len(batches[0]) for rows in batches]
    recorded = record(step, goal.shown(lm, batches[0], padded=True), sum(alike), lm)
    stopped.zero_()  # while a step was tried and recorded, nothing was to move
    yield  # others record theirs before the GPU has something to do: recording waits for it
    replayed = [recorded is not None and each for each in alike]
    # All at once: sending something to a GPU makes it wait.
    every = [goal.shown(lm, rows, padded=padded) for rows, padded in zip(batches, replayed, strict=True)]
    first = rates.clone()
    with nullcontext() if recorded is None else recorded.running():
        for number, (shown, again) in enumerate(zip(every, replayed, strict=True)):
            with nullcontext() if recorded is None else recorded.turn():
                torch.mul(first, 1 - number / len(every), out=rates)  # falls to 0
                loss = recorded.replay(shown) if recorded is not None and again else step(shown)
                history.append(loss.clone())
            if progress is not None:
                progress(1)
            yield
        if recorded is not None:
            yield from recorded.waited()
    for part in parts:
        part.requires_grad_(False).grad = None
    losses: list[float] = torch.stack(history).tolist()
    wild = [number for number, loss in enumerate(losses) if not np.isfinite(loss)]
    taken = losses[: wild[0] + 1] if wild else losses
    return Tuned(training.rate, deltas, tuple(taken), "diverged" if wild else "ok")


def _adam(
    lm: LanguageModel, deltas: Deltas, rate: float
) -> tuple[torch.optim.Adam, Float[Tensor, " projection"], list[Tensor]]:
    """The optimiser of the changes, the rates that it reads from one tensor, and what it moves.

    Each projection's rate is `rate` times the size of its weights.
    """
    on_gpu = lm.device.type == "cuda"
    sizes = [float(p.weight().detach().float().square().mean().sqrt()) for p in deltas.projections]
    exact = torch.float32 if on_gpu else torch.float64  # in which torch's fused kernels read a rate
    rates = torch.tensor([rate * size for size in sizes], dtype=exact, device=lm.device)
    groups: list[dict[str, Any]] = []
    for number, (weight, bias) in enumerate(zip(deltas.weights, deltas.biases, strict=True)):
        trained = [part.requires_grad_() for part in (weight, bias) if part is not None]
        groups.append({"params": trained, "lr": rates[number]})
    parts: list[Tensor] = [part for group in groups for part in group["params"]]
    for part in parts:
        part.grad = torch.zeros_like(part)
    return torch.optim.Adam(groups, betas=(0.9, 0.99), fused=True, capturable=on_gpu), rates, parts


def _steps(rows: int, passes: int) -> list[list[int]]:
    """The rows of every step: each pass goes through all of them once, in an order of its own."""
    orders = [shuffled(rows, f"distillation, pass {number}") for number in range(passes)]
    return [order[at : at + DISTILLING_ROWS] for order in orders for at in range(0, rows, DISTILLING_ROWS)]


@dataclass(frozen=True)
class _ShownRows:
    """The rows of one step; `pack` is None for models that cannot be packed."""

    rows: Int[Tensor, " row"]
    pack: Pack | None

    def fill(self, other: _ShownRows) -> None:
        """Take over the contents of another of the same shape, in place."""
        self.rows.copy_(other.rows)
        assert self.pack is not None and other.pack is not None
        self.pack.fill(other.pack)


@dataclass(frozen=True)
class _Goal:
    """What the in-context model gives for each row, and how far zero-shot is from it."""

    queries: tuple[Query, ...]
    """The rows as they are read without demonstrations, BOS included."""
    trees: tuple[Tree, ...]
    at: At
    known: Bool[Tensor, "row candidate"]
    scores: Float[Tensor, "row candidate"]
    h: Float[Tensor, "row layer d_model"]
    score_scale: float
    h_weight: Float[Tensor, " layer"]
    """What a layer's squared error is multiplied by: the mean over the layers that demonstrations move."""

    @classmethod
    def of(cls, lm: LanguageModel, rows: Sequence[Query], teacher: PassPlan) -> _Goal:
        bare = teacher.prefix[: teacher.special]
        rows = [replace(row, summed=False) for row in rows]  # the loss is of mean log-probabilities
        icl, zsl = (
            ask(lm, rows, replace(teacher, prefix=prefix, record=True, demo_logits=False, taps=())).settings[0]
            for prefix in (teacher.prefix, bare)
        )
        assert icl.h is not None and zsl.h is not None
        scores, before = (torch.from_numpy(each.log_probs).to(lm.device) for each in (icl, zsl))
        known = torch.isfinite(scores)
        h, h_before = (torch.from_numpy(each).to(lm.device) for each in (icl.h, zsl.h))
        scale = (h - h_before).square().sum(-1).mean(0)
        moved = scale > 0  # a layer that no demonstration moves has nothing to reproduce
        queries = tuple(replace(row, ids=(*bare, *row.ids)) for row in rows)
        return cls(
            queries,
            tuple(grow(query, teacher.at) for query in queries),
            teacher.at,
            known,
            _centred(scores, known),
            h,
            float((_centred(scores, known) - _centred(before, known)).square().sum(1).mean()) or 1.0,
            torch.where(moved, 1 / scale / moved.sum(), 0.0) if bool(moved.any()) else torch.ones_like(scale),
        )

    @property
    def uniform(self) -> bool:
        """Whether all rows read as many logits for as many candidates, so that padding gives steps one shape."""
        return len({(tree.chain, len(tree.read_nodes), sum(map(len, tree.reads))) for tree in self.trees}) == 1

    def shown(self, lm: LanguageModel, rows: list[int], *, padded: bool) -> _ShownRows:
        """These rows side by side; `padded` to the longest of all rows, for a shape that does not depend on them."""
        widest = max(len(tree.ids) for tree in self.trees)
        at = torch.tensor(rows, device=lm.device)
        if not lm.shares_prefix(0, max(query.longest for query in self.queries)):
            return _ShownRows(at, None)
        trees = [self.trees[i].padded(widest) if padded else self.trees[i] for i in rows]
        return _ShownRows(at, pack(trees, range(len(rows))).to(lm.device))

    def loss(self, lm: LanguageModel, shown: _ShownRows, patch: Deltas) -> Float[Tensor, ""]:
        """The share of the in-context change of these rows that is not reproduced."""
        candidates = self.scores.shape[1]
        with patch.applied():
            if shown.pack is not None:
                scores, h = _answers(lm, shown.pack, candidates)
            else:
                scores, h = _answers_whole(lm, [self.queries[i] for i in shown.rows.tolist()], self.at, candidates)
        missed = (_centred(scores, self.known[shown.rows]) - self.scores[shown.rows]).square().sum(1).mean()
        wide = self.h.new_zeros(len(shown.rows), *self.h.shape[1:])
        for layer, found in enumerate(h):
            wide[:, layer, : found.shape[-1]] = found.to(wide)
        lost = ((wide - self.h[shown.rows]).square().sum(-1).mean(0) * self.h_weight).sum()
        return (missed / self.score_scale).to(lost) / 2 + lost / 2


def _centred(scores: Float[Tensor, "row candidate"], known: Bool[Tensor, "row candidate"]) -> Tensor:
    """Scores less their mean over the row's candidates; 0 where a row has fewer."""
    filled = scores.masked_fill(~known, 0.0)
    return (filled - filled.sum(1, keepdim=True) / known.sum(1, keepdim=True)).masked_fill(~known, 0.0)


def _answers(
    lm: LanguageModel, packed: Pack, candidates: int
) -> tuple[Float[Tensor, "row candidate"], list[Float[Tensor, "row d_model"]]]:
    """Every candidate's score, and each attention layer's output at the recorded token, with their gradients.

    `ask` without a prefix: the log-sum-exps by which it joins a prefix have no gradient.
    """
    strategy = Packed(packed, Prefix(0))
    h: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        h.append(output[0, packed.record.to(output.device)])

    with hooked(module.register_forward_hook(keep) for module in {layer.output for layer in lm.anatomy.layers}):
        logits = run_forward(lm.model, strategy, packed.ids[None], strategy.positions[None], packed.read)
    return candidate_scores(packed, logits, candidates)[0], h


def _answers_whole(
    lm: LanguageModel, queries: Sequence[Query], at: At, candidates: int
) -> tuple[Float[Tensor, "row candidate"], list[Float[Tensor, "row d_model"]]]:
    """The same one prompt and candidate at a time, for models that cannot be packed."""
    scores = torch.full((len(queries), candidates), -torch.inf, dtype=torch.float64, device=lm.device)
    h: list[list[Tensor]] = []
    for i, query in enumerate(queries):
        for j, candidate in enumerate(query.candidates):
            recorded = j == 0
            read = candidate if recorded and at == "label0" else candidate[:-1]
            ids, stop = as_row([*query.ids, *read], lm.device), len(query.ids)
            positions = torch.arange(ids.shape[1], device=lm.device)
            last = stop - 1 + (len(read) if at == "label0" else 0)
            outputs: list[Tensor] = []

            def keep(_m: nn.Module, _i: Any, output: Tensor, outputs: list[Tensor] = outputs, last: int = last) -> None:
                outputs.append(output[:, last])

            modules = {layer.output for layer in lm.anatomy.layers} if recorded else ()
            keeping = torch.arange(stop - 1, stop - 1 + len(candidate), device=lm.device)
            with hooked(module.register_forward_hook(keep) for module in modules):
                strategy = Whole(positions, range(ids.shape[1]), 0, None)
                logits = run_forward(lm.model, strategy, ids, positions[None], keeping, native=True)
            tokens = torch.tensor(candidate, device=lm.device)
            row = torch.arange(len(candidate), device=lm.device)
            scores[i, j] = token_log_probs(logits, row, tokens).mean().double()
            if recorded:
                h.append(outputs)
    return scores, [torch.cat(layer) for layer in zip(*h, strict=True)]
