"""How soon the first two answers are there, on the embedded model."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dualview.io.progress import Silent
from dualview.web.experiment import answer
from dualview.web.jobs import Cancelled
from dualview.web.model_cache import ModelCache
from dualview.web.state import DrawQuery, State
from web.live import document


@pytest.mark.embedded
def test_zero_shot_and_in_context_take_less_than_three_seconds() -> None:
    """Eight demonstrations, the model loaded: processor seconds of all threads, so that others count for nothing."""
    model_cache = ModelCache(["embedded"], dtype="float32", device="cpu")
    model_cache.model("embedded", Silent())
    drawn = {"task": "movie", "seed": 1, "shots": 8}
    found, task = model_cache.draw(DrawQuery(**drawn)), model_cache.task("movie")
    given = document("embedded", template=task.template, labels=list(task.labels), drawn=drawn, **found)
    spent: dict[str, float] = {}
    start = time.process_time()

    def emit(event: dict[str, Any]) -> None:
        if event["event"] == "setting":
            spent[event["setting"]] = time.process_time() - start
        if len(spent) == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        answer(State.model_validate(given), model_cache, emit)
    assert set(spent) == {"zsl", "icl"} and spent["icl"] < 3.0, spent
