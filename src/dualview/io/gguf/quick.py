"""The same reading of a GGUF file, sooner: what transformers asks of gguf and torch, with the same results.

transformers parses the header of a file four times, in a million small slices of a memory map, and has gguf unpack one
tensor after another on one core. It also needs a model to copy the weights to, whose own weights are drawn at random
first. None of it can be chosen, so gguf's functions are replaced while a file is read; where transformers does not look
them up in gguf at that time, it reads as it always does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quant_shape_from_byte_shape
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

_PIECE = 1 << 17
"""Numbers that are unpacked at once: few enough that what is computed on the way stays in a core's cache."""
_dequantize = gguf.dequantize
_replacing = threading.Lock()


class Reader(gguf.GGUFReader):
    """A reader whose bytes are a plain array: numpy's memory maps spend microseconds on every slice."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped)


class Undrawn(TorchFunctionMode):
    """Leaves weights that would be drawn at random as they are, for a model whose weights are all loaded next."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__.endswith(("normal_", "uniform_")):
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, Parameter):  # no buffer: it may not be in the file
                return tensor
        return func(*args, **(kwargs or {}))


@contextmanager
def quick_gguf() -> Generator[None]:
    """Inside, gguf parses a file once and unpacks it on as many threads as torch computes on."""
    with _replacing, ThreadPoolExecutor(torch.get_num_threads()) as pool:
        quick: dict[str, Callable[..., Any]] = {
            "GGUFReader": cache(Reader),
            "dequantize": partial(dequantize, pool),
            "get_tensor_name_map": cache(gguf.get_tensor_name_map),  # asked for by every module of the model
        }
        before = {name: getattr(gguf, name) for name in quick}
        try:
            for name, function in quick.items():
                setattr(gguf, name, function)
            yield
        finally:
            for name, function in before.items():
                setattr(gguf, name, function)


def dequantize(pool: Executor, packed: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """What `gguf.dequantize` gives, bit by bit: a block is unpacked by itself, whichever blocks are next to it.

    numpy lets other threads run while it computes; pieces larger than gguf's own 16 rows give it enough to do.
    """
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    step = max(1, _PIECE // numbers)
    if packed.dtype != np.uint8 or packed.size <= step * size:
        return _dequantize(packed, kind)
    unpacked = np.empty(quant_shape_from_byte_shape(packed.shape, kind), np.float32)
    blocks, results = packed.reshape(-1, size), unpacked.reshape(-1, numbers)

    def unpack(start: int) -> None:
        piece = blocks[start : start + step]
        results[start : start + step] = _dequantize(piece.reshape(1, -1), kind).reshape(-1, numbers)

    try:
        list(pool.map(unpack, range(0, len(blocks), step)))
    except RuntimeError:  # somebody kept this function, and its threads have ended
        return _dequantize(packed, kind)
    return unpacked


def take_weights(model: Any, weights: dict[str, Any]) -> None:
    """What `model.load_state_dict(weights)` gives, without a copy: the weights themselves become the model's.

    A tied parameter has several names; the last one's weight is what stays in it, as after a copy.
    """
    own = model.state_dict(keep_vars=True)
    taken = {id(own[name]): _like(own[name], weight) for name, weight in weights.items() if name in own}
    model.load_state_dict(
        {name: taken[id(own[name])] if name in own else weight for name, weight in weights.items()}, assign=True
    )


def _like(own: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight as it would be after `own.copy_(weight)`: with its dtype, in one stretch of memory of its own."""
    weight = weight.to(own.dtype)
    if not weight.is_contiguous() or weight.untyped_storage().nbytes() != weight.nbytes:
        weight = weight.clone(memory_format=torch.contiguous_format)
    return Parameter(weight, requires_grad=False) if isinstance(own, Parameter) else weight
