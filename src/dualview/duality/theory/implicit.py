"""A context is a rank-1 patch of the feed-forward weights (Dherin et al. 2025, arXiv 2507.16003, Thm 2.2).

A block T_W(C, x) = f(W A(C, x) + b) reads its context C only through the contextual layer's output A. For any part Y of
C,

    T_W(C, x) = T_{W + ΔW}(C∖Y, x),      ΔW = (W ΔA) A(C∖Y, x)ᵀ / ‖A(C∖Y, x)‖²,   ΔA = A(C, x) − A(C∖Y, x),

because (W + ΔW) A(C∖Y, x) = W A(C∖Y, x) + W ΔA. With a skip around the feed-forward, add Δb' = ΔA to the output bias.

In modern blocks (Goldwaser et al., arXiv 2511.17864) v is the residual stream after attention, z = Norm(v): matrices
that read z get the same patch from z to z_C, and v_C − v is carried by whatever the block adds at its end:

| block                        | input patch  | output patch                                                        |
|------------------------------|--------------|---------------------------------------------------------------------|
| Llama, Qwen, Mistral         | gate, up     | ΔW_down = (v_C − v) hᵀ/‖h‖², h the PATCHED gate·up activation        |
| Gemma (norm after the MLP)   | gate, up     | Δm = (v_C − v)/u elementwise, u the normalised, unscaled MLP output  |
| GPT-2 (biases)               | fc           | Δb_2 = v_C − v                                                      |
| parallel (GPT-J)             | none         | Δb_2 = attn_C − attn: the MLP does not read the attention's output  |

Caveats: a patch belongs to one query token, so it is no reusable fine-tuned model; it is the smallest of infinitely
many; it fails where A(C∖Y, x) = 0. Patches are exact for any weights, so they say nothing about learning.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dualview.io.errors import UserError

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RankOne:
    """The matrix left · rightᵀ, kept as its two vectors."""

    left: Float[Tensor, " d_out"]
    right: Float[Tensor, " d_in"]

    @property
    def matrix(self) -> Float[Tensor, "d_out d_in"]:
        """left · rightᵀ."""
        return torch.outer(self.left, self.right)

    def __call__(self, x: Float[Tensor, "*token d_in"]) -> Float[Tensor, "*token d_out"]:
        """left (rightᵀ x) for tokens as rows, in the patch's own precision."""
        return (x.to(self.right.dtype) @ self.right)[..., None] * self.left


def input_patch(
    weight: Float[Tensor, "d_out d_in"], without: Float[Tensor, " d_in"], with_context: Float[Tensor, " d_in"]
) -> RankOne:
    """ΔW = W (z_C − z) zᵀ / ‖z‖²: (W + ΔW) z = W z_C. `without` is what the layer reads without the context."""
    return carry_patch(without, weight @ (with_context - without))


def carry_patch(read: Float[Tensor, " d_in"], change: Float[Tensor, " d_out"]) -> RankOne:
    """The smallest ΔW with ΔW · read = change: change readᵀ / ‖read‖²."""
    power = read @ read
    if not float(power) > 0:
        raise UserError(
            "A rank-1 patch needs a non-zero layer input without the context: there is nothing to hang it on."
        )
    return RankOne(left=change, right=read / power)


def skip_patch(
    weight: Float[Tensor, "d_ff d"], without: Float[Tensor, " d"], with_context: Float[Tensor, " d"]
) -> tuple[RankOne, Float[Tensor, " d"]]:
    """Dherin et al., appendix: for a skip x + A + W' g(W A + b) + b', the same ΔW, plus Δb' = ΔA."""
    return input_patch(weight, without, with_context), with_context - without


def implicit_dynamics(
    weight: Float[Tensor, "d_out d_in"], outputs: Float[Tensor, "d_in stage"]
) -> Float[Tensor, "stage d_out d_in"]:
    """Prop. 3.1: W_0 = W, W_{i+1} = W_i − h ∇L_i, h = 1/‖A(x)‖², L_i(W) = tr(D_iᵀ W), D_i = W_0 (A_i − A_{i+1}) A(x)ᵀ.

    `outputs` are the columns A(x), A(c_1, x), …, A(c_1 … c_n, x). The last W_n is W + ΔW(C). (The losses are linear and
    defined by the update: a telescoping sum.)
    """
    start = outputs[:, 0]
    power = start @ start
    if not float(power) > 0:
        raise UserError("The dynamics need A(x) ≠ 0: without context the contextual layer returns zero.")
    weights = [weight]
    for i in range(outputs.shape[1] - 1):
        # With W_0, not W_i: the losses are defined at the initial weights.
        gradient = torch.outer(weight @ (outputs[:, i] - outputs[:, i + 1]), start)
        weights.append(weights[-1] - gradient / power)
    return torch.stack(weights)


def rms_norm(x: Float[Tensor, " d"], scale: Float[Tensor, " d"], eps: float) -> Float[Tensor, " d"]:
    """scale · x / √(mean x² + ε)."""
    return scale * x * torch.rsqrt(x.square().mean() + eps)


Delta = RankOne | Tensor
Patch = Mapping[str, Delta]
"""What to add to each named field of a block."""


@runtime_checkable
class Block(Protocol):
    """The feed-forward half of a transformer block, at one token."""

    def patch(self, v: Float[Tensor, " d"], v_context: Float[Tensor, " d"]) -> Patch:
        """What must be added to the weights so that the block gives at `v` what it gives at `v_context`."""
        ...


BlockT = TypeVar("BlockT", bound=Block)


