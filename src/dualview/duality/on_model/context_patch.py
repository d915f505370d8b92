"""A context as a patch of a real model's feed-forward weights, block by block (Goldwaser et al. 2026, Alg. 1).

`implicit` has the theorem for one block; here it is applied to any Hugging Face model, discovered by `feed_forward`:

    readers (gate, up, fc1)    ΔW = W (z_C − z) zᵀ/‖z‖²
    carrier                    Δb = δ, or ΔW = δ hᵀ/‖h‖², or Δm = δ/u        δ = (o_C − o)/s

z, h and u are what the *patched* zero-shot pass holds at the query's last token (each block reads the patched state of
the one before), z_C and o_C what the in-context pass holds there; o is the block's output once its readers are patched,
so δ = v_C − v in a sequential block and attn_C − attn in a parallel one. The patched model, asked without the
demonstrations, then gives exactly the logits that the model gives with them.

A patch belongs to one query. `token="last"` applies it at that token alone (the theorem as printed); `token="every"` is
a plain change of weights: every token of the query meets it, the states of all of them change, and the patches are
built from those states, so the equality at the last token is just as exact.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import forward_ad

from dualview.duality.on_model.feed_forward import FeedForward, block_output, feed_forwards, with_states
from dualview.duality.on_model.single_prompt import forward_row, hooked, last_logits
from dualview.duality.theory.implicit import RankOne, carry_patch, input_patch, scale_patch
from dualview.duality.theory.linalg import norm
from dualview.duality.theory.recorder import weight_matrix
from dualview.io.errors import UserError
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Patch

Token = Literal["last", "every"]


@dataclass(frozen=True)
class BlockPatch:
    """The patch of one block."""

    place: FeedForward
    inputs: tuple[RankOne, ...]
    """One for each reader."""
    output: RankOne | Float[Tensor, " d_model"]
    """ΔW of a linear carrier, else Δb or Δm."""


@dataclass(frozen=True)
class ContextPatch:
    """One query's context as patches of every block, active within `applied()`, like any patch."""

    blocks: tuple[BlockPatch, ...]
    token: Token

    rows = 1

    @contextmanager
    def applied(self) -> Generator[None]:
        def reading(delta: RankOne) -> Any:
            def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                return _added(output, delta(inputs[0]), self.token)

            return hook

        def carrying(block: BlockPatch) -> Any:
            def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                return _added(output, carried(block.place, block.output, inputs[0]), self.token)

            return hook

        pairs = [(m, reading(d)) for b in self.blocks for m, d in zip(b.place.readers, b.inputs, strict=True)]
        with hooked([*pairs, *((block.place.carrier, carrying(block)) for block in self.blocks)]):
            yield


def context_patch(
    lm: LanguageModel,
    context: Sequence[int],
    query: Sequence[int],
    bare: Sequence[int] = (),
    token: Token = "last",
) -> ContextPatch:
    """The patches that make `bare + query` end in the logits of `context + query`.

    context   the tokens before the query (BOS and demonstrations)
    bare      what is left of them without the context (BOS, or nothing)
    """
    if not query:
        raise UserError("A context patch needs a query of at least one token.")
    places = feed_forwards(lm)
    with torch.no_grad():
        # First the whole in-context pass: each block's patch aims at a state of it.
        aims = recorded_aims(places, [-1], lambda: forward_row(lm, [*context, *query]))
        return _built(lm, places, aims, [*bare, *query], token)


@dataclass(frozen=True)
class Aims:
    """What one block holds at some tokens when the demonstrations are there."""

    read: Float[Tensor, "token d_in"] | None
    """z_C: what the readers read."""
    out: Float[Tensor, "token d_model"]
    """o_C: the block's output."""


