"""What a training is: the recipe, what one training is shown, and the tuned model that comes of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dualview.anatomy.layers import Projection, Role
from dualview.io.errors import UserError
from dualview.learning.weight_patches import Deltas
from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt
from dualview.models.scoring import PassPlan, Patch
from dualview.tasks.prompts import Query, TrainingSequence

Params = Literal["kv", "qkv", "v", "all"]
Precision = Literal["model", "float32"]
Loss = Literal["all", "label"]
Rule = Literal["sgd", "layer-causal", "linearised", "distilled"]
Status = Literal["ok", "diverged", "collapsed"]

ROLES_OF: dict[str, tuple[Role, ...]] = {"kv": ("k", "v"), "qkv": ("q", "k", "v"), "v": ("v",)}
DISTILLING_RATE, DISTILLING_PASSES, DISTILLING_ROWS = 2.5e-3, 10, 4
"""Distillation's default rate, its passes over the selection rows in an epoch, and the rows of a step."""


@dataclass(frozen=True)
class TrainingRecipe:
    """How to fine-tune; what is shown and the learning rate are each row's own."""

    params: Params = "kv"
    loss: Loss = "all"
    epochs: int = 1
    rule: Rule = "sgd"
    precision: Precision = "model"
    """`model`: differentiate through the model's own weights, whatever their dtype, with changes and error signals in
    float32 at least. `float32`: through a float32 copy of a narrower model."""
    rows: tuple[Query, ...] = ()
    """What `distilled` is trained on: the selection rows."""


@dataclass(frozen=True)
class Training:
    """One row of a batch of trainings."""

    sequences: Sequence[TrainingSequence]
    """What is shown, one a step; each epoch again."""
    rate: float
    """A negative rate climbs the loss."""
    teacher: PassPlan | None = None
    """The in-context pass that `distilled` reproduces."""


@dataclass(frozen=True)
class Tuned:
    """One fine-tuned model: the patch to apply, and how training went."""

    lr: float
    patch: Patch
    losses: tuple[float, ...]
    """The loss before each step."""
    status: Status = "ok"

    def alone(self) -> Tuned:
        """The same without the memory of the batch that it was a row of."""
        return replace(self, patch=self.patch.copy()) if isinstance(self.patch, Deltas) else self

    def spent(self) -> Tuned:
        """How training went, without the change itself, for when nothing is asked with it any more."""
        return replace(self, patch=LetGo())


class LetGo:
    """In the place of a change whose memory is needed for something else."""

    @property
    def rows(self) -> int:
        raise RuntimeError("this change was let go of")

    def applied(self) -> AbstractContextManager[None]:
        raise RuntimeError("this change was let go of")


def step_count(training: Training, recipe: TrainingRecipe) -> int:
    """How many steps a training takes."""
    if recipe.rule == "distilled":
        return DISTILLING_PASSES * recipe.epochs * -(-len(recipe.rows) // DISTILLING_ROWS)
    return len(steps_of(training.sequences, recipe))


def steps_of(sequences: Sequence[TrainingSequence], recipe: TrainingRecipe) -> list[TrainingSequence]:
    """The order of the steps: the prompt's, again for each epoch."""
    return [sequence for _ in range(recipe.epochs) for sequence in sequences]


def projections_of(lm: LanguageModel, recipe: TrainingRecipe) -> tuple[Projection, ...]:
    projections = lm.anatomy.projections(ROLES_OF[recipe.params])
    if not projections:
        raise UserError(f"dualview found no {recipe.params} projections to train in {lm.name}.")
    return projections


def differentiable(lm: LanguageModel, recipe: TrainingRecipe) -> LanguageModel:
    """The model to differentiate: itself, or a float32 copy of a narrower one, if asked for or if the weights
    themselves are trained (half precision would round most steps away)."""
    if lm.dtype in (torch.float32, torch.float64) or (recipe.precision == "model" and recipe.params != "all"):
        return lm
    # A copy: widening the model in place would change its own answers.
    return adopt(copy.deepcopy(lm.model).float(), lm.tokenizer, lm.name)
