"""A training step recorded once and replayed (CUDA graphs): launching its kernels takes longer than running them.

A step of a small batch is thousands of small kernels, which Python launches one by one. Recorded at the shape of the
longest sequence, the same launches serve every step; what is shown is copied into place. Only for models on one GPU
whose pass asks nothing of the data on its way; others take their steps one kernel at a time, with the same results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, Protocol, Self, TypeVar

import torch

from dualview.anatomy.dispatch import is_spread
from dualview.io.errors import UserError, first_line
from dualview.learning.turns import Steps
from dualview.models.language_model import LanguageModel


class Fillable(Protocol):
    """What a step is shown: tensors whose contents can be replaced."""

    def fill(self, other: Self) -> None: ...


S = TypeVar("S", bound=Fillable)
T = TypeVar("T")
_WORTH = 8  # steps: recording one takes about as long as taking three
_log = logging.getLogger("dualview.learning")


class Recorded(Generic[S, T]):
    """A step to replay with other contents of what it was shown, next to other recorded steps.

    It is tried, recorded and replayed on one stream. Matrix products have scratch memory for each stream, which two
    graphs that run at the same time must not share.
    """

    def __init__(self, step: Callable[[S], T], still: S, device: torch.device) -> None:
        """still   moves no training: trying and recording the step leaves them as they are"""
        self._still, self._device = still, device
        # torch hands out its few streams in turn, and those of another priority apart: no other thread gets this one.
        self._graph, self._stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device, priority=-1)
        with self.running():
            with self.turn():  # what is set up at a first use must not be recorded
                step(still)
            # Other threads may go on using the GPU meanwhile.
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                self._made = step(still)

    @contextmanager
    def running(self) -> Generator[None]:
        """Around all turns: they see what was done before, and what is done after them sees what they did."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            yield
        finally:
            # Also after a failure: memory that is let go now must not be used again before the stream is done with it.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def turn(self) -> AbstractContextManager[object]:
        """Around one step and whatever reads its results before the next overwrites them; not across a yield."""
        return torch.cuda.stream(self._stream)

    def replay(self, shown: S) -> T:
        """Hand the step to the GPU; the tensors that it returns are the same each time."""
        self._still.fill(shown)
        self._graph.replay()
        return self._made

    def waited(self) -> Steps[None]:
        """Yields until the GPU has taken every step, so that reading a result does not hold up the others."""
        while not self._stream.query():
            yield


def record(step: Callable[[S], T], still: S, steps: int, lm: LanguageModel) -> Recorded[S, T] | None:
    """`step` as something to replay with other contents of `still`'s shape; None where it must be taken as it is."""
    if lm.device.type != "cuda" or is_spread(lm.model) or not lm.fast or steps < _WORTH:
        return None
    try:
        return Recorded(step, still, lm.device)
    except (RuntimeError, UserError) as error:  # what the step cannot do at all, it says again when it is taken
        _log.info("The training step of %s cannot be recorded (%s).", lm.name, first_line(error))
        # A failed recording may leave work behind that would fail later, where nothing explains it.
        torch.cuda.synchronize(lm.device)
        return None
