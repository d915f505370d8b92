"""Trainings that are advanced in turns, so that a GPU has several of them to work on at once.

A training of a small model is thousands of small kernels one after another, most of which leave most of a GPU idle.
Written as a generator that yields whenever it has handed a step over, it can be advanced next to others: each has a
stream of its own (`captured_step`), and nothing waits for the GPU until all have been handed over. Python runs one turn
at a time, so hooks and patches of one training are never seen by another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from dualview.anatomy.dispatch import is_spread
from dualview.io.errors import UserError
from dualview.models.language_model import LanguageModel

T = TypeVar("T")
P = ParamSpec("P")
Steps = Generator[None, None, T]
"""Work that yields after each step and returns what it made."""

_WEIGHT_BYTES, _FREE_BYTES = 4 << 30, 16 << 30


class Run(Generic[T]):
    """Work under way: it begins when it is first advanced, or when its result is first wanted."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps: Steps[T] | None = steps
        self._made: list[T] = []
        self._problem: UserError | None = None

    def advance(self) -> bool:
        """Take one step; False when there are no more. A user's mistake is kept for who asks for the result."""
        if self._steps is None:
            return False
        try:
            next(self._steps)
            return True
        except StopIteration as end:
            self._made.append(end.value)
        except UserError as problem:
            self._problem = problem
        self._steps = None
        return False

    def result(self) -> T:
        """What the work made, finished first if it is not."""
        while self.advance():
            pass
        if self._problem is not None:
            raise self._problem
        return self._made[0]


def finished(made: T) -> Run[T]:
    """Work that is done already."""

    def steps() -> Steps[T]:
        return made
        yield

    return Run(steps())


def finish(steps: Steps[T]) -> T:
    """The work without interruption."""
    return Run(steps).result()


def uninterrupted(work: Callable[P, Steps[T]]) -> Callable[P, T]:
    """The same work as a plain function."""

    @wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> T:
        return finish(work(*args, **kwargs))

    return done


def in_turns(runs: Sequence[Run[Any]]) -> None:
    """Advance all by a step, again and again, until every one has its result."""
    going = list(runs)
    while going:
        going = [run for run in going if run.advance()]


def have_room_together(lm: LanguageModel, models: int = 1) -> bool:
    """Whether several trainings may be under way at once, of as many models of this size.

    Only on a GPU, which one small model leaves idle; a large one fills it and needs the memory.
    """
    if lm.device.type != "cuda" or is_spread(lm.model):
        return False
    weights = sum(p.numel() * p.element_size() for p in lm.model.parameters())
    free = torch.cuda.mem_get_info(lm.device)[0]
    cached = torch.cuda.memory_reserved(lm.device) - torch.cuda.memory_allocated(lm.device)
    return models * weights <= _WEIGHT_BYTES and free + cached >= _FREE_BYTES
