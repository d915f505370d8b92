"""A change of every block's feed-forward weights, fitted to the states that a pass with demonstrations has.

In each block the readers (gate, up, fc1) see z + D z, so their weights become W (I + D), and the carrier, whatever adds
the block's result at the end, gets a ΔW, a bias Δb or a norm's scale Δm (`feed_forward` finds both). At the fitted
tokens D takes z to z_C, what the readers read with the demonstrations, and the carrier adds the rest, δ = (o_C − o)/s:

    readers    D = (Z_C − Z)(ZᵀZ + μI)⁻¹ Zᵀ                     tokens as columns, ridge μ
    carrier    ΔW = Δ (HᵀH + μI)⁻¹ Hᵀ,  or  Δb: the mean of Δ,  or  Δm_j = Σ_i u_ij Δ_ij / (Σ_i u_ij² + μ)

For one token and μ = 0 these are the rank-1 patches of `implicit`: D = (z_C − z) zᵀ/‖z‖², ΔW = δ hᵀ/‖h‖², Δm = δ/u.
`context_patch` fits one query's last token, `shared_patch` those of many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.pytorch_utils import Conv1D

from dualview.anatomy.hooks import hooked
from dualview.duality.on_model.feed_forward import FeedForward, block_output, with_states
from dualview.duality.theory.linalg import symmetric_eigen
from dualview.io.errors import UserError
from dualview.learning.adapters import random_directions, random_vector

Token = Literal["last", "every"]
"""Where a patch is applied: at a row's last token alone, or as a plain change of weights, which every token meets."""


@dataclass(frozen=True)
class LowRank:
    """The matrix leftᵀ · right: attention over the fitted tokens, keys `right`, values `left`."""

    left: Float[Tensor, "fitted d_out"]
    right: Float[Tensor, "fitted d_in"]

    def __call__(self, x: Float[Tensor, "*token d_in"]) -> Float[Tensor, "*token d_out"]:
        """leftᵀ right x for tokens as rows, in the patch's own precision."""
        return (x.to(self.right.dtype) @ self.right.T) @ self.left


@dataclass(frozen=True)
class BlockPatch:
    """The patch of one block."""

    place: FeedForward
    readers: LowRank | None
    """D; None for a block whose feed-forward has no readers."""
    carrier: LowRank | Float[Tensor, " d_model"]
    """ΔW of a linear carrier, else Δb or Δm."""

    def carried(self, x: Float[Tensor, "*token d_in"]) -> Float[Tensor, "*#token d_model"]:
        """The output of the patched carrier less that of the plain one, where it reads x."""
        if isinstance(self.carrier, LowRank):
            return self.carrier(x)
        return self.carrier if self.place.kind == "bias" else self.carrier * unscaled(self.place.carrier, x)


