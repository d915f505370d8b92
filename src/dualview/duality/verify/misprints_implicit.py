"""The misprints of contexts as patches (see `misprints`): a wrong token, a lost sign, a forgotten output patch."""

import torch

from dualview.duality.theory.implicit import apply_patch, carry_patch, input_patch, rms_norm
from dualview.duality.theory.toy_attention import relative_error
from dualview.duality.verify.check import Draws, Identity
from dualview.duality.verify.implicit import (
    DHERIN,
    GOLDWASER,
    attention_residual,
    contextual,
    contextual_block,
    gemma_block,
    gpt2_block,
    llama_block,
)


def _wrong_token(draws: Draws) -> float:
    setup = contextual(draws)
    block, other = setup.block, draws.normal(setup.x.shape[0])
    patch = input_patch(block.first, block.attend(setup.nothing, setup.x), block.attend(setup.context, setup.x))
    found = block.after(block.attend(setup.nothing, other), block.first + patch.matrix)
    return relative_error(found, block.after(block.attend(setup.context, other), block.first))


def _hung_on_context(draws: Draws) -> float:
    setup = contextual(draws)
    block = setup.block
    without, full = block.attend(setup.nothing, setup.x), block.attend(setup.context, setup.x)
    patch = carry_patch(full, block.first @ (full - without))
    return relative_error(block.after(without, block.first + patch.matrix), block.after(full, block.first))


def _patch_sign(draws: Draws) -> float:
    setup = contextual(draws)
    block = setup.block
    without, full = block.attend(setup.nothing, setup.x), block.attend(setup.context, setup.x)
    patch = input_patch(block.first, without, full)
    return relative_error(block.after(without, block.first - patch.matrix), block.after(full, block.first))


def _skip_without_bias(draws: Draws) -> float:
    setup = contextual(draws)
    block = setup.block
    without, full = block.attend(setup.nothing, setup.x), block.attend(setup.context, setup.x)
    patch = input_patch(block.first, without, full)
    found = setup.x + without + block.after(without, block.first + patch.matrix)
    return relative_error(found, setup.x + full + block.after(full, block.first))


def _llama_input_only(draws: Draws) -> float:
    d = draws.size(3, 9)
    block, v, v_context = llama_block(draws, d), draws.normal(d), draws.normal(d)
    patch = {name: delta for name, delta in block.patch(v, v_context).items() if name != "down"}
    return relative_error(apply_patch(block, patch)(v), block(v_context))


def _llama_unpatched_hidden(draws: Draws) -> float:
    d = draws.size(3, 9)
    block, v, v_context = llama_block(draws, d), draws.normal(d), draws.normal(d)
    stale = carry_patch(block.hidden(rms_norm(v, block.norm, block.eps)), v_context - v)
    return relative_error(apply_patch(block, {**block.patch(v, v_context), "down": stale})(v), block(v_context))


def _gemma_undivided(draws: Draws) -> float:
    d = draws.size(3, 9)
    block, v, v_context = gemma_block(draws, d), draws.normal(d), draws.normal(d)
    patch = {**block.patch(v, v_context), "post_norm": v_context - v}
    return relative_error(apply_patch(block, patch)(v), block(v_context))


def _gpt2_input_only(draws: Draws) -> float:
    d = draws.size(3, 9)
    block, v, v_context = gpt2_block(draws, d), draws.normal(d), draws.normal(d)
    return relative_error(apply_patch(block, {"fc": block.patch(v, v_context)["fc"]})(v), block(v_context))


def _patches_of_unpatched_states(draws: Draws) -> float:
    d = draws.size(4, 8)
    layers = [(contextual_block(draws, d), llama_block(draws, d)) for _ in range(3)]
    query = draws.normal(d, 3)
    full, plain, short = torch.cat([draws.normal(d, 5), query], dim=1), query, query
    for attention, mlp in layers:
        full_v, plain_v, short_v = (attention_residual(attention, tokens) for tokens in (full, plain, short))
        stale = apply_patch(mlp, mlp.patch(plain_v[:, -1], full_v[:, -1]))  # from the zero-shot pass without patches
        full, plain = (torch.stack([mlp(column) for column in v.T], dim=1) for v in (full_v, plain_v))
        short = torch.stack([*(mlp(column) for column in short_v.T[:-1]), stale(short_v[:, -1])], dim=1)
    return relative_error(short[:, -1], full[:, -1])


MISPRINTS = (
    Identity("another query's patch  [wrong token]", DHERIN, _wrong_token, 1e-10),
    Identity("ΔW = (WΔA)A(C,x)ᵀ/‖A(C,x)‖²  [A with the context]", DHERIN, _hung_on_context, 1e-10),
    Identity("W − ΔW  [sign]", DHERIN, _patch_sign, 1e-10),
    Identity("skip without Δb′", DHERIN, _skip_without_bias, 1e-10),
    Identity("Llama block without ΔW_down", GOLDWASER, _llama_input_only, 1e-10),
    Identity("Llama block, h of the unpatched gate and up", GOLDWASER, _llama_unpatched_hidden, 1e-10),
    Identity("Gemma block, Δm = v_C − v  [not divided by u]", GOLDWASER, _gemma_undivided, 1e-10),
    Identity("GPT-2 block without Δb₂", GOLDWASER, _gpt2_input_only, 1e-10),
    Identity("layers patched from unpatched states", GOLDWASER, _patches_of_unpatched_states, 1e-10),
)
