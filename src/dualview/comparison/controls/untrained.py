"""Untrained models as controls: drawn, and fine-tuned until their updates are as large as FT's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dualview.comparison.controls.training import TrainedControls, train_controls_steps
from dualview.comparison.finetuning import training_of
from dualview.comparison.prepare import Prepared
from dualview.io.progress import Silent
from dualview.learning.recipe import TrainingRecipe
from dualview.learning.turns import Run, Steps, have_room_together
from dualview.models.language_model import LanguageModel
from dualview.models.untrained import UNTRAINED_SEED, duplicate, untrained, with_trained_embeddings

UNTRAINED_DRAWS = 3
"""How often `full` draws untrained weights."""


def drawn(name: str, number: int) -> str:
    """The name of a control's draw, counted from 0; the first has the plain name."""
    return name if number == 0 else f"{name}@{number + 1}"


@dataclass(frozen=True)
class TrainedModel:
    """An untrained model and its fine-tuning, which is called as the control is."""

    lm: LanguageModel
    trained: TrainedControls


def untrained_models_fit(lm: LanguageModel) -> bool:
    """Whether all untrained models have room next to the model itself, so that they can be trained in turns."""
    return have_room_together(lm, 1 + 2 * UNTRAINED_DRAWS)


def untrained_runs(
    prepared: Prepared, lr: float, recipe: TrainingRecipe, size: float, *, together: bool
) -> dict[str, Run[TrainedModel]]:
    """Every untrained model by the name of its control.

    together   all may be under way at once; otherwise they must be finished in this order: a model is drawn when it is
               first wanted, perhaps into the memory of the one before
    """

    def steps(name: str, make: Callable[[], LanguageModel]) -> Steps[TrainedModel]:
        lm = make()
        wanted = {name: lambda: training_of(prepared, prepared.prompts, lr)}
        made = yield from train_controls_steps(prepared, wanted, recipe, Silent(), sized=[name], size=size, lm=lm)
        return TrainedModel(lm, made)

    models = _models(prepared.lm, together=together)
    return {name: Run(steps(name, make)) for name, make in models.items()}


def _models(lm: LanguageModel, *, together: bool) -> dict[str, Callable[[], LanguageModel]]:
    """What makes each untrained model."""
    kept: list[LanguageModel] = []

    def fresh(n: int) -> LanguageModel:
        kept.clear()  # before the next is drawn: one more model might not fit
        kept.append(untrained(lm, keep_embeddings=False, seed=UNTRAINED_SEED + n))
        return kept[0]

    def half_fresh(n: int) -> LanguageModel:
        first = kept.pop() if kept else untrained(lm, keep_embeddings=False, seed=UNTRAINED_SEED + n)
        # In the memory of the draw's first, unless that is still to be used.
        return with_trained_embeddings(duplicate(first) if together else first, lm)

    return {
        drawn(name, n): partial(make, n)
        for n in range(UNTRAINED_DRAWS)
        for name, make in (("untrained", fresh), ("untrained_but_embeddings", half_fresh))
    }