@dataclass(frozen=True)
class BlockPatches:
    """The patches of all blocks, active within `applied()`, like any patch."""

    blocks: tuple[BlockPatch, ...]
    token: Token = "every"

    rows = 1

    def scaled(self, factor: float) -> BlockPatches:
        return self.changed(lambda low: LowRank(factor * low.left, low.right), lambda vector: factor * vector)

    def in_random_directions(self, generator: torch.Generator) -> BlockPatches:
        """Another change of the same places, with the same ranks and singular values."""

        def drawn(low: LowRank) -> LowRank:
            left, right = random_directions(low.left.T, low.right, generator)
            return LowRank(left.T.contiguous(), right)

        return self.changed(drawn, lambda vector: random_vector(vector, generator))

    def changed(self, low: Callable[[LowRank], LowRank], vector: Callable[[Tensor], Tensor]) -> BlockPatches:
        """Every matrix and every vector of the patches replaced."""
        blocks = tuple(
            BlockPatch(
                block.place,
                None if block.readers is None else low(block.readers),
                low(block.carrier) if isinstance(block.carrier, LowRank) else vector(block.carrier),
            )
            for block in self.blocks
        )
        return replace(self, blocks=blocks)

    @contextmanager
    def applied(self) -> Generator[None]:
        def read(delta: LowRank, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (_added(inputs[0], delta(inputs[0]), self.token), *inputs[1:])

        def carry(block: BlockPatch, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return _added(output, block.carried(inputs[0]), self.token)

        pairs = [(m, b.readers) for b in self.blocks if b.readers is not None for m in b.place.readers]
        readers = [module.register_forward_pre_hook(partial(read, delta)) for module, delta in pairs]
        with hooked([*readers, *(b.place.carrier.register_forward_hook(partial(carry, b)) for b in self.blocks)]):
            yield


@dataclass(frozen=True)
class Aims:
    """What one block holds at some tokens when the demonstrations are there."""

    read: Float[Tensor, "token d_in"] | None
    """z_C: what the readers read."""
    out: Float[Tensor, "token d_model"]
    """o_C: the block's output."""


Places = Sequence[int] | Int[Tensor, " token"]


def recorded_aims(places: Sequence[FeedForward], at: Places, run: Callable[[], object]) -> tuple[Aims, ...]:
    """Run a pass with the demonstrations and keep every block's states at these tokens of its row."""
    reads: dict[nn.Module, Tensor] = {}
    outs: dict[nn.Module, Tensor] = {}

    def keep_read(module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        reads[module] = _as_tokens(inputs[0])[0, at]

    def keep_out(module: nn.Module, _inputs: Any, output: Any) -> None:
        outs[module] = block_output(output)[0, at]

    hooks = [p.readers[0].register_forward_hook(keep_read) for p in places if p.readers]
    with torch.no_grad(), hooked([*hooks, *(p.block.register_forward_hook(keep_out) for p in places)]):
        run()
    return tuple(Aims(reads[p.readers[0]] if p.readers else None, outs[p.block]) for p in places)


def fitted(
    places: Sequence[FeedForward],
    aims: Sequence[Aims],
    at: Places,
    run: Callable[[], object],
    *,
    ridge: float = 0.0,
    token: Token = "every",
    in_biases: bool = False,
) -> BlockPatches:
    """Fit all blocks in one pass without demonstrations (Goldwaser et al. 2026, Alg. 1).

    Each block is patched as the pass reaches it, so the next one reads patched states.

    at          the tokens of the row that are fitted
    ridge       μ in units of the mean squared length of what a map reads
    in_biases   let the bias of a linear carrier hold the rest, where it has one: enough for one token
    """
    readers: dict[int, LowRank] = {}
    reads: dict[int, Tensor] = {}
    blocks: list[BlockPatch] = []

    def read(index: int, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if index not in readers:  # gate and up read the same z
            z, aim = _as_tokens(inputs[0])[0, at], aims[index].read
            assert aim is not None
            readers[index] = ridge_map(z, aim - z, ridge)
        return (_added(inputs[0], readers[index](inputs[0]), token), *inputs[1:])

    def carry(index: int, _module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        reads[index] = _as_tokens(inputs[0])

    def end(index: int, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        place, states, x = places[index], block_output(output), reads.pop(index)
        # The rest of the block's difference, once its readers are patched, goes to the carrier.
        change = (aims[index].out - states[0, at]) / place.scale
        by_bias = place.kind == "bias" and (in_biases or not is_linear(place.carrier))
        delta = change.mean(0) if by_bias else _carrier_patch(place, x[0, at], change, ridge)
        blocks.append(BlockPatch(place, readers.get(index), delta))
        return with_states(output, _added(states, place.scale * blocks[-1].carried(x), token))

    hooks = [m.register_forward_pre_hook(partial(read, i)) for i, p in enumerate(places) for m in p.readers]
    hooks += [p.carrier.register_forward_hook(partial(carry, i)) for i, p in enumerate(places)]
    with (
        torch.no_grad(),
        hooked([*hooks, *(p.block.register_forward_hook(partial(end, i)) for i, p in enumerate(places))]),
    ):
        run()
    return BlockPatches(tuple(blocks), token)


def _carrier_patch(place: FeedForward, x: Tensor, change: Tensor, ridge: float) -> LowRank | Tensor:
    if is_linear(place.carrier):
        return ridge_map(x, change, ridge)
    u = unscaled(place.carrier, x).double()
    power = u.square()
    size = power.sum(0) + ridge * power.mean()
    if zeros := int((size == 0).sum()):
        raise UserError(
            f"{zeros} coordinates of the normalised MLP output are zero: a norm's scale cannot carry the patch there."
        )
    return ((u * change).sum(0) / size).to(change.dtype)


def ridge_map(x: Float[Tensor, "fitted d_in"], y: Float[Tensor, "fitted d_out"], ridge: float) -> LowRank:
    """The matrix M that minimises Σ_i ‖y_i − M x_i‖² + μ‖M‖², μ = ridge · mean ‖x_i‖², as attention over the i.

    M = Yᵀ(XXᵀ + μI)⁻¹X with the x_i and y_i as rows; the least of all solutions where ridge is 0.
    """
    wide_x, wide_y = x.double(), y.double()
    values, vectors = symmetric_eigen(wide_x @ wide_x.T)
    values = values.clamp(min=0)
    if not float(values.max()) > 0:
        raise UserError("A patch needs a non-zero layer input without the context: there is nothing to hang it on.")
    shrunk = values + ridge * values.sum() / len(values)
    usable = shrunk > len(values) * torch.finfo(torch.float64).eps * shrunk.max()
    inverse = torch.where(usable, 1 / torch.where(usable, shrunk, 1.0), 0.0)
    left = vectors @ (inverse[:, None] * (vectors.T @ wide_y))
    kept = x.dtype if x.dtype == torch.float64 else torch.float32
    return LowRank(left.to(kept), x.to(kept).clone())


def unscaled(module: nn.Module, x: Float[Tensor, "*token d"]) -> Float[Tensor, "*token d"]:
    """u: a norm's output before its scale, u = ∂(its output)/∂(its weight).

    By differentiation (forward mode, along 1), because norms differ in what they do with their weight: Gemma adds 1.
    """
    weight = cast(Tensor, module.weight)
    with forward_ad.dual_level():
        # Into the table of parameters itself, and `forward` itself: a call would run the hooks of the pass under way.
        module._parameters["weight"] = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))  # pyright: ignore
        try:
            tangent = forward_ad.unpack_dual(module.forward(x)).tangent
        finally:
            module._parameters["weight"] = cast(nn.Parameter, weight)  # pyright: ignore
    assert tangent is not None
    return tangent


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _as_tokens(x: Float[Tensor, "*token d"]) -> Float[Tensor, "1 token d"]:
    """One row of tokens, even where an architecture folded batch and token into one axis (OPT)."""
    return x.reshape(1, -1, x.shape[-1])


def _added(output: Tensor, change: Tensor, token: Token) -> Tensor:
    change = change.to(output.dtype).expand_as(output)
    if token == "every":
        return output + change
    # Out of place: the architecture may use its output again.
    alone = torch.zeros_like(output)
    _as_tokens(alone)[0, -1] = _as_tokens(change)[0, -1]
    return output + alone
