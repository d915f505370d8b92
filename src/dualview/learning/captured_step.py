"""A training step recorded once and replayed (CUDA graphs): launching its kernels takes longer than running them.

A step of a small batch is thousands of small kernels, which Python launches one by one. Recorded at the shape of the
longest sequence, the same launches serve every step; what is shown is copied into place. Only for models on one GPU
whose pass asks nothing of the data on its way; others take their steps one kernel at a time, with the same results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol, Self, TypeVar

import torch

from dualview.anatomy.dispatch import is_spread
from dualview.io.errors import first_line
from dualview.models.language_model import LanguageModel


class Fillable(Protocol):
    """What a step is shown: tensors whose contents can be replaced."""

    def fill(self, other: Self) -> None: ...


S = TypeVar("S", bound=Fillable)
T = TypeVar("T")
_WORTH = 8  # steps: recording one takes about as long as taking three
_log = logging.getLogger("dualview.learning")


@contextmanager
def captured(step: Callable[[S], T], still: S, steps: int, lm: LanguageModel) -> Generator[Callable[[S], T] | None]:
    """`step` as something to replay with other contents of `still`'s shape; None where it must be taken as it is.

    `still` moves no training: trying and recording the step leaves them as they are.
    """
    if lm.device.type != "cuda" or is_spread(lm.model) or not lm.fast or steps < _WORTH:
        yield None
        return
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream(lm.device)
    try:
        aside.wait_stream(torch.cuda.current_stream(lm.device))
        with torch.cuda.stream(aside):  # what is set up at a first use must not be recorded
            step(still)
            step(still)
        torch.cuda.current_stream(lm.device).wait_stream(aside)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on using the GPU
            made = step(still)
    except RuntimeError as error:
        _log.info("The training step of %s cannot be recorded (%s).", lm.name, first_line(error))
        # A failed recording may leave work behind that would fail later, where nothing explains it.
        torch.cuda.synchronize(lm.device)
        yield None
        return

    def replay(shown: S) -> T:
        still.fill(shown)
        graph.replay()
        return made

    yield replay