def recorded_aims(
    places: Sequence[FeedForward], at: Sequence[int] | Int[Tensor, " token"], run: Callable[[], object]
) -> tuple[Aims, ...]:
    """Run a pass with the demonstrations and keep every block's states at these tokens of its row."""
    reads: dict[int, Tensor] = {}
    outs: dict[int, Tensor] = {}

    def keep_read(index: int) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
            reads[index] = as_tokens(inputs[0])[0, at]

        return hook

    def keep_out(index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outs[index] = block_output(output)[0, at]

        return hook

    hooks = [(p.readers[0], keep_read(i)) for i, p in enumerate(places) if p.readers]
    with hooked([*hooks, *((p.block, keep_out(i)) for i, p in enumerate(places))]):
        run()
    return tuple(Aims(reads.get(i), outs[i]) for i in range(len(places)))


def _built(
    lm: LanguageModel, places: Sequence[FeedForward], aims: Sequence[Aims], ids: Sequence[int], token: Token
) -> ContextPatch:
    """Algorithm 1 in one pass: each block is patched as it runs, so the next one reads patched states."""
    inputs: dict[nn.Module, RankOne] = {}
    reads: dict[nn.Module, Tensor] = {}
    blocks: list[BlockPatch] = []

    def read(aim: Aims) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            assert aim.read is not None
            # From what the module reads now, in a pass whose earlier blocks are already patched.
            inputs[module] = input_patch(weight_matrix(module), as_tokens(given[0])[0, -1], aim.read[0])
            return _added(output, inputs[module](given[0]), token)

        return hook

    def carry(module: nn.Module, given: tuple[Tensor, ...], _output: Tensor) -> None:
        reads[module] = as_tokens(given[0])

    def end(place: FeedForward, aim: Aims) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            states, x = block_output(output), reads.pop(place.carrier)
            # The rest of the block's difference, once its readers are patched, goes to the carrier.
            change = (aim.out[0] - states[0, -1]) / place.scale
            patch = BlockPatch(place, tuple(inputs[m] for m in place.readers), _output_patch(place, x[0, -1:], change))
            blocks.append(patch)
            return with_states(output, _added(states, place.scale * carried(place, patch.output, x), token))

        return hook

    pairs = list(zip(places, aims, strict=True))
    readers = [(reader, read(aim)) for place, aim in pairs for reader in place.readers]
    with hooked([*readers, *((p.carrier, carry) for p in places), *((p.block, end(p, a)) for p, a in pairs)]):
        forward_row(lm, ids)
    return ContextPatch(tuple(blocks), token)


def _output_patch(place: FeedForward, x: Float[Tensor, "1 d_in"], change: Tensor) -> RankOne | Tensor:
    """What the carrier needs so that its output is larger by `change` at the token where it reads x."""
    if place.kind == "bias":
        return change
    if place.kind == "weight":
        return carry_patch(x[0], change)
    return scale_patch(unscaled(place.carrier, x)[0], change)


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


def carried(
    place: FeedForward, delta: Callable[[Tensor], Tensor] | Tensor, x: Float[Tensor, "*token d_in"]
) -> Float[Tensor, "*#token d_model"]:
    """The output of the patched carrier less that of the plain one, where it reads x."""
    if isinstance(delta, Tensor):
        return delta if place.kind == "bias" else delta * unscaled(place.carrier, x)
    return delta(x)


def as_tokens(x: Float[Tensor, "*token d"]) -> Float[Tensor, "1 token d"]:
    """One row of tokens, even where an architecture folded batch and token into one axis (OPT)."""
    return x.reshape(1, -1, x.shape[-1])


def _added(output: Tensor, change: Tensor, token: Token) -> Tensor:
    change = change.to(output.dtype).expand_as(output)
    if token == "every":
        return output + change
    # Out of place: the architecture may use its output again.
    alone = torch.zeros_like(output)
    as_tokens(alone)[0, -1] = as_tokens(change)[0, -1]
    return output + alone


@dataclass(frozen=True)
class PatchReport:
    """How close a patched zero-shot pass is to the in-context pass."""

    error: float
    """Largest difference of the logits at the last token."""
    unpatched: float
    """The same without the patch: what there was to explain."""
    relative: float
    """‖patched − in-context‖ / ‖zero-shot − in-context‖; 0 is equality, 1 what no patch at all leaves."""
    same_token: bool
    """Whether both predict the same next token."""
    gap: float
    """‖zero-shot − in-context‖: what the patched logits are compared with."""


def patch_report(
    lm: LanguageModel,
    context: Sequence[int],
    query: Sequence[int],
    bare: Sequence[int] = (),
    patch: Patch | None = None,
    token: Token = "last",
) -> PatchReport:
    """Ask with the demonstrations, without them, and without them but patched; a patch is built if none is given."""
    applied = context_patch(lm, context, query, bare, token) if patch is None else patch
    aim, plain = last_logits(lm, [*context, *query]), last_logits(lm, [*bare, *query])
    found = last_logits(lm, [*bare, *query], applied)
    gap = norm(plain - aim)
    return PatchReport(
        error=float((found - aim).abs().max()),
        unpatched=float((plain - aim).abs().max()),
        relative=norm(found - aim) / gap if gap else norm(found - aim),
        same_token=bool(found.argmax() == aim.argmax()),
        gap=gap,
    )
