"""Float32 products of large matrices on a GPU's tensor cores.

A float32 number is the sum of three bfloat16 numbers of 8 bits each, a = a₁ + a₂ + a₃, so

    a·b = a₁b₁ + (a₁b₂ + a₂b₁) + (a₁b₃ + a₂b₂ + a₃b₁) + O(2⁻²⁴ |a| |b|)

(Henry, Tang and Heinecke 2019). Tensor cores multiply bfloat16 numbers exactly and add in float32, more than ten times
as fast as a data-centre GPU multiplies float32 numbers, so these six products take less time than the plain one: 57 %
of it on an H200 for 14,000 × 1,536 × 8,960. With the parts of a next to each other as [a₁ a₂ a₃] and those of b as
[b₃ b₂ b₁], each bracket is one product of slices, and the small ones are added first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_PARTS = 3
# Below these, making the parts takes longer than they save: the least of the three widths, and their product.
_LEAST, _WORTH = 1024, 2e10
_DEPTH = 1 << 11  # of d_in at once: tensor cores drop bits as they add, and more of them the longer the sum
# With bfloat16 at least ten times as fast as float32: A100, H100, B100 and their like, not GPUs made for graphics.
_CAPABILITIES = ((8, 0), (9, 0), (10, 0))

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(a, b, c) → a·b + c in float32, of bfloat16 a and b."""


def split_products(model: nn.Module, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """While it lasts, large float32 products that nothing differentiates run on tensor cores, where they are faster."""
    if dtype != torch.float32 or not _allowed(device):
        return nullcontext()
    # Of a narrow model no product is split, and to look at every call of a pass takes time.
    return _Splitting() if any(_wide(p) for p in model.parameters()) else nullcontext()


def _wide(weight: Tensor) -> bool:
    return weight.dim() == 2 and min(weight.shape) >= _LEAST


@cache
def _faster(device: torch.device) -> bool:
    has_product = "dtype" in torch.ops.aten.addmm.overloads()  # torch 2.8
    return device.type == "cuda" and has_product and torch.cuda.get_device_capability(device) in _CAPABILITIES


def _allowed(device: torch.device) -> bool:
    # Who allows TF32 has chosen speed over precision, and has faster products already.
    exact = torch.get_float32_matmul_precision() == "highest"
    return exact and not torch.is_grad_enabled() and _faster(device)


class _Splitting(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not kwargs and _worth(*args[:2]):
            return split_linear(*args)
        return func(*args, **(kwargs or {}))


def _worth(x: Tensor, weight: Tensor) -> bool:
    if x.dtype not in (torch.float32, torch.bfloat16) or weight.dtype != torch.float32:
        return False
    rows = x.numel() // max(1, x.shape[-1])
    # A pass that carries tangents needs operations that forward differentiation knows.
    return (
        rows >= _LEAST
        and _wide(weight)
        and x.numel() * weight.shape[0] >= _WORTH
        and forward_ad.unpack_dual(x).tangent is None
    )


def _on_tensor_cores(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    if c is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(c, a, b, out_dtype=torch.float32)


def split_linear(
    x: Float[Tensor, "*batch d_in"] | BFloat16[Tensor, "*batch d_in"],
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, " d_out"] | None = None,
    product: Product = _on_tensor_cores,
) -> Float[Tensor, "*batch d_out"]:
    """x Wᵀ + bias, by products of bfloat16 parts; a bfloat16 x is its own only part."""
    y: Tensor | None = None
    single = x.dtype == torch.bfloat16
    for some, columns in zip(x.flatten(0, -2).split(_DEPTH, -1), weight.split(_DEPTH, -1), strict=True):
        width = some.shape[-1]
        a, b = some if single else parts(some), parts(columns, reverse=True).mT
        for count in range(_PARTS, 0, -1):  # a₁b₃ + a₂b₂ + a₃b₁, then a₁b₂ + a₂b₁, then a₁b₁
            start, pairs = (_PARTS - count) * width, 1 if single else count
            y = product(a[:, : pairs * width], b[start : start + pairs * width], y)
    assert y is not None
    return (y if bias is None else y + bias).view(*x.shape[:-1], -1)


def own_linear(
    x: Float[Tensor, "batch row d_in"] | BFloat16[Tensor, "batch row d_in"], weight: Float[Tensor, "batch d_out d_in"]
) -> Float[Tensor, "batch row d_out"]:
    """x Wᵀ, each batch row with its own W, in W's precision: by parts where nothing differentiates and it is faster."""
    if _allowed(x.device) and _worth(x[0], weight[0]):
        return torch.stack([split_linear(rows, own) for rows, own in zip(x, weight, strict=True)])
    return x.to(weight.dtype) @ weight.mT


def parts(x: Float[Tensor, "row width"], *, reverse: bool = False) -> BFloat16[Tensor, "row parts_width"]:
    """Three bfloat16 numbers whose sum is x, the largest first (or last), side by side along the width."""
    into = x.new_empty(x.shape[0], _PARTS, x.shape[1], dtype=torch.bfloat16)
    order = range(_PARTS)
    for at in reversed(order) if reverse else order:
        into[:, at] = x
        x = x - into[:, at]  # exact: the leading bits cancel
    return into.flatten(1)
