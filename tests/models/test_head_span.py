"""What settings change outside the heads' own outputs, against explicit vectors in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from dualview.anatomy.layers import Projection
from dualview.models.head_span import off_span, off_spans
from dualview.models.scoring import PassPlan, ask
from equivalence import cases, reference

# GQA; fused with biases; fused groups; parallel attention; inline attention; a hybrid that takes the slow path
NAMES = ["llama", "gpt2", "falcon-groups", "phi-parallel", "cohere-parallel", "opt", "gptj", "lfm2-hybrid"]
SOME = cases.QUERIES[:3]


def entering(name: str, ids: list[int]) -> list[np.ndarray]:
    """What enters every output projection at the last token, by the slow twin."""
    twin, seen = cases.twin(name), []
    names = {module: path for path, module in cases.lm(name).model.named_modules()}
    paths = dict.fromkeys(names[layer.output] for layer in cases.lm(name).anatomy.layers)
    keep = lambda _module, inputs, _output: seen.append(inputs[0].flatten(0, -2)[-1])  # noqa: E731
    hooks = [twin.get_submodule(path).register_forward_hook(keep) for path in paths]
    try:
        with torch.no_grad():
            reference.run(twin, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return [x.double().numpy() for x in seen]


def outside(vectors: np.ndarray) -> np.ndarray:
    """The projection off the span of some vectors, as a matrix."""
    kept = vectors[np.linalg.norm(vectors, axis=1) > 0]
    kept = kept / np.linalg.norm(kept, axis=1, keepdims=True)
    return np.eye(vectors.shape[1]) - np.linalg.pinv(kept, rcond=1e-8) @ kept


def explicit(updates: np.ndarray, spans: list[np.ndarray]) -> np.ndarray:
    """The updates off their spans, beyond what all share (its fit by dense matrices) and along it."""
    off = [outside(vectors) for vectors in spans]
    shared = np.linalg.solve(
        sum(off) + 0.01 * len(off) * np.eye(updates.shape[1]), sum(p @ u for p, u in zip(off, updates, strict=True))
    )
    found = [p @ (u - shared) for p, u in zip(off, updates, strict=True)]
    along = [p @ shared for p in off]
    return np.stack([row - (row @ way) / (way @ way) * way for row, way in zip(found, along, strict=True)])


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_off_span_is_the_explicit_projection(name: str, fast: bool) -> None:
    lm = cases.lm(name) if fast else replace(cases.lm(name), slow_because="a test asks for it")
    bos = PassPlan((cases.BOS,), 1, own=True)
    zsl, icl = ask(lm, SOME, bos), ask(lm, SOME, PassPlan(cases.DEMOS, 1))
    base, shown = zsl.settings[0].h, icl.settings[0].h
    assert zsl.own is not None and base is not None and shown is not None and icl.own is None
    found = off_spans(lm, zsl.own, base, {"icl": (shown, base)})["icl"]
    every = [entering(name, [cases.BOS, *query.ids]) for query in SOME]
    for at, layer in enumerate(lm.anatomy.layers):
        spans: list[np.ndarray] = []
        for i, entered in enumerate(every):
            y = entered[at]
            assert cases.worst(zsl.own[i, at, : y.size], y) < cases.EXACT
            weight = Projection("", layer.output, None).weight().double().numpy()
            width = y.size // layer.heads
            heads = np.stack([weight[:, s : s + width] @ y[s : s + width] for s in range(0, y.size, width)])
            bias = getattr(layer.output, "bias", None)
            whole = heads.sum(0) + (0 if bias is None else bias.detach().numpy())
            assert cases.worst(base[i, at], whole) < cases.EXACT, "the heads' outputs add up to h"
            spans.append(np.concatenate([heads, base[i, at][None]]))
        wanted = explicit(shown[:, at] - base[:, at], spans)
        assert cases.worst(found[:, at], wanted) < 1e-6 * max(1.0, np.abs(wanted).max())


def test_many_queries_are_taken_in_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, queries = cases.lm("llama"), [*SOME, *SOME]
    zsl, icl = (ask(lm, queries, PassPlan(p, 1, own=True)) for p in ((cases.BOS,), cases.DEMOS))
    base, shown, own = zsl.settings[0].h, icl.settings[0].h, zsl.own
    assert base is not None and shown is not None and own is not None
    layer = lm.anatomy.layers[0]
    monkeypatch.setattr("dualview.models.head_span._ELEMENTS", 4 * layer.heads * layer.d_model)
    found = off_spans(lm, own, base, {"icl": (shown, base)})["icl"]
    for part in (slice(0, 3), slice(3, 6)):
        alone = off_spans(lm, own[part], base[part], {"icl": (shown[part], base[part])})["icl"]
        np.testing.assert_allclose(found[part], alone, atol=1e-12)


@pytest.mark.parametrize("elements", [1 << 26, 1])  # where there is room for layers side by side, and where not
def test_layers_side_by_side_are_those_one_after_another(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = cases.lm("llama")
    zsl, icl = (ask(lm, SOME, PassPlan(p, 1, own=True)) for p in ((cases.BOS,), cases.DEMOS))
    base, shown, own, before = zsl.settings[0].h, icl.settings[0].h, zsl.own, torch.get_num_threads()
    assert base is not None and shown is not None and own is not None
    used: list[int] = []
    pools = lambda count, **options: used.append(count) or ThreadPoolExecutor(count, **options)  # noqa: E731
    monkeypatch.setattr("dualview.models.head_span.ThreadPoolExecutor", pools)
    monkeypatch.setattr("dualview.models.head_span._ELEMENTS", elements)
    found: list[np.ndarray] = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(off_spans(lm, own, base, {"icl": (shown, base)})["icl"])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert used == ([1, 2] if elements > 1 else [1, 1])
    np.testing.assert_allclose(*found, atol=1e-12)


def test_an_output_that_does_not_read_heads_gives_none() -> None:
    lm = cases.lm("llama")
    odd = tuple(replace(layer, d_value=3) for layer in lm.anatomy.layers)
    lm = replace(lm, anatomy=replace(lm.anatomy, layers=odd))
    h = np.zeros((1, 3, 32))
    assert off_spans(lm, h, h, {"icl": (h, h)}) == {}


def test_dependent_and_empty_heads_and_diverged_updates() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 12))
    span = torch.from_numpy(np.stack([a, 1e-6 * a, np.zeros(12), b, a + b])[None])
    update = rng.normal(size=12)
    h = torch.from_numpy(np.stack([update, np.full(12, np.inf)])[:, None])
    rest = off_span(h, span).numpy()
    np.testing.assert_allclose(rest[0, 0], outside(np.stack([a, b])) @ update, atol=1e-9)
    assert not np.isfinite(rest[1]).any()
    np.testing.assert_allclose(off_span(h[:1], torch.zeros(1, 2, 12, dtype=h.dtype)).numpy(), h[:1].numpy())
