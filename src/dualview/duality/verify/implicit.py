"""Identities of contexts as patches (Dherin et al., Goldwaser et al.): T5 and T6, up to a whole random transformer."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.implicit import (
    GemmaBlock,
    Gpt2Block,
    LlamaBlock,
    ParallelBlock,
    apply_patch,
    implicit_dynamics,
    input_patch,
    skip_patch,
)
from dualview.duality.theory.linalg import singular_values
from dualview.duality.theory.toy_attention import relative_error, soft_attn
from dualview.duality.verify.check import Draws, Identity

DHERIN = "Dherin et al. 2025"
GOLDWASER = "Goldwaser et al. 2026"


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
class InContext:
    """A block, a context and a query."""

    block: ContextualBlock
    context: Float[Tensor, "d token"]
    x: Float[Tensor, " d"]

    @property
    def nothing(self) -> Float[Tensor, "d 0"]:
        """The empty context."""
        return self.context[:, :0]


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


def contextual(draws: Draws) -> InContext:
    """Random sizes."""
    d = draws.size(3, 8)
    return InContext(contextual_block(draws, d), draws.normal(d, draws.size(3, 9)), draws.normal(d))


def _partial(draws: Draws) -> float:
    setup = contextual(draws)
    block, kept = setup.block, setup.context[:, draws.size(1, 2) :]
    without, full = block.attend(kept, setup.x), block.attend(setup.context, setup.x)
    patched = block.first + input_patch(block.first, without, full).matrix
    return relative_error(block.after(without, patched), block.after(full, block.first))


def _whole(draws: Draws) -> float:
    setup = contextual(draws)
    block = setup.block
    without, full = block.attend(setup.nothing, setup.x), block.attend(setup.context, setup.x)
    patch = input_patch(block.first, without, full).matrix
    values = singular_values(patch)
    rank_one = float(values[1] / values[0])
    return max(relative_error(block.after(without, block.first + patch), block.after(full, block.first)), rank_one)


def _skip(draws: Draws) -> float:
    setup = contextual(draws)
    block = setup.block
    without, full = block.attend(setup.nothing, setup.x), block.attend(setup.context, setup.x)
    patch = skip_patch(block.first, without, full)
    found = setup.x + without + block.after(without, block.first + patch.weight.matrix) + patch.bias
    return relative_error(found, setup.x + full + block.after(full, block.first))


def _dynamics(draws: Draws) -> float:
    setup = contextual(draws)
    block, n = setup.block, setup.context.shape[1]
    outputs = torch.stack([block.attend(setup.context[:, :i], setup.x) for i in range(n + 1)], dim=1)
    weights = implicit_dynamics(block.first, outputs)
    expected = block.first + input_patch(block.first, outputs[:, 0], outputs[:, -1]).matrix
    return relative_error(weights[-1], expected)


def llama_block(draws: Draws, d: int) -> LlamaBlock:
    """Random weights; `d_ff` is random too."""
    d_ff = draws.size(6, 14)
    return LlamaBlock(1 + 0.1 * draws.normal(d), draws.matrix(d_ff, d), draws.matrix(d_ff, d), draws.matrix(d, d_ff))


def gemma_block(draws: Draws, d: int) -> GemmaBlock:
    """The same with a norm after the MLP."""
    inner = llama_block(draws, d)
    return GemmaBlock(inner.norm, inner.gate, inner.up, inner.down, 1 + 0.1 * draws.normal(d))


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


def _llama(draws: Draws) -> float:
    d = draws.size(3, 9)
    block, v, v_context = llama_block(draws, d), draws.normal(d), draws.normal(d)
    return relative_error(apply_patch(block, block.patch(v, v_context))(v), block(v_context))


def _gemma(draws: Draws) -> float:
    d = draws.size(3, 9)
    block, v, v_context = gemma_block(draws, d), draws.normal(d), draws.normal(d)
    return relative_error(apply_patch(block, block.patch(v, v_context))(v), block(v_context))


def _gpt2(draws: Draws) -> float:
    d = draws.size(3, 9)
    block, v, v_context = gpt2_block(draws, d), draws.normal(d), draws.normal(d)
    return relative_error(apply_patch(block, block.patch(v, v_context))(v), block(v_context))


def _parallel(draws: Draws) -> float:
    d = draws.size(3, 9)
    block, x = ParallelBlock(gpt2_block(draws, d)), draws.normal(d)
    attention, attention_context = draws.normal(d), draws.normal(d)
    return relative_error(block.patched(attention, attention_context)(x, attention), block(x, attention_context))


def attention_residual(block: ContextualBlock, tokens: Float[Tensor, "d token"]) -> Float[Tensor, "d token"]:
    """Causal softmax attention with its residual: every token reads itself and those before it."""
    columns = [tokens[:, t] + block.attend(tokens[:, :t], tokens[:, t]) for t in range(tokens.shape[1])]
    return torch.stack(columns, dim=1)


def _whole_model(draws: Draws) -> float:
    """Goldwaser's Algorithm 1 on a random transformer: patch the last token layer by layer, from PATCHED states."""
    d, depth, n_query = draws.size(4, 8), draws.size(2, 4), draws.size(1, 4)
    layers = [(contextual_block(draws, d), llama_block(draws, d)) for _ in range(depth)]
    context, query = draws.normal(d, draws.size(3, 8)), draws.normal(d, n_query)
    full, short = torch.cat([context, query], dim=1), query
    for attention, mlp in layers:
        full_v, short_v = attention_residual(attention, full), attention_residual(attention, short)
        patched = apply_patch(mlp, mlp.patch(short_v[:, -1], full_v[:, -1]))
        full = torch.stack([mlp(column) for column in full_v.T], dim=1)
        own = [mlp(column) for column in short_v.T[:-1]]
        short = torch.stack([*own, patched(short_v[:, -1])], dim=1)
    return relative_error(short[:, -1], full[:, -1])


IDENTITIES = (
    Identity("T_W(C,x) = T_{W+ΔW}(∅,x),  ΔW = (WΔA)A(x)ᵀ/‖A(x)‖²,  rank ΔW = 1", DHERIN + ", Thm 2.2", _whole),
    Identity("the same for any part Y of the context:  T_W(C,x) = T_{W+ΔW(Y)}(C∖Y,x)", DHERIN + ", Thm 2.2", _partial),
    Identity("with a skip: the same ΔW and Δb′ = ΔA", DHERIN + ", appendix", _skip),
    Identity("W_{i+1} = W_i − h∇L_i,  L_i = tr(D_iᵀW):  W_n = W + ΔW(C)", DHERIN + ", Prop. 3.1", _dynamics),
    Identity("Llama block: ΔW_gate, ΔW_up from z to z_C; ΔW_down = (v_C−v)hᵀ/‖h‖²", GOLDWASER, _llama),
    Identity("Gemma block: ΔW_gate, ΔW_up from z to z_C; Δm = (v_C−v)/u", GOLDWASER, _gemma, 1e-9),
    Identity("GPT-2 block: ΔW_fc from z to z_C; Δb₂ = v_C−v", GOLDWASER, _gpt2),
    Identity("parallel block: Δb₂ = attn_C − attn", GOLDWASER, _parallel),
    Identity(
        "a whole transformer, patched layer by layer: zero-shot output = in-context output",
        GOLDWASER + ", Alg. 1",
        _whole_model,
        1e-10,
    ),
)
