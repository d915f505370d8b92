import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dualview.duality.theory.implicit import (
    GemmaBlock,
    Gpt2Block,
    LlamaBlock,
    ParallelBlock,
    RankOne,
    apply_patch,
    carry_patch,
    implicit_dynamics,
    input_patch,
    rms_norm,
    scale_patch,
    skip_patch,
)
from dualview.io.errors import UserError

PROPERTY = settings(max_examples=25, deadline=None)

widths = st.integers(1, 9)
seeds = st.integers(0, 10_000)
dtypes = st.sampled_from([torch.float64, torch.float32])
scales = st.sampled_from([1e-2, 1.0, 1e2])


def normals(seed, dtype, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def tight(dtype):
    return {"rtol": 1e-8, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 5e-3, "atol": 5e-3}


@PROPERTY
@given(widths, widths, dtypes, scales, seeds)
def test_the_patched_layer_reads_the_context_out_of_the_bare_input(d, d_out, dtype, scale, seed):
    weight, without, full = normals(seed, dtype, (d_out, d), (d,), (d,))
    without, full = scale * without, scale * full
    patch = input_patch(weight, without, full)
    allowed = (1e-10 if dtype == torch.float64 else 1e-3) * float(weight.norm() * (full.norm() + without.norm()))
    assert float(((weight + patch.matrix) @ without - weight @ full).abs().max()) <= allowed
    assert float((weight @ without + patch(without) - weight @ full).abs().max()) <= allowed
    assert torch.linalg.matrix_rank(patch.matrix) <= 1


def test_it_is_the_smallest_such_patch():
    weight, without, full = normals(0, torch.float64, (5, 4), (4,), (4,))
    patch = input_patch(weight, without, full).matrix
    null = torch.eye(4, dtype=torch.float64) - torch.outer(without, without) / (without @ without)
    other = patch + normals(1, torch.float64, (5, 4))[0] @ null
    torch.testing.assert_close(other @ without, patch @ without)
    assert other.norm() > patch.norm()


def test_another_query_is_not_patched():
    weight, without, full, other, other_full = normals(0, torch.float64, (5, 4), (4,), (4,), (4,), (4,))
    patched = weight + input_patch(weight, without, full).matrix
    assert float((patched @ other - weight @ other_full).norm()) > 0.1


def test_rank_one_applies_to_many_columns():
    left, right, x = normals(0, torch.float64, (3,), (4,), (4, 5))
    torch.testing.assert_close(RankOne(left, right)(x), torch.outer(left, right) @ x)


def test_a_zero_input_cannot_carry_a_patch():
    with pytest.raises(UserError, match="non-zero"):
        carry_patch(torch.zeros(3), torch.ones(2))
    with pytest.raises(UserError, match="A\\(x\\)"):
        implicit_dynamics(torch.eye(2), torch.zeros(2, 3))
    with pytest.raises(UserError, match="1 coordinates"):
        scale_patch(torch.tensor([1.0, 0.0]), torch.ones(2))


@PROPERTY
@given(widths, widths, seeds)
def test_skip(d, d_ff, seed):
    w, b, w2, b2, x, without, full = normals(seed, torch.float64, (d_ff, d), (d_ff,), (d, d_ff), (d,), (d,), (d,), (d,))

    def block(a, weight, bias):
        return x + a + w2 @ torch.tanh(weight @ a + b) + bias

    patch = skip_patch(w, without, full)
    torch.testing.assert_close(
        block(without, w + patch.weight.matrix, b2 + patch.bias), block(full, w, b2), **tight(w.dtype)
    )


@PROPERTY
@given(widths, widths, st.integers(1, 7), seeds)
def test_dynamics_end_at_the_patch_and_each_step_is_a_gradient_step(d, d_out, n, seed):
    weight, outputs = normals(seed, torch.float64, (d_out, d), (d, n))
    path = implicit_dynamics(weight, outputs)
    assert path.shape[0] == n
    expected = weight + input_patch(weight, outputs[:, 0], outputs[:, -1]).matrix
    torch.testing.assert_close(path[-1], expected, **tight(torch.float64))
    start = outputs[:, 0]
    for i in range(n - 1):
        leaf = path[i].clone().requires_grad_()
        d_i = torch.outer(weight @ (outputs[:, i] - outputs[:, i + 1]), start)
        (gradient,) = torch.autograd.grad(torch.trace(d_i.T @ leaf), leaf)
        torch.testing.assert_close(path[i] - gradient / (start @ start), path[i + 1], **tight(torch.float64))


def llama(seed, d, d_ff, dtype):
    norm, gate, up, down = normals(seed, dtype, (d,), (d_ff, d), (d_ff, d), (d, d_ff))
    return LlamaBlock(1 + 0.1 * norm, gate, up, down)


@PROPERTY
@given(st.integers(2, 9), st.integers(2, 9), dtypes, scales, seeds)
def test_llama(d, d_ff, dtype, scale, seed):
    block = llama(seed, d, d_ff, dtype)
    v, v_context = (scale * t for t in normals(seed + 1, dtype, (d,), (d,)))
    patch = block.patch(v, v_context)
    assert set(patch) == {"gate", "up", "down"}
    found, expected = apply_patch(block, patch)(v), block(v_context)
    assert float((found - expected).norm()) <= (1e-9 if dtype == torch.float64 else 1e-3) * float(
        expected.norm() + v.norm()
    )


@PROPERTY
@given(st.integers(2, 9), st.integers(2, 9), scales, seeds)
def test_gemma(d, d_ff, scale, seed):
    inner = llama(seed, d, d_ff, torch.float64)
    (post,) = normals(seed + 2, torch.float64, (d,))
    block = GemmaBlock(inner.norm, inner.gate, inner.up, inner.down, post_norm=1 + 0.1 * post)
    v, v_context = (scale * t for t in normals(seed + 1, torch.float64, (d,), (d,)))
    patch = block.patch(v, v_context)
    torch.testing.assert_close(apply_patch(block, patch)(v), block(v_context), rtol=1e-6, atol=1e-6 * scale)
    assert set(patch) == {"gate", "up", "post_norm"}


def gpt2(seed, d, d_ff, dtype):
    norm, norm_bias, fc, fc_bias, proj, proj_bias = normals(
        seed, dtype, (d,), (d,), (d_ff, d), (d_ff,), (d, d_ff), (d,)
    )
    return Gpt2Block(1 + 0.1 * norm, norm_bias, fc, fc_bias, proj, proj_bias)


@PROPERTY
@given(st.integers(2, 9), st.integers(1, 9), dtypes, seeds)
def test_gpt2_and_parallel(d, d_ff, dtype, seed):
    block = gpt2(seed, d, d_ff, dtype)
    v, v_context = normals(seed + 1, dtype, (d,), (d,))
    torch.testing.assert_close(apply_patch(block, block.patch(v, v_context))(v), block(v_context), **tight(dtype))
    parallel = ParallelBlock(block)
    x, attention, attention_context = normals(seed + 2, dtype, (d,), (d,), (d,))
    found = parallel.patched(attention, attention_context)(x, attention)
    torch.testing.assert_close(found, parallel(x, attention_context), **tight(dtype))
    torch.testing.assert_close(parallel(x, attention), x + attention + block.mlp(x), **tight(dtype))


def test_blocks_compute_what_torchs_modules_compute():
    block = llama(0, 6, 10, torch.float64)
    v = normals(1, torch.float64, (6,))[0]
    norm = nn.RMSNorm(6, eps=1e-6, dtype=torch.float64)
    norm.weight.data = block.norm
    z = norm(v).detach()
    torch.testing.assert_close(rms_norm(v, block.norm, 1e-6), z)
    expected = v + F.linear(F.silu(F.linear(z, block.gate)) * F.linear(z, block.up), block.down)
    torch.testing.assert_close(block(v), expected)
    bias = gpt2(0, 6, 10, torch.float64)
    layer = nn.LayerNorm(6, dtype=torch.float64)
    layer.weight.data, layer.bias.data = bias.norm, bias.norm_bias
    hidden = F.gelu(F.linear(layer(v).detach(), bias.fc, bias.fc_bias))
    torch.testing.assert_close(bias(v), v + F.linear(hidden, bias.proj, bias.proj_bias))


def test_leaving_the_output_patch_out_is_seen():
    block = llama(0, 6, 10, torch.float64)
    v, v_context = normals(1, torch.float64, (6,), (6,))
    patch = dict(block.patch(v, v_context))
    del patch["down"]
    assert float((apply_patch(block, patch)(v) - block(v_context)).norm()) == pytest.approx(
        float((v_context - v).norm())
    )
    assert block.gate is llama(0, 6, 10, torch.float64).gate or torch.equal(
        block.gate, llama(0, 6, 10, torch.float64).gate
    )
