"""RMS norms and rotary positions in fewer kernels on a GPU.

Hugging Face writes both as they stand in the papers, one operation after another: a norm is six kernels and sixteen
more to differentiate, rotary positions of q and k ten and twenty. Each moves the activations through memory once more,
and of a small model takes longer to launch than to run. Here a norm is torch's own fused one (Zhang and Sennrich 2019),

    y = w · x / √(mean(x²) + ε),

and a rotation of each pair (x₁, x₂), its halves (Su et al. 2021), three operations,

    (x₁c₁ − x₂s₁, x₂c₂ + x₁s₂) = x · c + (x₂, x₁) · (−s₁, s₂).

Only for norms and functions that compute just this on random numbers, and while a pass lasts: outside of one the model
is as Hugging Face made it. The results differ by rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

_ROTARY = "apply_rotary_pos_emb"
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_ULPS = 4
"""How far two ways to compute the same may be apart on the random numbers that tell whether they are the same."""


@contextmanager
def fused_layers(model: nn.Module, device: torch.device) -> Generator[None]:
    """While it lasts, the model's norms and rotary positions are computed in fewer kernels, on a GPU."""
    if not _worth(device):
        yield
        return
    if model not in _known:
        _known[model] = _fusable(model, device)
    norms, rotary = _known[model]
    # Who replaced a norm's forward wants it called; of a pass within a pass, all is fused already.
    mine = [norm for norm in norms if "forward" not in norm.__dict__]
    own = {file: getattr(file, _ROTARY) for file in rotary if not isinstance(getattr(file, _ROTARY), _Rotary)}
    try:
        for norm in mine:
            norm.forward = MethodType(_norm, norm)
        for file, function in own.items():
            setattr(file, _ROTARY, _Rotary(function))
        yield
    finally:
        for norm in mine:
            norm.__dict__.pop("forward", None)
        for file, function in own.items():
            setattr(file, _ROTARY, function)


_known: WeakKeyDictionary[nn.Module, tuple[list[nn.Module], list[ModuleType]]] = WeakKeyDictionary()
"""The norms of each model that can be fused, and the files with its rotary functions that can."""


def _worth(device: torch.device) -> bool:
    return device.type == "cuda" and hasattr(torch, "_fused_rms_norm")  # torch 2.8


def _fusable(model: nn.Module, device: torch.device) -> tuple[list[nn.Module], list[ModuleType]]:
    norms = [module for module in model.modules() if _is_plain_norm(module)]
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    files = [file for name in names if (file := sys.modules.get(name)) is not None]
    return norms, [
        file for file in files if hasattr(file, _ROTARY) and _is_plain_rotary(getattr(file, _ROTARY), device)
    ]


def _is_plain_norm(module: nn.Module) -> bool:
    weight: Any = getattr(module, "weight", None)
    if "RMSNorm" not in type(module).__name__ or isinstance(module, nn.RMSNorm) or not isinstance(weight, Tensor):
        return False
    if weight.dim() != 1 or weight.is_meta or not any(hasattr(module, name) for name in _EPSILONS):
        return False
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
    return _agree(
        lambda: type(module).forward(module, x.to(weight.dtype)),
        lambda: functional.rms_norm(x.to(weight.dtype), weight.shape, weight, _epsilon(module)),
    )


def _is_plain_rotary(function: Callable[..., Any], device: torch.device) -> bool:
    draw = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(*shape, generator=draw).to(device) for shape in _PROBES)
    return _agree(
        lambda: torch.cat(function(q, k, cos, sin), 1),
        lambda: torch.cat([_rotated(x, cos[:, None], _signed(sin)[:, None]) for x in (q, k)], 1),
    )


_PROBES = (1, 2, 3, 8), (1, 1, 3, 8), (1, 3, 8), (1, 3, 8)
"""Shapes of q, k, cos and sin. Random cosines have unequal halves, which tells what is rotated with what."""


def _agree(own: Callable[[], Any], fewer: Callable[[], Tensor]) -> bool:
    try:
        with torch.no_grad():
            found, wanted = own(), fewer()
    except Exception:  # another signature, or a dtype that one of them cannot take: it is not this
        return False
    if not isinstance(found, Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    bound = _ULPS * torch.finfo(wanted.dtype).eps * float(wanted.abs().max())
    return float((found - wanted).abs().max()) <= bound


def _epsilon(module: nn.Module) -> float:
    return float(next(getattr(module, name) for name in _EPSILONS if hasattr(module, name)))


def _norm(module: Any, x: Float[Tensor, "*batch width"], *args: Any, **kwargs: Any) -> Float[Tensor, "*batch width"]:
    weight = module.weight
    usual = not (args or kwargs) and x.dtype == weight.dtype and x.shape[-1:] == weight.shape
    # Passes that carry tangents need operations that forward differentiation knows.
    if not usual or forward_ad.unpack_dual(x).tangent is not None:
        return type(module).forward(module, x, *args, **kwargs)
    return functional.rms_norm(x, weight.shape, weight, _epsilon(module))


@dataclass
class _Rotary:
    """Stands in for a model's own function during one pass."""

    own: Callable[..., Any]
    seen: tuple[Tensor, Tensor] | None = None
    """The last sines, and their (−s₁, s₂): the layers of a pass share them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 4 or not _rotates_all(*args):
            return self.own(*args, **kwargs)
        q, k, cos, sin = args
        seen = self.seen  # read once: another thread may run a model of the same kind
        if seen is None or seen[0] is not sin:
            seen = self.seen = (sin, _signed(sin)[:, None])
        signed = seen[1]
        turn: Any = _Rotated.apply if torch.is_grad_enabled() else _rotated
        return turn(q, cos[:, None], signed), turn(k, cos[:, None], signed)


def _rotates_all(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Whether all of each head is rotated, by angles that have no gradient, in one precision and without tangents."""
    every = (q, k, cos, sin)
    return (
        all(isinstance(x, Tensor) for x in every)
        and [x.dim() for x in every] == [4, 4, 3, 3]
        and len({x.shape[-1] for x in every}) == len({x.dtype for x in every}) == 1
        and not (cos.requires_grad or sin.requires_grad)
        and all(forward_ad.unpack_dual(x).tangent is None for x in every)
    )


def _signed(sin: Float[Tensor, "*batch d_head"]) -> Float[Tensor, "*batch d_head"]:
    first, second = sin.chunk(2, -1)
    return torch.cat([-first, second], -1)


def _swapped(x: Float[Tensor, "*batch d_head"]) -> Float[Tensor, "*batch d_head"]:
    return torch.cat(x.chunk(2, -1)[::-1], -1)


def _rotated(
    x: Float[Tensor, "batch head token d_head"],
    cos: Float[Tensor, "batch_or_1 1 token d_head"],
    signed: Float[Tensor, "batch_or_1 1 token d_head"],
) -> Float[Tensor, "batch head token d_head"]:
    return torch.addcmul(x * cos, _swapped(x), signed)


class _Rotated(torch.autograd.Function):
    """`_rotated`, with the gradient of x alone: g · c + (g₂, g₁) · (s₂, −s₁)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(cos, signed)
        return _rotated(x, cos, signed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        cos, signed = ctx.saved_tensors
        return _rotated(gradient, cos, _swapped(signed)), None, None
