import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.duality.theory.icl_as_update import (
    four_terms,
    linear_split,
    linear_weights,
    merge,
    outer_products,
    softmax_part,
    softmax_split,
    state_weights,
)
from dualview.duality.theory.toy_attention import lin_attn, relative_error, soft_attn

PROPERTY = settings(max_examples=25, deadline=None)

sizes = st.integers(1, 8)
dtypes = st.sampled_from([torch.float64, torch.float32])
scales = st.sampled_from([1e-3, 1.0, 1e3])
seeds = st.integers(0, 10_000)
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-3}


def draw(seed, dtype, *shapes, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@PROPERTY
@given(sizes, sizes, sizes, sizes, sizes, dtypes, scales, seeds)
def test_linear_split_and_outer_products(d, d_k, d_v, n_demo, n_own, dtype, scale, seed):
    w_k, w_v, demos, own, q = draw(seed, dtype, (d_k, d), (d_v, d), (d, n_demo), (d, n_own), (d_k,), scale=scale)
    slow = np.zeros(d_v)
    for token in torch.cat([demos, own], dim=1).double().T.numpy():  # token by token, in numpy
        slow += (w_v.double().numpy() @ token) * ((w_k.double().numpy() @ token) @ q.double().numpy())
    split = linear_split(w_v, w_k, demos, own)
    size = np.abs(slow).max() + float(split.icl.norm() * q.norm() + split.zsl.norm() * q.norm())
    assert np.abs(split(q).double().numpy() - slow).max() <= TOLERANCE[dtype] * size
    each = outer_products(w_k @ demos, w_v @ demos)
    torch.testing.assert_close(
        each.sum(dim=0), split.icl, rtol=1e-3, atol=TOLERANCE[dtype] * float(split.icl.abs().max())
    )
    assert float((split(torch.stack([q, q], dim=1))[:, 1] - split(q)).abs().max()) <= TOLERANCE[dtype] * size


@PROPERTY
@given(sizes, sizes, sizes, sizes, dtypes, scales, seeds)
def test_four_terms(d, d_k, d_v, n, dtype, scale, seed):
    w_k, w_v, dk, dv, x, q = draw(seed, dtype, (d_k, d), (d_v, d), (d_k, d), (d_v, d), (d, n), (d_k,), scale=scale)
    terms = four_terms(w_v, w_k, dv, dk, x)
    expected = lin_attn((w_k + dk) @ x, (w_v + dv) @ x, q)
    size = float(sum(t.norm() for t in (terms.base, terms.from_key, terms.from_value, terms.cross)) * q.norm())
    assert float((terms.total @ q - expected).abs().max()) <= TOLERANCE[dtype] * size
    torch.testing.assert_close(terms.base, linear_weights(w_v, w_k, x))
    torch.testing.assert_close(terms.delta + terms.base, terms.total)


def test_lost_transposes_are_far_off():
    w_k, w_v, dk, dv, x, q = draw(0, torch.float64, (6, 6), (6, 6), (6, 6), (6, 6), (6, 9), (6,))
    gram = x @ x.T
    printed = w_v @ gram @ w_k.T + w_v @ gram @ dk + dv @ gram @ w_k + dv @ gram @ dk
    assert relative_error(printed @ q, four_terms(w_v, w_k, dv, dk, x).total @ q) > 0.5


@PROPERTY
@given(sizes, sizes, sizes, sizes, dtypes, st.sampled_from([1e-2, 1.0, 30.0]), seeds)
def test_softmax_split_is_softmax_over_both(d_k, d_v, n_demo, n_own, dtype, scale, seed):
    k1, v1, k2, v2, q = draw(seed, dtype, (d_k, n_demo), (d_v, n_demo), (d_k, n_own), (d_v, n_own), (d_k,))
    q = q * scale  # at 30 the exponentials would overflow float32 without the log
    split = softmax_split(k1, v1, k2, v2, q)
    whole = soft_attn(torch.cat([k1, k2], dim=1), torch.cat([v1, v2], dim=1), q)
    torch.testing.assert_close(split.output, whole, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 1e-12)
    assert 0 <= float(split.mass) <= 1
    logits = (torch.cat([k1, k2], dim=1).T @ q / math.sqrt(d_k)).double().numpy()
    weights = np.exp(logits - logits.max())
    assert float(split.mass) == pytest.approx(weights[:n_demo].sum() / weights.sum(), abs=1e-5)
    torch.testing.assert_close(split.own, soft_attn(k2, v2, q), rtol=1e-4, atol=1e-5)


def test_split_over_heads_with_a_causal_mask_as_a_model_has_it():
    head, query, demo, own, d = 3, 4, 5, 4, 6
    logits, values = draw(3, torch.float64, (head, query, demo + own), (head, demo + own, d))
    mask = torch.ones(query, own).tril().bool()
    logits[:, :, demo:] = logits[:, :, demo:].masked_fill(~mask, -math.inf)
    split = merge(
        softmax_part(logits[..., :demo], values[:, None, :demo]),
        softmax_part(logits[..., demo:], values[:, None, demo:]),
    )
    expected = torch.softmax(logits, dim=-1) @ values
    torch.testing.assert_close(split.output, expected)
    torch.testing.assert_close(split.mass, torch.softmax(logits, dim=-1)[..., :demo].sum(dim=-1))


def test_demonstrations_out_of_sight_have_no_mass_and_no_nan():
    logits, values, own_logits, own_values = draw(0, torch.float64, (2, 3), (2, 3, 4), (2, 5), (2, 5, 4))
    unseen = torch.full_like(logits, -math.inf)
    split = merge(softmax_part(unseen, values), softmax_part(own_logits, own_values))
    assert split.mass.tolist() == [0, 0]
    torch.testing.assert_close(split.output, split.own)
    assert torch.isfinite(split.output).all()


def test_state_weights_over_heads():
    keys, values = draw(0, torch.float64, (3, 4, 5), (3, 2, 5))
    found = state_weights(keys, values)
    for h in range(3):
        torch.testing.assert_close(found[h], outer_products(keys[h], values[h]).sum(dim=0))