def apply_patch(block: BlockT, patch: Patch) -> BlockT:
    """The block with every named field changed; the original is left alone."""
    changed: dict[str, Any] = {
        name: getattr(block, name) + (delta.matrix if isinstance(delta, RankOne) else delta)
        for name, delta in patch.items()
    }
    return cast(BlockT, replace(cast(Any, block), **changed))


@dataclass(frozen=True)
class LlamaBlock:
    """v + W_down (act(W_gate z) ⊙ W_up z), z = RMSNorm(v): Llama, Mistral, Qwen, SmolLM. No bias anywhere."""

    norm: Float[Tensor, " d"]
    gate: Float[Tensor, "d_ff d"]
    up: Float[Tensor, "d_ff d"]
    down: Float[Tensor, "d d_ff"]
    eps: float = 1e-6
    act: Activation = F.silu

    def hidden(self, z: Float[Tensor, " d"]) -> Float[Tensor, " d_ff"]:
        """act(W_gate z) ⊙ W_up z."""
        return self.act(self.gate @ z) * (self.up @ z)

    def __call__(self, v: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """The block's output at residual v."""
        return v + self.down @ self.hidden(rms_norm(v, self.norm, self.eps))

    def patch(self, v: Float[Tensor, " d"], v_context: Float[Tensor, " d"]) -> Patch:
        """Gate and up from z to z_C; down carries v_C − v. h is the patched activation, which is the in-context one."""
        z_context = rms_norm(v_context, self.norm, self.eps)
        return {**self.input_patches(v, v_context), "down": carry_patch(self.hidden(z_context), v_context - v)}

    def input_patches(self, v: Float[Tensor, " d"], v_context: Float[Tensor, " d"]) -> Patch:
        """Gate and up from z to z_C."""
        z, z_context = rms_norm(v, self.norm, self.eps), rms_norm(v_context, self.norm, self.eps)
        return {"gate": input_patch(self.gate, z, z_context), "up": input_patch(self.up, z, z_context)}


@dataclass(frozen=True)
class GemmaBlock(LlamaBlock):
    """v + RMSNorm_m(W_down (act(W_gate z) ⊙ W_up z)), z = RMSNorm(v). Scales as applied (1 + stored)."""

    act: Activation = F.gelu
    post_norm: Float[Tensor, " d"] = field(kw_only=True)

    def unscaled(self, z: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """u: the MLP's output, normalised but not yet scaled by m."""
        mlp = self.down @ self.hidden(z)
        return rms_norm(mlp, torch.ones_like(mlp), self.eps)

    def __call__(self, v: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """The block's output at residual v."""
        return v + self.post_norm * self.unscaled(rms_norm(v, self.norm, self.eps))

    def patch(self, v: Float[Tensor, " d"], v_context: Float[Tensor, " d"]) -> Patch:
        """Gate and up from z to z_C; Δm = (v_C − v)/u carries the residual."""
        z_context = rms_norm(v_context, self.norm, self.eps)
        return {**self.input_patches(v, v_context), "post_norm": scale_patch(self.unscaled(z_context), v_context - v)}


def scale_patch(unscaled: Float[Tensor, " d"], change: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """Δm = change / u elementwise: the scale m + Δm adds `change` to what m alone gives. Needs every u_i ≠ 0."""
    zeros = int((unscaled == 0).sum())
    if zeros:
        raise UserError(
            f"{zeros} coordinates of the normalised MLP output are zero: a norm's scale cannot carry the patch there."
        )
    return change / unscaled


@dataclass(frozen=True)
class Gpt2Block:
    """v + W_2 act(W_1 z + b_1) + b_2, z = LayerNorm(v): GPT-2, OPT, and others with biases."""

    norm: Float[Tensor, " d"]
    norm_bias: Float[Tensor, " d"]
    fc: Float[Tensor, "d_ff d"]
    fc_bias: Float[Tensor, " d_ff"]
    proj: Float[Tensor, "d d_ff"]
    proj_bias: Float[Tensor, " d"]
    eps: float = 1e-5
    act: Activation = F.gelu

    def mlp(self, x: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """W_2 act(W_1 LayerNorm(x) + b_1) + b_2."""
        return self.proj @ self.act(self.fc @ self._read(x) + self.fc_bias) + self.proj_bias

    def _read(self, x: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        return F.layer_norm(x, x.shape, self.norm, self.norm_bias, self.eps)

    def __call__(self, v: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """The block's output at residual v."""
        return v + self.mlp(v)

    def patch(self, v: Float[Tensor, " d"], v_context: Float[Tensor, " d"]) -> Patch:
        """fc from z to z_C; Δb_2 = v_C − v."""
        return {"fc": input_patch(self.fc, self._read(v), self._read(v_context)), "proj_bias": v_context - v}


@dataclass(frozen=True)
class ParallelBlock:
    """x + attn + MLP(LayerNorm(x)): GPT-J, and GPT-NeoX with its parallel residual. The MLP reads x alone."""

    inner: Gpt2Block

    def __call__(self, x: Float[Tensor, " d"], attention: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """The block's output, given its input and its attention's output."""
        return x + attention + self.inner.mlp(x)

    def patched(self, attention: Float[Tensor, " d"], attention_context: Float[Tensor, " d"]) -> "ParallelBlock":
        """The block with Δb_2 = attn_C − attn: no input patch is needed once x itself matches."""
        return ParallelBlock(inner=apply_patch(self.inner, {"proj_bias": attention_context - attention}))
