"""Where the records of a pass go: to the host or, where they fit next to the weights, to stay on the GPU.

The statistics read every record several times. A large model's fill gigabytes, and moving them from the GPU and back
takes longer than all arithmetic on them, so they stay until they are asked for (`Records.on_host`). There they keep the
type of number in which the model computed them: a half-precision output is the same in single precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dualview.models.language_model import LanguageModel
from dualview.models.probe import first_order

_LEAST, _SHARE = 4 << 30, 1 / 3
"""What may be on a GPU next to the weights when records come to it: so many bytes, or so much of the weights."""
_OF_FREE = 1 / 4


def fits(lm: LanguageModel, nbytes: int) -> bool:
    """Whether so many bytes of records may stay on the model's GPU: the next pass or training needs room, too.

    Whatever else is there counts (records of other runs, fine-tuned weights), so nothing has to be given back.
    """
    where = lm.device
    if where.type != "cuda":
        return False
    weights = sum(p.nbytes for p in lm.model.parameters() if p.device == where)
    allocated = torch.cuda.memory_allocated(where)
    free = torch.cuda.mem_get_info(where)[0] + torch.cuda.memory_reserved(where) - allocated
    return allocated + nbytes - weights <= max(_LEAST, _SHARE * weights) and nbytes <= _OF_FREE * free


@dataclass(frozen=True)
class Places:
    """Arrays for a pass's records, in the queries' own order: numpy's, or tensors that stay."""

    like: Tensor
    """Where and in which type of number the pass itself should record."""
    stay: bool

    @classmethod
    def of(cls, lm: LanguageModel, shapes: Iterable[Sequence[int]], *, stay: bool) -> Places:
        """Places for records of these shapes: those that stay do so together or not at all."""
        numbers = sum(math.prod(shape) for shape in shapes)
        if stay and fits(lm, numbers * lm.dtype.itemsize):
            return cls(torch.empty(0, dtype=lm.dtype, device=lm.device), True)
        return cls(torch.empty(0, dtype=torch.promote_types(lm.dtype, torch.float32), device=lm.device), False)

    def empty(self, shape: Sequence[int]) -> Any:
        """Zeros: layers that are narrower than others leave some."""
        if self.stay:
            return self.like.new_zeros(tuple(shape))
        return np.zeros(shape, np.float64 if self.like.dtype == torch.float64 else np.float32)


@dataclass(frozen=True)
class Members:
    """The queries that a pass was over, by their numbers."""

    numbers: list[int]
    there: Int[Tensor, " query"]
    """The same on the model's device, copied once: a GPU waits for every copy from the host."""

    @classmethod
    def of(cls, numbers: list[int], device: torch.device) -> Members:
        return cls(numbers, torch.tensor(numbers, dtype=torch.long, device=device))

    def laid(self, into: Any, found: Tensor, axis: int = 1) -> Any:
        """The array with what was recorded of these queries (`axis`) at their places; it may be a wider one."""
        found = first_order(found)
        if not isinstance(into, np.ndarray):
            # Where a layer computes in a wider type than the model's, the whole is wider: nothing is rounded.
            into = into.to(torch.promote_types(into.dtype, found.dtype))
            into[..., : found.shape[-1]].index_copy_(axis, self.there, found.to(into))
            return into
        if found.is_cuda and found.shape == into.shape:  # all of them: put in order there, copied once
            order = torch.argsort(self.there.to(found.device))
            torch.from_numpy(into).copy_(found.index_select(axis, order))
            return into
        part = host(found)
        into[(*[slice(None)] * axis, self.numbers, *(slice(width) for width in part.shape[axis + 1 :]))] = part
        return into


def host(x: Tensor) -> np.ndarray:
    """On the host, in at least single precision."""
    x = first_order(x)
    return (x if x.dtype == torch.float64 else x.float()).cpu().numpy()
