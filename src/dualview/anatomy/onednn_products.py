"""Float32 products by oneDNN, on processors for which MKL has only kernels of half their vectors' width.

torch multiplies float32 matrices by MKL, which on AMD's processors with AVX-512 takes twice as long as oneDNN: 117
against 260 billion operations a second on one core, for 1,000 × 576 × 1,536. By itself torch uses oneDNN for half
precision only, and in compiled models. Trainings keep MKL's products: oneDNN sums in longer runs, so its rounding is
1.5 to 2 times as large, and descent at a large rate multiplies it. After 32 steps on flipped labels the change of the
embedded model's weights was off by 1.4e-5 instead of 5.4e-6 at a rate of 0.01, by 2e-2 instead of 4e-4 at 0.03. A
gradient without descent does not (`onednn_gradients`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_LEAST_ROWS, _LEAST = 4, 128
"""Below these, MKL is as fast: rows of x, and the lesser of the weight's two widths."""
_PROCESSORS = Path("/proc/cpuinfo")


def onednn_products(model: nn.Module, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """While it lasts, the model's float32 products that nothing differentiates run by oneDNN, where it is faster."""
    if dtype != torch.float32 or device.type != "cpu" or torch.is_grad_enabled() or not _faster():
        return nullcontext()
    # Of a narrow model no product is taken over, and to look at every call of a pass takes time.
    return _ByOneDNN() if any(_wide(p) for p in model.parameters()) else nullcontext()


def onednn_gradients(model: nn.Module, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """The same for a pass that is differentiated, by its activations alone: for gradients that no descent multiplies.

    Products whose weights ask for a gradient are left to torch.
    """
    if dtype != torch.float32 or device.type != "cpu" or not _faster():
        return nullcontext()
    return _ByOneDNN(_Differentiated.apply) if any(_wide(p) for p in model.parameters()) else nullcontext()


@cache
def _faster() -> bool:
    # Who sets MKL_CBWR asks for the same order of summing on every processor.
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not there or not torch.backends.mkl.is_available() or "MKL_CBWR" in os.environ:
        return False
    amd = _PROCESSORS.exists() and "AuthenticAMD" in _PROCESSORS.read_text()
    return amd and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _wide(weight: Tensor) -> bool:
    return weight.dim() == 2 and min(weight.shape) >= _LEAST


class _ByOneDNN(TorchFunctionMode):
    def __init__(self, product_: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._product = product_ or product

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not kwargs and _worth(*args):
            return self._product(*args)
        if func is torch.addmm and not kwargs and _worth(args[1], args[2].mT, args[0]):  # GPT-2's layers
            bias, x, weight = args
            return self._product(x, weight.mT, bias)
        return func(*args, **(kwargs or {}))


def _worth(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    given = [each for each in (x, weight, bias) if each is not None]
    return (
        all(each.dtype == torch.float32 for each in given)
        and (bias is None or bias.dim() == 1)
        and x.numel() >= _LEAST_ROWS * x.shape[-1]
        and _wide(weight)
        # Of other layouts it makes a copy, or takes a slow way.
        and x.is_contiguous()
        and (weight.is_contiguous() or weight.mT.is_contiguous())
        # Below, only x has a gradient.
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in given[1:]))
        # A pass that carries tangents needs operations that forward differentiation knows.
        and all(forward_ad.unpack_dual(each).tangent is None for each in given)
    )


def product(
    x: Float[Tensor, "*batch d_in"], weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None = None
) -> Float[Tensor, "*batch d_out"]:
    """x Wᵀ + b."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Differentiated(torch.autograd.Function):
    """`product`, with the gradient of x: ∂/∂x = (∂/∂y) W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        [weight] = ctx.saved_tensors
        return product(gradient.contiguous(), weight.mT), None, None
