"""One code for numpy's arrays and torch's tensors on a device: where to compute, and the calls in which they differ.

Functions that take either are annotated with numpy's type. torch is imported only when a device is given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float, Int, Num

T = TypeVar("T")
_THREADS = 8  # each holds some ten arrays of one step in double precision
_CACHED, _ON_DEVICE = 1 << 18, 1 << 24
"""The numbers of one array in one step: as many as stay in a processor's cache, or as keep a GPU busy (128 MiB)."""

_BATCHED_ROWS = 32
"""Of how many rows a GPU decomposes many matrices at once."""


def library(array: object) -> Any:
    """numpy or torch, whichever the array is of."""
    return np if isinstance(array, np.ndarray | np.generic | float) else sys.modules["torch"]


@dataclass(frozen=True)
class Backend:
    """Where to compute: with numpy, or with torch on a device."""

    device: Any = None
    """torch's device or its name; None for numpy."""

    def put(self, array: Num[np.ndarray, "*_shape"]) -> Num[np.ndarray, "*_shape"]:
        """The array itself, or a copy of it on the device, in its own precision; records may be there already."""
        if self.device is None:
            return array
        import torch

        given: Any = array
        if isinstance(given, torch.Tensor):
            moved: Any = given.to(self.device)
            return moved
        # Not `from_numpy`, which warns of arrays that cannot be written to, such as mapped files.
        copied: Any = torch.tensor(array, device=self.device)  # pyright: ignore[reportUnknownMemberType]
        return copied

    def full(self, shape: tuple[int, ...], value: float) -> Num[np.ndarray, "*_shape"]:
        """An array of one value, which a device fills itself: copying it there would take longer."""
        if self.device is None:
            return np.full(shape, value)
        one: Any = self.put(np.array(value))
        return one.expand(shape).clone()

    def fitting(self, numbers: int) -> int:
        """How many parts of so many numbers make one array; at least one."""
        return max(1, (_CACHED if self.device is None else _ON_DEVICE) // max(1, numbers))

    def steps(self, layers: int, numbers: int) -> list[slice]:
        """Layers in groups, given how many numbers one layer of an array has."""
        step = self.fitting(numbers)
        return [slice(start, min(start + step, layers)) for start in range(0, layers, step)]

    def threads(self, wanted: int = _THREADS) -> int:
        """How many threads help: on a device one, which hands out thousands of small steps faster by itself.

        More would also hold more of its memory: each has some fifteen arrays of one step.
        """
        return min(wanted if self.device is None else 1, os.cpu_count() or 1)

    def each(self, work: Callable[[Any], T], items: list[Any] | range) -> list[T]:
        """`work` on every item, on several threads: nearly all of it is numpy's or torch's, which lets threads run."""
        with ThreadPoolExecutor(self.threads()) as pool:
            return list(pool.map(work, items))


NUMPY = Backend()


def to_numpy(array: Num[np.ndarray, "*_shape"]) -> Num[np.ndarray, "*_shape"]:
    given: Any = array
    return array if library(array) is np else given.cpu().numpy()


def as_type(array: Num[np.ndarray, "*_shape"], name: str) -> Num[np.ndarray, "*_shape"]:
    """The array in another type of number, laid out row by row."""
    given: Any = array
    if library(array) is np:
        return np.asarray(array, dtype=name, order="C")
    return given.to(getattr(library(array), name)).contiguous()


def put_like(array: Num[np.ndarray, "*_shape"], other: np.ndarray) -> Num[np.ndarray, "*_shape"]:
    """numpy's array where another one is."""
    return Backend(None if library(other) is np else other.device).put(array)


def ordered(rows: Num[np.ndarray, "*row item"]) -> Num[np.ndarray, "*row item"]:
    """Each row sorted."""
    xp = library(rows)
    return np.sort(rows) if xp is np else xp.sort(rows).values


def ordering(
    rows: Num[np.ndarray, "row item"],
) -> tuple[Num[np.ndarray, "row item"], Int[np.ndarray, "row item"]]:
    """Each row sorted, and where its items were."""
    if library(rows) is np:
        order = np.argsort(rows)
        return np.take_along_axis(rows, order, axis=-1), order
    return library(rows).sort(rows)


def placed(values: Num[np.ndarray, "row item"], order: Int[np.ndarray, "row item"]) -> Num[np.ndarray, "row item"]:
    """The i-th value of each row at place order[i]."""
    xp = library(values)
    into = xp.empty_like(values)
    if xp is np:
        np.put_along_axis(into, order, values, axis=-1)
        return into
    return into.scatter_(-1, order, values)


def eigh(
    matrices: Float[np.ndarray, "*batch row row"],
) -> tuple[Float[np.ndarray, "*batch row"], Float[np.ndarray, "*batch row row"]]:
    """Eigenvalues, the smallest first, and eigenvectors of symmetric matrices.

    A GPU takes those of more than 32 rows one after another (480 of 62 rows take an H200 0.34 s, one thread of its host
    0.11 s), so they go to the host's threads. By numpy: torch would start threads of its own in each of them, which
    takes ten times as long as the matrices of one call.
    """
    xp = library(matrices)
    if xp is np or matrices.shape[-1] <= _BATCHED_ROWS:
        return xp.linalg.eigh(matrices)
    *batch, rows, _ = matrices.shape
    flat = to_numpy(matrices).reshape(-1, rows, rows)
    parts = NUMPY.each(np.linalg.eigh, np.array_split(flat, max(1, min(len(flat), NUMPY.threads()))))
    values, vectors = (np.concatenate(side) for side in zip(*parts, strict=True))
    return put_like(values.reshape(*batch, rows), matrices), put_like(vectors.reshape(*batch, rows, rows), matrices)


def running_maximum(rows: Int[np.ndarray, "row item"]) -> Int[np.ndarray, "row item"]:
    xp = library(rows)
    return np.maximum.accumulate(rows, axis=-1) if xp is np else xp.cummax(rows, -1).values
