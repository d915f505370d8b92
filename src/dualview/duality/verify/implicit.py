"""Identities of contexts as patches (Dherin et al., Goldwaser et al.): T5 and T6, up to a whole random transformer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.implicit import (
    GemmaBlock,
    Gpt2Block,
    LlamaBlock,
    ParallelBlock,
    Patch,
    RankOne,
    apply_patch,
    carry_patch,
    implicit_dynamics,
    input_patch,
    rms_norm,
    skip_patch,
)
from dualview.duality.theory.linalg import singular_values
from dualview.duality.theory.toy_attention import relative_error, soft_attn
from dualview.duality.verify.check import DHERIN, GOLDWASER, Draws, Sides, identity


@dataclass(frozen=True)
class ContextualBlock:
    """Softmax self-attention A(C, x) followed by W' tanh(W A + b) + b'; the query attends to C and itself."""

    w_k: Float[Tensor, "d d"]
    w_q: Float[Tensor, "d d"]
    w_v: Float[Tensor, "d d"]
    first: Float[Tensor, "d_ff d"]
    first_bias: Float[Tensor, " d_ff"]
    second: Float[Tensor, "d d_ff"]
    second_bias: Float[Tensor, " d"]

    def attend(self, context: Float[Tensor, "d token"], x: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """A(C, x)."""
        tokens = torch.cat([context, x.unsqueeze(1)], dim=1)
        return soft_attn(self.w_k @ tokens, self.w_v @ tokens, self.w_q @ x)

    def after(self, a: Float[Tensor, " d"], weight: Float[Tensor, "d_ff d"]) -> Float[Tensor, " d"]:
        """f(W a + b) with `weight` for W."""
        return self.second @ torch.tanh(weight @ a + self.first_bias) + self.second_bias


@dataclass(frozen=True)
class BlockInContext:
    """A block, a context and a query, with A(x) and A(C, x)."""

    block: ContextualBlock
    context: Float[Tensor, "d token"]
    x: Float[Tensor, " d"]

    @property
    def without(self) -> Float[Tensor, " d"]:
        """A(x), without the context."""
        return self.block.attend(self.context[:, :0], self.x)

    @property
    def full(self) -> Float[Tensor, " d"]:
        """A(C, x)."""
        return self.block.attend(self.context, self.x)

    @property
    def expected(self) -> Float[Tensor, " d"]:
        """T_W(C, x)."""
        return self.block.after(self.full, self.block.first)

    def patched(self, delta: RankOne, sign: float = 1.0) -> Float[Tensor, " d"]:
        """T_{W+ΔW}(∅, x)."""
        return self.block.after(self.without, self.block.first + sign * delta.matrix)


def contextual_block(draws: Draws, d: int) -> ContextualBlock:
    """Random weights of width d."""
    d_ff = draws.size(4, 12)
    return ContextualBlock(
        w_k=draws.matrix(d, d),
        w_q=draws.matrix(d, d),
        w_v=draws.matrix(d, d),
        first=draws.matrix(d_ff, d),
        first_bias=draws.normal(d_ff),
        second=draws.matrix(d, d_ff),
        second_bias=draws.normal(d),
    )


def contextual(draws: Draws) -> BlockInContext:
    """Random sizes."""
    d = draws.size(3, 8)
    return BlockInContext(contextual_block(draws, d), draws.normal(d, draws.size(3, 9)), draws.normal(d))


@identity("T_W(C,x) = T_{W+ΔW}(∅,x),  ΔW = (WΔA)A(x)ᵀ/‖A(x)‖²,  rank ΔW = 1", DHERIN + ", Thm 2.2", given=contextual)
def _whole(setup: BlockInContext) -> float:
    patch = input_patch(setup.block.first, setup.without, setup.full)
    values = singular_values(patch.matrix)
    return max(relative_error(setup.patched(patch), setup.expected), float(values[1] / values[0]))


@_whole.misprint("another query's patch  [wrong token]", DHERIN, given=None)
def _wrong_token(draws: Draws) -> Sides:
    setup = contextual(draws)
    other = replace(setup, x=draws.normal(setup.x.shape[0]))
    return other.patched(input_patch(setup.block.first, setup.without, setup.full)), other.expected


@_whole.misprint("ΔW = (WΔA)A(C,x)ᵀ/‖A(C,x)‖²  [A with the context]", DHERIN)
def _hung_on_context(setup: BlockInContext) -> Sides:
    return setup.patched(carry_patch(setup.full, setup.block.first @ (setup.full - setup.without))), setup.expected


@_whole.misprint("W − ΔW  [sign]", DHERIN)
def _patch_sign(setup: BlockInContext) -> Sides:
    return setup.patched(input_patch(setup.block.first, setup.without, setup.full), -1.0), setup.expected


@identity("the same for any part Y of the context:  T_W(C,x) = T_{W+ΔW(Y)}(C∖Y,x)", DHERIN + ", Thm 2.2")
def _partial(draws: Draws) -> Sides:
    setup = contextual(draws)
    block = setup.block
    kept = block.attend(setup.context[:, draws.size(1, 2) :], setup.x)
    return block.after(kept, block.first + input_patch(block.first, kept, setup.full).matrix), setup.expected


@identity("with a skip: the same ΔW and Δb′ = ΔA", DHERIN + ", appendix", given=contextual)
def _skip(setup: BlockInContext) -> Sides:
    weight, bias = skip_patch(setup.block.first, setup.without, setup.full)
    found = setup.x + setup.without + setup.patched(weight) + bias
    return found, setup.x + setup.full + setup.expected


@_skip.misprint("skip without Δb′", DHERIN)
def _skip_without_bias(setup: BlockInContext) -> Sides:
    patch = input_patch(setup.block.first, setup.without, setup.full)
    return setup.x + setup.without + setup.patched(patch), setup.x + setup.full + setup.expected


@identity("W_{i+1} = W_i − h∇L_i,  L_i = tr(D_iᵀW):  W_n = W + ΔW(C)", DHERIN + ", Prop. 3.1", given=contextual)
def _dynamics(setup: BlockInContext) -> Sides:
    block, n = setup.block, setup.context.shape[1]
    outputs = torch.stack([block.attend(setup.context[:, :i], setup.x) for i in range(n + 1)], dim=1)
    weights = implicit_dynamics(block.first, outputs)
    expected = block.first + input_patch(block.first, outputs[:, 0], outputs[:, -1]).matrix
    return weights[-1], expected


def llama_block(draws: Draws, d: int) -> LlamaBlock:
    """Random weights; `d_ff` is random too."""
    d_ff = draws.size(6, 14)
    return LlamaBlock(1 + 0.1 * draws.normal(d), draws.matrix(d_ff, d), draws.matrix(d_ff, d), draws.matrix(d, d_ff))


def gemma_block(draws: Draws, d: int) -> GemmaBlock:
    """The same with a norm after the MLP."""
    inner = llama_block(draws, d)
    return GemmaBlock(inner.norm, inner.gate, inner.up, inner.down, post_norm=1 + 0.1 * draws.normal(d))


def gpt2_block(draws: Draws, d: int) -> Gpt2Block:
    """Random weights and biases."""
    d_ff = draws.size(6, 14)
    return Gpt2Block(
        1 + 0.1 * draws.normal(d),
        draws.normal(d),
        draws.matrix(d_ff, d),
        draws.normal(d_ff),
        draws.matrix(d, d_ff),
        draws.normal(d),
    )


BlockT = TypeVar("BlockT", LlamaBlock, GemmaBlock, Gpt2Block)


def patched_at(
    draws: Draws,
    make: Callable[[Draws, int], BlockT],
    misprinted: Callable[[BlockT, Tensor, Tensor], Patch] = lambda block, v, v_context: {},
    left_out: str | None = None,
) -> Sides:
    """A random block at v with its patch (some fields misprinted, or one left out), and the block at v_C."""
    d = draws.size(3, 9)
    block, v, v_context = make(draws, d), draws.normal(d), draws.normal(d)
    patch = {**block.patch(v, v_context), **misprinted(block, v, v_context)}
    kept = {name: delta for name, delta in patch.items() if name != left_out}
    return apply_patch(block, kept)(v), block(v_context)


@identity("Llama block: ΔW_gate, ΔW_up from z to z_C; ΔW_down = (v_C−v)hᵀ/‖h‖²", GOLDWASER)
def _llama(draws: Draws) -> Sides:
    return patched_at(draws, llama_block)


@_llama.misprint("Llama block without ΔW_down", GOLDWASER)
def _llama_input_only(draws: Draws) -> Sides:
    return patched_at(draws, llama_block, left_out="down")


@_llama.misprint("Llama block, h of the unpatched gate and up", GOLDWASER)
def _llama_unpatched_hidden(draws: Draws) -> Sides:
    def stale(block: LlamaBlock, v: Tensor, v_context: Tensor) -> Patch:
        return {"down": carry_patch(block.hidden(rms_norm(v, block.norm, block.eps)), v_context - v)}

    return patched_at(draws, llama_block, stale)


@identity("Gemma block: ΔW_gate, ΔW_up from z to z_C; Δm = (v_C−v)/u", GOLDWASER, 1e-9)
def _gemma(draws: Draws) -> Sides:
    return patched_at(draws, gemma_block)


@_gemma.misprint("Gemma block, Δm = v_C − v  [not divided by u]", GOLDWASER)
def _gemma_undivided(draws: Draws) -> Sides:
    return patched_at(draws, gemma_block, lambda block, v, v_context: {"post_norm": v_context - v})


@identity("GPT-2 block: ΔW_fc from z to z_C; Δb₂ = v_C−v", GOLDWASER)
def _gpt2(draws: Draws) -> Sides:
    return patched_at(draws, gpt2_block)


@_gpt2.misprint("GPT-2 block without Δb₂", GOLDWASER)
def _gpt2_input_only(draws: Draws) -> Sides:
    return patched_at(draws, gpt2_block, left_out="proj_bias")


@identity("parallel block: Δb₂ = attn_C − attn", GOLDWASER)
def _parallel(draws: Draws) -> Sides:
    d = draws.size(3, 9)
    block, x = ParallelBlock(gpt2_block(draws, d)), draws.normal(d)
    attention, attention_context = draws.normal(d), draws.normal(d)
    return block.patched(attention, attention_context)(x, attention), block(x, attention_context)


def attention_residual(block: ContextualBlock, tokens: Float[Tensor, "d token"]) -> Float[Tensor, "d token"]:
    """Causal softmax attention with its residual: every token reads itself and those before it."""
    columns = [tokens[:, t] + block.attend(tokens[:, :t], tokens[:, t]) for t in range(tokens.shape[1])]
    return torch.stack(columns, dim=1)


def columns_through(mlp: LlamaBlock, v: Float[Tensor, "d token"], last: LlamaBlock) -> Float[Tensor, "d token"]:
    """The feed-forward half at every token; the last token passes through `last`."""
    return torch.stack([*(mlp(column) for column in v.T[:-1]), last(v[:, -1])], dim=1)


def patched_by_layer(
    layers: Sequence[tuple[ContextualBlock, LlamaBlock]], context: Tensor, query: Tensor, stale: bool = False
) -> Sides:
    """Goldwaser's Algorithm 1: patch the last token layer by layer, from PATCHED states (`stale`: from unpatched ones).

    Both sides are outputs at the last token: zero-shot and patched, and in context.
    """
    full, plain, short = torch.cat([context, query], dim=1), query, query
    for attention, mlp in layers:
        full_v, plain_v, short_v = (attention_residual(attention, tokens) for tokens in (full, plain, short))
        patched = apply_patch(mlp, mlp.patch((plain_v if stale else short_v)[:, -1], full_v[:, -1]))
        full, plain = columns_through(mlp, full_v, mlp), columns_through(mlp, plain_v, mlp)
        short = columns_through(mlp, short_v, patched)
    return short[:, -1], full[:, -1]


@identity(
    "a whole transformer, patched layer by layer: zero-shot output = in-context output", GOLDWASER + ", Alg. 1", 1e-10
)
def _whole_model(draws: Draws) -> Sides:
    d, depth, n_query = draws.size(4, 8), draws.size(2, 4), draws.size(1, 4)
    layers = [(contextual_block(draws, d), llama_block(draws, d)) for _ in range(depth)]
    return patched_by_layer(layers, draws.normal(d, draws.size(3, 8)), draws.normal(d, n_query))


@_whole_model.misprint("layers patched from unpatched states", GOLDWASER)
def _patches_of_unpatched_states(draws: Draws) -> Sides:
    d = draws.size(4, 8)
    layers = [(contextual_block(draws, d), llama_block(draws, d)) for _ in range(3)]
    query = draws.normal(d, 3)
    return patched_by_layer(layers, draws.normal(d, 5), query, stale=True)
