"""The statistics are the same with numpy, with torch, and however many layers are taken at a time."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from torch.utils._pytree import tree_leaves

from close import assert_same_json
from dualview.metrics import arrays, recompute
from dualview.metrics._blas import one_thread_each
from dualview.metrics.floors.rotations import block_chunks
from dualview.metrics.recompute import measure
from dualview.records import Records, Setting, TokenScores

SETTINGS = ("zsl", "icl", "ft", "icl_reordered", "icl_flipped_labels", "ft_flipped_labels", "zsl_shifted")


def synthetic(n: int = 90, layers: int = 3, d: int = 20, heads: int = 3, c: int = 7, tokens: int = 150) -> Records:
    """Records with every array that is measured, and queries whose updates are zero or not finite."""
    rng = np.random.default_rng(0)
    columns = rng.integers(1, c + 1, n)
    h, m = rng.normal(size=(n, layers, d)), rng.normal(size=(n, layers, heads, c))
    move, turn = rng.normal(size=h.shape), rng.normal(size=m.shape)
    settings: dict[str, Setting] = {}
    for name in SETTINGS:
        scores = rng.normal(size=(n, 2))
        if name == "zsl":
            settings[name] = Setting(scores, h.astype(np.float32), m.astype(np.float32))
            continue
        move, turn = (0.6 * x + 0.7 * rng.normal(size=x.shape) for x in (move, turn))
        move[4], turn[5, :, 1] = 0, 0
        if name == "ft":
            move[6] = np.inf
        arrays_of = (h + move, m + turn, 0.9 * move)
        kept = [x.astype(np.float32) for x in arrays_of]
        settings[name] = Setting(scores, kept[0], kept[1], off_span=kept[2] if "shifted" not in name else None)
    rules = ("icl", "icl_reordered", "dual_v", "dual_v_lr0")
    by_rule = {name: rng.integers(0, 60, size=(5, layers, tokens)).astype(np.float64) for name in rules}
    by_rule["dual_v"][1, 1, 3] = np.nan
    token_scores = TokenScores(np.arange(tokens) // 10, by_rule)
    return Records(rng.integers(0, 2, n), settings, columns, {"controls": "quick"}, token_scores)


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    return measure(synthetic()).to_json()


def test_torch_gives_numpys_numbers(wanted: dict[str, Any]) -> None:
    assert_same_json(measure(synthetic(), device="cpu").to_json(), wanted)


def test_products_divided_among_threads_give_the_same(wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "one_thread_each", nullcontext)
    assert_same_json(measure(synthetic()).to_json(), wanted)


def test_no_product_is_divided_while_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts() -> list[int]:
        return [one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"]

    seen: list[list[int]] = []

    def watched(records: Records) -> bool:
        seen.append(counts())
        return has_controls(records)

    has_controls, before = recompute.has_controls, counts()
    monkeypatch.setattr(recompute, "has_controls", watched)
    measure(synthetic())
    assert seen == [[1] * len(before)]
    assert counts() == before


def test_the_last_of_several_restores_the_threads() -> None:
    def counts() -> list[int]:
        return [one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"]

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before, first, second = counts(), one_thread_each(), one_thread_each()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)  # as in two threads: the first to begin is the first to end
        assert counts() == [1] * len(before)
        second.__exit__(None, None, None)
        assert counts() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_numpys_numbers(wanted: dict[str, Any]) -> None:
    assert_same_json(measure(synthetic(), device="cuda").to_json(), wanted)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_layers_one_at_a_time(device: str | None, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CACHED", "_ON_DEVICE"):
        monkeypatch.setattr(arrays, name, 1)
    assert_same_json(measure(synthetic(), device=device).to_json(), wanted)


class Elsewhere(torch.Tensor):
    """Refuses what a tensor on a GPU refuses: numpy's arrays, tensors of the CPU, and being read without a copy."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in ("numpy", "__array__", "tolist"), func
        for leaf in tree_leaves((args, kwargs or {})):
            assert not isinstance(leaf, np.ndarray), func
            assert not isinstance(leaf, torch.Tensor) or isinstance(leaf, cls) or not leaf.ndim, func
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else found


