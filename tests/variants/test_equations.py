"""Every variant against its equation written as loops, with padding anywhere, windows and grouped heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.io.errors import UserError
from dualview.variants import Alibi, Linear, Momentum, Negative, Regularised, Sign, TokenShift, apply
from dualview.variants.sums.layout import read_layout
from dualview.variants.sums.scan import CHUNK, moving_sum

VARIANTS = [
    Momentum(eta=0.7),
    Sign(alpha=0.8, scale="constant"),
    Sign(alpha=1.3, scale="sequence"),
    Sign(scale="token"),
    Regularised(alpha=0.3),
    Regularised(alpha=0.3, form="strict"),
    Negative(beta=0.5, k=1),
    Negative(beta=0.5, k=3),
    Linear(),
    Linear(scale=0.5, bare=True, average=True),
    TokenShift(eta=0.6),
    Alibi(strength=0.7),
]
IDS = [f"{v.name}-{n}" for n, v in enumerate(VARIANTS)]


def tensors(batch, kv_heads, group, length, d, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, kv_heads * group, length, d), (batch, kv_heads, length, d), (batch, kv_heads, length, d)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@settings(max_examples=6, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 9), st.integers(1, 3)),
    padding=st.sampled_from(["none", "left", "right", "both", "inside", "random"]),
    seed=st.integers(0, 10_000),
)
def test_padding_anywhere_changes_nothing(kit, variant, shape, padding, seed):
    kv_heads, group, length, d = shape
    query, key, value = tensors(3, kv_heads, group, length, d, seed)
    real = torch.ones(3, length, dtype=torch.bool)
    cut = np.random.default_rng(seed).integers(0, length, (3, 2))
    for row in range(3):
        a, b = sorted(cut[row])
        if padding in ("left", "both"):
            real[row, :a] = False
        if padding in ("right", "both"):
            real[row, b + 1 :] = False
        if padding == "inside":
            real[row, a:b] = False
        if padding == "random":
            real[row] = torch.from_numpy(np.random.default_rng([seed, row]).random(length) < 0.6)
    mask = None if padding == "none" else kit.causal_mask(real)
    out = apply(variant, query, key, value, mask=mask)
    assert out.isfinite().all()
    for row in range(3):
        keep = real[row]
        if keep.any():
            expected = kit.slow(variant, query[row][:, keep], key[row][:, keep], value[row][:, keep])
            np.testing.assert_allclose(out[row][keep].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.parametrize("window", [1, 2, 5])
def test_sliding_window(kit, variant, window):
    query, key, value = tensors(2, 2, 2, 12, 3)
    mask = kit.causal_mask(torch.ones(2, 12, dtype=torch.bool), window)
    out = apply(variant, query, key, value, mask=mask)
    for row in range(2):
        expected = kit.slow(variant, query[row], key[row], value[row], window=window)
        np.testing.assert_allclose(out[row].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_packed_sequences_do_not_see_each_other(kit, variant):
    query, key, value = tensors(1, 2, 1, 11, 3)
    parts = torch.tensor([0] * 4 + [1] * 7)
    mask = (kit.causal_mask(torch.ones(1, 11, dtype=torch.bool))) & (parts[:, None] == parts[None, :])
    out = apply(variant, query, key, value, mask=mask)
    for part in range(2):
        of = parts == part
        expected = kit.slow(variant, query[0][:, of], key[0][:, of], value[0][:, of])
        np.testing.assert_allclose(out[0][of].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_additive_masks_mean_the_same_as_boolean_ones(kit, variant):
    query, key, value = tensors(2, 1, 2, 6, 3)
    real = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    mask = kit.causal_mask(real)
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    a, b = (apply(variant, query, key, value, mask=m) for m in (mask, added))
    torch.testing.assert_close(a[real], b[real], rtol=0, atol=1e-13)


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.parametrize("last", [1, 3])
def test_queries_are_the_last_of_the_keys(variant, last):
    query, key, value = tensors(2, 2, 2, 8, 3)
    some, all_of_them = (apply(variant, query[:, :, -n:], key, value) for n in (last, 8))
    torch.testing.assert_close(some, all_of_them[:, -last:], rtol=0, atol=1e-13)


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_one_coefficient_per_head(kit, variant):
    query, key, value = tensors(1, 2, 2, 7, 3)
    each = torch.tensor([0.2, 0.7], dtype=torch.float64)
    out = apply(variant, query, key, value, coefficient=each)
    expected = kit.slow(variant, query[0], key[0], value[0], coefficient=each.numpy())
    np.testing.assert_allclose(out[0].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_sequences_of_several_chunks(kit, monkeypatch, variant):
    monkeypatch.setattr("dualview.variants.negative._ROWS", 50)
    query, key, value = tensors(1, 1, 1, 2 * CHUNK + 5, 2)
    out = apply(variant, query, key, value)
    np.testing.assert_allclose(out[0].numpy(), kit.slow(variant, query[0], key[0], value[0]), atol=1e-11)


def test_negatives_break_ties_by_the_earliest_token(kit):
    query, key, value = tensors(1, 1, 1, 9, 2)
    key[:, :, 4:7] = 0
    for k in (1, 2, 3):
        out = apply(Negative(beta=1.0, k=k), query, key, value)
        np.testing.assert_allclose(
            out[0].numpy(), kit.slow(Negative(beta=1.0, k=k), query[0], key[0], value[0]), atol=1e-12
        )


def recurrence(values, eta):
    """m_t = η (m_{t−1} + v_{t−1}), step by step."""
    sums = [np.zeros_like(values[0])]
    for v in values[:-1]:
        sums.append(eta * (sums[-1] + v))
    return np.stack(sums)


@pytest.mark.parametrize("eta", [0.0, 0.3, 0.99, 0.9999])
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 1000, CHUNK * CHUNK + 5])
def test_scan_is_the_recurrence(eta, length):
    values = torch.randn(1, 1, length, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    sums = moving_sum(values, eta, read_layout(None, length, length, values.device))
    expected = recurrence(values[0, 0].numpy(), eta)
    np.testing.assert_allclose(sums[0, 0].numpy(), expected, atol=1e-11 * max(1, abs(expected).max()))


@settings(max_examples=8, deadline=None)
@given(length=st.integers(CHUNK + 1, 3 * CHUNK), window=st.integers(1, 200), seed=st.integers(0, 1000))
def test_long_windows_with_padding(kit, length, window, seed):
    draw = np.random.default_rng(seed)
    values = torch.from_numpy(draw.normal(size=(2, 1, length, 2)))
    real = torch.from_numpy(draw.random((2, length)) < 0.8)
    mask = kit.causal_mask(real, window)
    sums = moving_sum(values, 0.9, read_layout(mask, length, length, values.device))
    for row in range(2):
        for t in np.flatnonzero(real[row].numpy()):
            earlier = [i for i in range(max(0, t - window + 1), t) if real[row, i]]
            expected = sum(
                (0.9 ** (len(earlier) - n) * values[row, 0, i] for n, i in enumerate(earlier)), torch.zeros(2)
            )
            np.testing.assert_allclose(sums[row, 0, t].numpy(), expected.numpy(), atol=1e-12)


def test_scan_in_low_precision_is_summed_in_float32():
    values = torch.full((1, 1, 2000, 1), 1.0, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = moving_sum(values, 0.999, read_layout(None, 2000, 2000, values.device))
    exact = 0.999 * (1 - 0.999**1999) / 0.001
    assert sums.dtype == torch.bfloat16
    assert abs(float(sums[0, 0, -1, 0]) / exact - 1) < 2**-8


def lower(length=5):
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None].clone()


def masks_of_another_kind():
    prefix, hole, blind, first = lower(), lower(), lower(), lower()
    prefix[..., :3, :3] = True
    hole[..., 4, 1] = False  # a hole that only one row has
    blind[..., 2, 2] = False
    first[..., 0, 0] = False
    fixed = torch.zeros(1, 1, 5, 9, dtype=torch.bool)  # a cache of fixed size, blank at its end
    fixed[..., :5] = prefix
    return {
        "prefix": prefix,
        "bidirectional": torch.ones(1, 1, 5, 5, dtype=torch.bool),
        "strictly lower": lower().tril(-1),
        "hides one token from itself": blind,
        "hides the first token from itself": first,
        "hole in one row": hole,
        "prefix behind a past": torch.cat([torch.ones(1, 1, 5, 3, dtype=torch.bool), prefix], -1),
        "bidirectional behind a past": torch.ones(1, 1, 5, 8, dtype=torch.bool),
        "prefix in a fixed cache": fixed,
    }


@pytest.mark.parametrize("name", list(masks_of_another_kind()))
@pytest.mark.parametrize("variant", [Momentum(), Regularised(alpha=1.0), Negative(), Sign(scale="sequence"), Alibi()])
def test_a_mask_that_is_not_causal_is_refused(variant, name):
    mask = masks_of_another_kind()[name]
    query, key, value = tensors(1, 1, 1, mask.shape[-1], 2)
    with pytest.raises(UserError, match="causal masks"):
        apply(variant, query[:, :, -5:], key, value, mask=mask)


def test_a_mask_per_head_is_refused():
    query, key, value = tensors(1, 1, 1, 5, 2)
    with pytest.raises(UserError, match="mask per head"):
        apply(Momentum(), query, key, value, mask=lower().expand(1, 2, 5, 5))


@pytest.mark.parametrize("hides", [-1e4, -1e9, float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_whatever_number_hides_a_key_hides_it(variant, dtype, hides):
    query, key, value = (x.to(dtype) for x in tensors(1, 1, 2, 6, 3))
    added = torch.zeros(1, 1, 6, 6, dtype=dtype).masked_fill(~lower(6), hides)
    a, b = (apply(variant, query, key, value, mask=m) for m in (lower(6), added))
    close = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}
    torch.testing.assert_close(a, b, rtol=0, atol=close[dtype])


def test_a_moderate_bias_does_not_hide_and_what_could_be_either_is_refused():
    query, key, value = tensors(1, 1, 1, 6, 3)
    at = torch.arange(6)
    bias = (-50.0 * (at[:, None] - at)).masked_fill(~lower(6), float("-inf")).double()
    silent = apply(Momentum(eta=0.0), query, key, value, mask=bias)
    sums = apply(Momentum(eta=0.5), query, key, value, mask=bias) - silent
    plain = apply(Momentum(eta=0.5), query, key, value) - apply(Momentum(eta=0.0), query, key, value)
    torch.testing.assert_close(sums, plain, rtol=0, atol=1e-12)
    for unclear in (-3000.0, float("nan")):
        bias[..., 3, 1] = unclear
        with pytest.raises(UserError, match="between -9000 and -1000"):
            apply(Momentum(), query, key, value, mask=bias)
    with pytest.raises(UserError, match="position bias"):
        apply(Linear(), query, key, value, mask=bias.nan_to_num())


def test_a_changed_mask_is_read_again(kit):
    query, key, value = tensors(1, 1, 1, 5, 2)
    mask = kit.causal_mask(torch.ones(1, 5, dtype=torch.bool)).clone()
    before = apply(Momentum(), query, key, value, mask=mask)
    mask[..., 0] = False
    after = apply(Momentum(), query, key, value, mask=mask)
    np.testing.assert_allclose(
        after[0, 1:].numpy(), kit.slow(Momentum(), query[0, :, 1:], key[0, :, 1:], value[0, :, 1:])
    )
    assert not torch.equal(before, after)
