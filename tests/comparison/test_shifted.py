"""Moving the query is not asked again where it provably changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dualview.comparison.controls.settings import _stays  # pyright: ignore[reportPrivateUsage]
from dualview.models.scoring import PassPlan, ask
from equivalence import cases

BARE = PassPlan((), 0)


@pytest.mark.parametrize(("name", "stays"), [("llama", True), ("phi-parallel", True), ("gpt2", False), ("opt", False)])
def test_relative_positions_do_not_see_a_shift(name: str, stays: bool) -> None:
    lm, moved = cases.lm(name), replace(BARE, shift=9)
    zsl, shifted = ask(lm, cases.QUERIES, BARE), ask(lm, cases.QUERIES, moved)
    assert _stays(lm, cases.QUERIES, moved, zsl) == stays
    same = all(
        np.allclose(
            getattr(zsl.settings[0], what), getattr(shifted.settings[0], what), rtol=0, atol=1e-5
        )  # positions turn in float32
        for what in ("log_probs", "h", "m")
    )
    assert same == stays


def test_a_first_token_that_stays_behind_is_seen() -> None:
    lm, bos = cases.lm("llama"), PassPlan((cases.BOS,), 1)
    assert not _stays(lm, cases.QUERIES, replace(bos, shift=9), ask(lm, cases.QUERIES, bos))
