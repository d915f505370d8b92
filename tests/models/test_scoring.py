"""What a pass keeps besides the records: the likeliest tokens, tapped projections; and what it never builds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dualview.anatomy import kernels as attention
from dualview.models.scoring import TOP_K, PassPlan, ask
from equivalence import cases, reference

SLOW_AND_FAST = ["llama", "gpt2", "gptj", "lfm2-hybrid"]


@pytest.mark.parametrize("at", ["prompt", "label0"])
@pytest.mark.parametrize("name", SLOW_AND_FAST)
def test_the_likeliest_tokens_after_the_prompt(name: str, at) -> None:
    top = ask(cases.lm(name), cases.QUERIES, PassPlan(cases.DEMOS, 1, at=at)).settings[0]
    assert top.top_ids is not None and top.top_probs is not None
    for i, query in enumerate(cases.QUERIES):
        with torch.no_grad():
            right = reference.run(cases.twin(name), [*cases.DEMOS, *query.ids]).log_probs[-1]
        order = sorted(range(len(right)), key=lambda token: -float(right[token]))[:TOP_K]
        assert top.top_ids[i].tolist() == order
        assert cases.worst(top.top_probs[i], torch.exp(right[order])) < 1e-6  # kept in single precision


def tapped(name: str, query: Any, module: str, rows: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A projection's input and output at the last prompt token of a whole prompt, by the reference."""
    twin, seen = cases.twin(name), []
    last = lambda x: x.flatten(0, -2)[-1]  # noqa: E731
    hook = twin.get_submodule(module).register_forward_hook(lambda _m, x, y: seen.append((last(x[0]), last(y))))
    try:
        with torch.no_grad():
            reference.run(twin, [*cases.DEMOS, *query.ids])
    finally:
        hook.remove()
    [(x, y)] = seen
    return x, y if rows is None else y[rows]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-groups", "lfm2-hybrid"])
def test_taps_hold_what_went_through_each_projection(name: str, turned: bool) -> None:
    lm = cases.lm(name)
    # Apart, so that a fused matrix is tapped twice, for its keys' rows and for its values'.
    taps = lm.anatomy.projections(("k",)) + lm.anatomy.projections(("v",))
    if turned:
        taps = taps[::-1]  # whoever asks for taps need not know in which order they run
    some = cases.QUERIES[:2]
    got = ask(lm, some, PassPlan(cases.DEMOS, 1, taps=taps))
    assert len(got.tapped) == len(taps)
    for tap, kept in zip(taps, got.tapped, strict=True):
        for i, query in enumerate(some):
            x, y = tapped(name, query, tap.name, tap.rows)
            assert cases.worst(kept.x[i], x) < cases.EXACT
            assert cases.worst(kept.y[i], y) < cases.EXACT


@pytest.mark.parametrize("name", ["llama", "lfm2-hybrid"])
def test_details_are_kept_of_the_first_queries_alone(name: str) -> None:
    lm = cases.lm(name)
    taps = lm.anatomy.projections(("v",))
    whole = ask(lm, cases.QUERIES, PassPlan(cases.DEMOS, 1, demo_logits=True, taps=taps))
    part = ask(lm, cases.QUERIES, PassPlan(cases.DEMOS, 1, demo_logits=True, taps=taps, detailed=2, batch_size=1))
    assert whole.demo_logits is not None and part.demo_logits is not None
    assert part.demo_logits.shape[0] == 2 and part.tapped[0].x.shape[0] == 2
    assert cases.worst(part.demo_logits, whole.demo_logits[:2]) < 1e-12
    assert cases.worst(part.tapped[0].y, whole.tapped[0].y[:2]) < 1e-12
    assert part.settings[0].h is not None and part.settings[0].h.shape[0] == len(cases.QUERIES)


class Maps(TorchDispatchMode):
    """Watches every tensor made for one that is a map of `length` tokens by as many, per head or not."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.seen = length, []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-2:] == (self.length, self.length):
                self.seen.append((str(function), tuple(tensor.shape)))
        return made


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gptj", "xglm", "bloom"])
def test_no_map_is_ever_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_LOGITS_AT_ONCE", 512)  # a slice of queries at a time, small enough for this prefix
    prefix = (cases.BOS, *cases.tokens(90, 30))
    with Maps(len(prefix)) as watch:
        ask(cases.lm(name), cases.QUERIES[:1], PassPlan(prefix, 1))
    assert watch.seen == []


def test_nobody_asked() -> None:
    got = ask(cases.lm("llama"), [], PassPlan(cases.DEMOS, 1, record=False))
    assert got.settings[0].log_probs.shape == (0, 0)


def test_progress_counts_every_query() -> None:
    for name in ("llama", "lfm2-hybrid"):
        seen: list[int] = []
        ask(cases.lm(name), cases.QUERIES, PassPlan(cases.DEMOS, 1, batch_size=1), progress=seen.append)
        assert sum(seen) == len(cases.QUERIES)


def test_scores_are_float64_whatever_the_model() -> None:
    got = ask(cases.lm("llama"), cases.QUERIES, PassPlan((), 0)).settings[0]
    assert got.log_probs.dtype == np.float64 and got.h is not None and got.h.dtype == np.float64
