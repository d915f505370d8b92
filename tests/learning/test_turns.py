"""Trainings in turns are trainings one after another, recorded or not, for every rule; what is repeated too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dualview.io.errors import UserError
from dualview.learning.batch import Kept
from dualview.learning.finetune import train, train_steps
from dualview.learning.recipe import DISTILLING_RATE, Training, TrainingRecipe, Tuned
from dualview.learning.training_step import Shown
from dualview.learning.turns import Run, Steps, finish, finished, have_room_together, in_turns
from dualview.learning.weight_patches import Deltas, Linearised, Parameters
from dualview.models.scoring import PassPlan
from equivalence import cases
from learning.stand_in import recording

EXACT = 1e-9
TEACHER = PassPlan(*cases.PREFIXES["demos"])
OTHER = cases.SEQUENCES[::-1]
BATCH = [
    *(Training(cases.SEQUENCES, rate) for rate in (0.01, 0.03)),
    Training(OTHER, 0.02),
    Training(cases.SEQUENCES[:2], -0.01),
]
QUERIES = cases.QUERIES[:1] * 2 + (replace(cases.QUERIES[0], ids=cases.tokens(7, 8)),) * 2
JOBS: dict[str, tuple[TrainingRecipe, list[Training]]] = {
    **{rule: (TrainingRecipe(rule=rule), BATCH) for rule in ("sgd", "layer-causal", "linearised")},
    "label": (TrainingRecipe(loss="label", epochs=2), BATCH[:3]),
    "all": (TrainingRecipe("all"), BATCH[:2]),
    "distilled": (TrainingRecipe(rule="distilled", rows=QUERIES), [Training((), DISTILLING_RATE, TEACHER)]),
}


def parts(tuned: Tuned) -> list[torch.Tensor]:
    if isinstance(tuned.patch, Parameters):
        return list(tuned.patch.values.values())
    assert isinstance(tuned.patch, Deltas)
    return [part for part in (*tuned.patch.weights, *tuned.patch.biases) if part is not None]


def same(found: list[Tuned], right: list[Tuned]) -> None:
    for a, b in zip(found, right, strict=True):
        assert (a.lr, a.status, type(a.patch)) == (b.lr, b.status, type(b.patch))
        assert cases.worst(a.losses, b.losses) < EXACT
        assert max(cases.worst(x, y) for x, y in zip(parts(a), parts(b), strict=True)) < EXACT


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_in_turns_is_one_after_another(name: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = cases.lm(name)
    right = {job: train(lm, trainings, recipe) for job, (recipe, trainings) in JOBS.items()}
    steps = dict.fromkeys(JOBS, 0)
    made = recording(monkeypatch) if recorded else []

    def counted(job: str) -> Any:
        def count(n: int) -> None:
            steps[job] += n

        return count

    runs = {job: Run(train_steps(lm, list(given), recipe, counted(job))) for job, (recipe, given) in JOBS.items()}
    in_turns(list(runs.values()))
    for job, run in runs.items():
        same(run.result(), right[job])
    assert isinstance(runs["linearised"].result()[0].patch, Linearised)
    assert steps == {"sgd": 12, "layer-causal": 12, "linearised": 12, "label": 18, "all": 6, "distilled": 10}
    assert len(made) == (len(JOBS) + 1 if recorded else 0), "all parameters are trained once for each rate"


@pytest.mark.parametrize("rule", ["sgd", "layer-causal", "linearised"])
def test_what_is_repeated_is_not_recorded_again(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, recipe, kept = cases.lm("llama"), TrainingRecipe(rule=rule), Kept()
    again = [replace(BATCH[2], rate=0.004), replace(BATCH[0], rate=0.05)]
    wild = [replace(BATCH[3], rate=1e300), replace(BATCH[2], rate=0.01)]
    right = [train(lm, trainings, recipe) for trainings in (BATCH, again, wild, BATCH)]
    made = recording(monkeypatch)
    found = [finish(train_steps(lm, trainings, recipe, kept=kept)) for trainings in (BATCH, again, wild, BATCH)]
    assert len(made) == 1 and made[0].replays == 4 * 3
    for a, b in zip([found[0], found[1], found[2][1:], found[3]], [*right[:2], right[2][1:], right[3]], strict=True):
        same(a, b)
    assert found[2][0].status == right[2][0].status
    same(found[0], found[3])  # no repetition has overwritten it
    for other in ([Training(cases.SEQUENCES[1:], 0.01)], [BATCH[2], BATCH[2]]):
        same(finish(train_steps(lm, other, recipe, kept=kept)), train(lm, other, recipe))
    assert kept.rows(cases.lm("gpt2"), BATCH, recipe) is None
    assert kept.rows(lm, BATCH, replace(recipe, epochs=2)) is None


def test_a_large_batch_is_not_repeated_for_a_few_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, recipe, kept = cases.lm("llama"), TrainingRecipe(), Kept()
    large, few = [*BATCH, *BATCH], [replace(BATCH[0], rate=0.05)]
    right = train(lm, few, recipe)
    made = recording(monkeypatch)
    finish(train_steps(lm, large, recipe, kept=kept))
    assert kept.rows(lm, large[:3], recipe) is not None and kept.rows(lm, few, recipe) is None
    same(finish(train_steps(lm, few, recipe, kept=kept)), right)
    assert len(made) == 2 and kept.rows(lm, few, recipe) == [0], "the smaller batch is kept instead"


def test_without_a_recorded_step_nothing_is_kept() -> None:
    lm, kept = cases.lm("llama"), Kept()
    same(finish(train_steps(lm, BATCH, kept=kept)), train(lm, BATCH))
    assert kept.rows(lm, BATCH, TrainingRecipe()) is None


def test_a_mistake_is_told_to_who_asks_for_the_result() -> None:
    order: list[str] = []

    def work(name: str, steps: int, problem: str | None = None) -> Steps[str]:
        for _ in range(steps):
            order.append(name)
            yield
        if problem is not None:
            raise UserError(problem)
        return name

    runs = [Run(work("a", 1)), Run(work("b", 3, "no")), Run(work("c", 2)), finished("d")]
    assert not order, "nothing begins before it is wanted"
    in_turns(runs)
    assert order == ["a", "b", "c", "b", "c", "b"]
    assert [run.result() for run in (runs[0], runs[2], runs[3])] == ["a", "c", "d"]
    for _ in range(2):
        with pytest.raises(UserError, match="no"):
            runs[1].result()
    assert not runs[1].advance()


def test_other_mistakes_are_told_at_once() -> None:
    def work() -> Steps[None]:
        yield
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        in_turns([Run(work())])


def test_a_processor_takes_one_training_at_a_time() -> None:
    assert not have_room_together(cases.lm("llama"))


def test_steps_sent_together_are_steps_sent_one_by_one() -> None:
    lm, first = cases.lm("llama"), cases.SEQUENCES
    steps = [(list(first[:2]), [True, False]), (list(first[1:]), [True, True])]
    shape = Shown.widest([first], "label")
    for found, (sequences, moving) in zip(Shown.of_each(steps, "label", lm, **shape), steps, strict=True):
        right = Shown.of(sequences, "label", lm, moving, **shape)
        assert found.first == right.first
        for name in ("ids", "targets", "weights", "moving"):
            assert torch.equal(getattr(found, name), getattr(right, name))


def test_distillation_stays_where_its_loss_was_last_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, (recipe, [training]) = cases.lm("llama"), JOBS["distilled"]
    wild = replace(training, rate=1e200)
    [tuned] = train(lm, [wild], recipe)
    assert tuned.status == "diverged" and torch.tensor(tuned.losses[:-1]).isfinite().all()
    assert not torch.tensor(tuned.losses[-1]).isfinite() and 1 < len(tuned.losses) < 10
    assert all(part.isfinite().all() for part in parts(tuned))
    recording(monkeypatch)
    [again] = train(lm, [wild], recipe)
    assert len(again.losses) == len(tuned.losses) and again.status == "diverged"
