"""Where a block's feed-forward half is in a real model: the maps that read it, and what adds its result at the end.

Found by watching one short pass with gradients, as `models.anatomy` does for attention, so no table of architectures is
needed. In each block, every linear map's output is cut from what made it; then

    the carrier   is the last module outside attention whose output y enters the block's output o as o = s·y + …
                  (∂⟨o, r⟩/∂y = s·r for a random r): W_down, a norm after the feed-forward, GPT-2's c_proj …
    the readers   are the maps whose outputs the last linear map reads: gate and up, or fc1.

s is 1 but for architectures that scale their residual branches (Granite).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dualview.anatomy.hooks import hooked
from dualview.duality.errors import NotApplicable
from dualview.duality.on_model.single_prompt import forward_row
from dualview.models.language_model import LanguageModel

Kind = Literal["bias", "weight", "scale"]


@dataclass(frozen=True)
class FeedForward:
    """One block's feed-forward half, as far as a patch needs it."""

    block: nn.Module
    readers: tuple[nn.Module, ...]
    """The linear maps that read z: gate and up (Llama, Gemma), or fc1 (GPT-2)."""
    carrier: nn.Module
    """The module whose output is added to the block's at the end."""
    kind: Kind
    """What of the carrier is patched: its bias if it has one, else a linear map's weight or a norm's scale."""
    scale: float
    """s: how much of the carrier's output reaches the block's."""


def block_output(output: Any) -> Float[Tensor, "batch token d_model"]:
    """A block's hidden states, whether it returns them alone or first."""
    return output[0] if isinstance(output, tuple) else output


def with_states(output: Any, states: Float[Tensor, "batch token d_model"]) -> Any:
    """A block's output with other hidden states."""
    return (states, *output[1:]) if isinstance(output, tuple) else states


@dataclass
class _Watched:
    module: nn.Module
    read: Tensor
    made: Tensor


def feed_forwards(lm: LanguageModel) -> tuple[FeedForward, ...]:
    """Every block's feed-forward half, in order; `NotApplicable` for blocks that have none a patch could use."""
    attention = {m for layer in lm.anatomy.layers for m in (*layer.module.modules(), layer.output)}
    linear: dict[nn.Module, list[_Watched]] = {block: [] for block in lm.anatomy.blocks}
    norms: dict[nn.Module, list[_Watched]] = {block: [] for block in lm.anatomy.blocks}
    order: dict[nn.Module, int] = {}
    ends: dict[nn.Module, Tensor] = {}

    def keep_linear(block: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        # Cut from what made it, so that a gradient stops at the nearest map and names it alone.
        cut = output.detach().requires_grad_()
        linear[block].append(_Watched(module, inputs[0], cut))
        order[module] = len(order)
        return cut.clone()  # some architectures go on to change it in place

    def keep_norm(block: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            norms[block].append(_Watched(module, inputs[0], output))
            order[module] = len(order)

    def keep_end(block: nn.Module, _inputs: Any, output: Any) -> None:
        ends[block] = block_output(output)

    hooks = [block.register_forward_hook(keep_end) for block in lm.anatomy.blocks]
    for block in lm.anatomy.blocks:
        for module in (m for m in block.modules() if m not in attention):
            if isinstance(module, nn.Linear | Conv1D):
                hooks.append(module.register_forward_hook(partial(keep_linear, block)))
            elif _is_norm(module):
                hooks.append(module.register_forward_hook(partial(keep_norm, block)))
    with torch.enable_grad(), hooked(hooks):
        forward_row(lm, [token % lm.vocab for token in range(8)])
    return tuple(_found(block, linear[block], norms[block], order, ends.get(block)) for block in lm.anatomy.blocks)


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children())


def _found(
    block: nn.Module, linear: list[_Watched], norms: list[_Watched], order: dict[nn.Module, int], end: Tensor | None
) -> FeedForward:
    name = type(block).__name__
    refusal = NotApplicable(
        f"A context cannot be written as a patch of {name}: dualview found no linear map or norm outside attention "
        "whose output is simply added to the block's (mixtures of experts are such a case)."
    )
    # A map that runs twice in a block has no single input to patch.
    if end is None or not linear or len({seen.module for seen in linear}) < len(linear):
        raise refusal
    direction = torch.randn(end.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(end)
    candidates = [(seen, _share(end, seen.made, direction)) for seen in (*linear, *norms)]
    carriers = [(seen, share) for seen, share in candidates if share is not None]
    if not carriers:
        raise refusal
    # Of several that add to the output, the last: what it adds is not changed again.
    carrier, share = max(carriers, key=lambda pair: order[pair[0].module])
    last = carrier if carrier in linear else None
    if last is None:
        feeding = [seen for seen in linear if _depends(carrier.made, seen.made)]
        last = max(feeding, key=lambda seen: order[seen.module], default=None)
    readers = () if last is None else tuple(s.module for s in linear if s is not last and _depends(last.read, s.made))
    if getattr(carrier.module, "bias", None) is not None:
        kind: Kind = "bias"
    else:
        kind = "weight" if carrier in linear else "scale"
    return FeedForward(block, readers, carrier.module, kind, share)


def _share(end: Tensor, made: Tensor, direction: Tensor) -> float | None:
    """s where the block's output is s·made + …, None where it is anything else."""
    if made.shape[-1] != end.shape[-1] or made.numel() != end.numel() or not end.requires_grad:
        return None
    (found,) = torch.autograd.grad(end, [made], direction, materialize_grads=True, retain_graph=True)
    gradient = found.view(end.shape)  # OPT folds batch and token into one axis
    share = float((gradient * direction).sum() / direction.square().sum())
    # Loose on purpose: s is read off a half-precision model too, and a wrong carrier misses by a factor.
    close = torch.allclose(gradient, share * direction, rtol=1e-3, atol=1e-3 * abs(share))
    return share if close and abs(share) > 1e-6 else None


def _depends(made: Tensor, on: Tensor) -> bool:
    if not made.requires_grad:
        return False
    direction = torch.randn(made.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(made)
    (gradient,) = torch.autograd.grad(made, [on], direction, materialize_grads=True, retain_graph=True)
    return bool(gradient.abs().amax() > 0)
