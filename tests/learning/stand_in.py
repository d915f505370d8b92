"""A recorded step without a GPU: it computes the step again, in the same memory and at the same shape."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest
import torch

from dualview.learning import batch, distill, finetune


class StandIn:
    """`captured_step.Recorded` as its users see it, with the mistakes that they could make told."""

    made: ClassVar[list[StandIn]] = []

    def __init__(self, step: Callable[[Any], Any], still: Any, *_: Any) -> None:
        self._step, self._still, self.replays = step, still, 0
        step(still)
        StandIn.made.append(self)

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def turn(self) -> AbstractContextManager[object]:
        return nullcontext()

    def replay(self, shown: Any) -> Any:
        for name, there in vars(self._still).items():
            if isinstance(there, torch.Tensor):
                assert there.shape == getattr(shown, name).shape, "a recorded step has one shape"
        self._still.fill(shown)
        self.replays += 1
        return self._step(self._still)

    def waited(self) -> Generator[None, None, None]:
        yield
        yield


def recording(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Record every step from now on; the list of what is recorded."""
    monkeypatch.setattr(StandIn, "made", [])
    for module in (batch, distill, finetune):
        monkeypatch.setattr(module, "record", StandIn)
    return StandIn.made