def test_nothing_mixes_the_device_with_the_cpu(wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: arrays.Backend, array: np.ndarray) -> Any:
        return array if self.device is None else torch.tensor(array).as_subclass(Elsewhere)

    monkeypatch.setattr(arrays.Backend, "put", put)
    with pytest.raises(AssertionError):
        np.sqrt(arrays.Backend("cpu").put(np.ones(2)))
    assert_same_json(measure(synthetic(), device="cpu").to_json(), wanted)


@pytest.mark.parametrize("which", [SETTINGS, ("zsl", "ft"), ("icl",)], ids=["all", "some", "one"])
def test_records_that_are_on_the_device(
    which: tuple[str, ...], wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records may be tensors, some or all of them; they are neither copied to the host nor mixed with its arrays."""
    given = synthetic()

    def away(array: np.ndarray | None) -> Any:
        return None if array is None else torch.tensor(array).as_subclass(Elsewhere)

    def put(self: arrays.Backend, array: Any) -> Any:
        on_device = self.device is None or isinstance(array, Elsewhere)
        return array if on_device else torch.tensor(array).as_subclass(Elsewhere)

    moved = {
        name: replace(each, h=away(each.h), m=away(each.m), off_span=away(each.off_span)) if name in which else each
        for name, each in given.settings.items()
    }
    monkeypatch.setattr(arrays.Backend, "put", put)
    records = replace(given, settings=moved)
    assert_same_json(measure(records, device="cpu").to_json(), wanted)
    back = records.on_host()
    for name, setting in given.settings.items():
        assert all(np.array_equal(getattr(back[name], what), getattr(setting, what), equal_nan=True) for what in "hm")
    assert back.on_host() is back and given.on_host() is given


@pytest.mark.parametrize("shape", [(40, 40), (1, 40, 40), (3, 5, 33, 33), (2, 8, 8)])
def test_eigenvectors_are_numpys(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0).normal(size=shape)
    matrices = random + random.swapaxes(-1, -2)
    given: Any = torch.from_numpy(matrices).as_subclass(Elsewhere)
    for found in (arrays.eigh(matrices), arrays.eigh(given)):
        values, vectors = (np.asarray(torch.as_tensor(side).as_subclass(torch.Tensor)) for side in found)
        assert values.shape == shape[:-1] and (np.diff(values) > 0).all()
        np.testing.assert_allclose(vectors * values[..., None, :] @ vectors.swapaxes(-1, -2), matrices, atol=1e-12)
        np.testing.assert_allclose(
            vectors @ vectors.swapaxes(-1, -2), np.broadcast_to(np.eye(shape[-1]), shape), atol=1e-12
        )


def test_blocks_of_different_widths_are_one_chunk_on_a_device() -> None:
    dims = np.array([3, 3, 5, 5, 4])
    blocks = [np.array([0, 1]), np.array([2, 3]), np.array([4])]
    stack = np.arange(5 * 2 * 2 * 6, dtype=np.float32).reshape(5, 2, 2, 6)
    narrow = {
        n: c.read(stack)[:, i] for c in block_chunks(blocks, dims, 2, arrays.NUMPY) for i, n in enumerate(c.numbers)
    }
    chunks = block_chunks(blocks, dims, 2, arrays.Backend("cpu"))
    assert [chunk.numbers for chunk in chunks] == [[0, 1], [2]]
    for chunk in chunks:
        read: Any = chunk.read(arrays.Backend("cpu").put(stack))
        for i, number in enumerate(chunk.numbers):
            width = narrow[number].shape[-1]
            assert np.array_equal(read[:, i, ..., :width].numpy(), narrow[number]) and not read[:, i, ..., width:].any()


def test_steps_cover_all_layers_within_the_bound() -> None:
    for backend in (arrays.NUMPY, arrays.Backend("cpu")):
        steps = backend.steps(32, 500 * 4096)
        assert [layer for step in steps for layer in range(32)[step]] == list(range(32))
        assert max(step.stop - step.start for step in steps) * 500 * 4096 <= max(500 * 4096, 1 << 24)
