"""Parameters and inputs at odd addresses: a BLAS may sum in another order where memory is not aligned.

torch allocates at multiples of 64 bytes, but weights read from a file lie wherever the file has them. With
`DUALVIEW_ODD_ALIGNMENT=1` every module's parameters are moved, before it first runs, to an address one number off a
multiple of 64 bytes. So are the inputs of linear maps wherever no gradient is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.pytorch_utils import Conv1D

_BYTES = 64


def at_odd_address(x: Tensor) -> Tensor:
    """The same numbers, one number off a multiple of 64 bytes."""
    per = _BYTES // x.element_size()
    buffer = torch.empty(x.numel() + 2 * per, dtype=x.dtype)
    start = (-buffer.data_ptr() // x.element_size()) % per + 1
    moved = buffer[start : start + x.numel()].view(x.shape)
    moved.copy_(x)
    return moved


def is_plain(x: Any) -> bool:
    """An ordinary dense tensor of floats on the CPU: none that a transform of torch.func has wrapped."""
    if not isinstance(x, Tensor) or type(x) not in (Tensor, nn.Parameter) or not x.is_floating_point():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._C._functorch.is_batchedtensor(x)
    return not wrapped and x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0 and x.element_size() < _BYTES


def _misalign(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    for parameter in module._parameters.values():
        if is_plain(parameter) and parameter.is_leaf and parameter.data_ptr() % _BYTES == 0:
            parameter.data = at_odd_address(parameter.data)
    tracked = torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0
    if isinstance(module, nn.Linear | Conv1D) and not tracked and inputs and is_plain(inputs[0]):
        return (at_odd_address(inputs[0]), *inputs[1:])
    return None


def misalign_modules() -> None:
    """From now on, for every module of this process."""
    register_module_forward_pre_hook(_misalign)
