"""Reading blocks of queries from the records, and what random rotations of FT's updates would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dualview.metrics.cosine import dot, ratio
from dualview.metrics.null_updates import BlockVectors, Compared, inner_products, short


@dataclass(frozen=True)
class BlockChunk:
    """Blocks of equally many queries, which are read together."""

    numbers: Sequence[int]
    """Of the blocks."""
    members: Int[np.ndarray, "block member"]
    width: int
    """How many entries their vectors have."""

    def read(self, stack: np.ndarray, layer: int) -> Float[np.ndarray, "block group member dim"]:
        """One layer of `h` or `m`, in double precision; what lies beyond a map's columns is left out."""
        part = stack[self.members, layer]
        part = part[:, None] if part.ndim == 3 else part[..., : self.width].swapaxes(1, 2)
        return np.ascontiguousarray(part, dtype=np.float64)


def block_chunks(
    blocks: Sequence[Int[np.ndarray, " _member"]], dims: Int[np.ndarray, " query"], array: str
) -> list[BlockChunk]:
    """Each block of outputs by itself, so that it stays in the processor's cache; blocks of like maps together."""
    if array == "h":
        return [BlockChunk([number], block[None], int(dims[block[0]])) for number, block in enumerate(blocks)]
    same: dict[tuple[int, int], list[int]] = {}
    for number, block in enumerate(blocks):
        same.setdefault((int(dims[block[0]]), block.size), []).append(number)
    return [
        BlockChunk(numbers, np.stack([blocks[number] for number in numbers]), width)
        for (width, _), numbers in same.items()
    ]


@dataclass(frozen=True)
class UpdateSources:
    """Whose updates are compared: ICL's u = icl − icl_base, FT's w = ft − ft_base; bases None for zsl."""

    zsl: np.ndarray
    icl: np.ndarray
    ft: np.ndarray
    icl_base: np.ndarray | None = None
    ft_base: np.ndarray | None = None
    off: Sequence[np.ndarray] = ()
    off_base: Sequence[np.ndarray] = ()

    def read(self, chunk: BlockChunk, layer: int) -> BlockVectors:
        z, u, w = (chunk.read(side, layer) for side in (self.zsl, self.icl, self.ft))
        u -= z if self.icl_base is None else chunk.read(self.icl_base, layer)
        w -= z if self.ft_base is None else chunk.read(self.ft_base, layer)
        off = tuple(chunk.read(side, layer) for side in self.off)
        for side, base in zip(off, self.off_base, strict=False):
            side -= chunk.read(base, layer)
        return BlockVectors(z, u, w, off)


class Rotations:
    """One layer's updates as the rotations see them: whole, and beyond the block's mean and outside the span."""

    def __init__(self, dims: Int[np.ndarray, " query"], groups: int, sample: Int[np.ndarray, " member"]):
        shape = (sample.size, groups, int(dims.max()))
        self.rows = {name: (np.zeros(shape), np.zeros(shape)) for name in ("whole", "specific")}
        for side in self.rows["specific"]:
            side.fill(np.nan)
        self.dims, self.sample = dims, sample
        self.slot = np.full(dims.size, -1)
        self.slot[sample] = np.arange(sample.size)
        self.rest = np.full((dims.size, groups), np.nan)

    def add(self, chunk: BlockChunk, v: BlockVectors, compared: Compared) -> None:
        """Take in the queries of some blocks."""
        block, member = np.nonzero(self.slot[chunk.members] >= 0)
        into = self.slot[chunk.members[block, member]]
        for side, row, length in zip(self.rows["whole"], (v.u, v.w), (compared.x_norm, compared.y_norm), strict=True):
            side[into, :, : chunk.width] = row[block, :, member] / length[block, :, member, None]
        if chunk.members.shape[1] < 2:
            return
        sides, pairs, kept = _outside_span(v, compared)
        both = kept[0][..., :, None] & kept[1][..., None, :]
        rest = compared.beyond_mean(np.where(both, pairs, 0.0))
        self.rest[chunk.members] = np.diagonal(rest, axis1=-2, axis2=-1).swapaxes(1, 2)
        if not into.size:
            return
        count: np.ndarray = compared.usable.sum(axis=-1, dtype=np.float64)[..., None]
        factor = np.sqrt(ratio(count, count - 1))
        lengths = compared.x_norm, compared.y_norm
        for side, row, keep, length in zip(self.rows["specific"], sides, kept, lengths, strict=True):
            counted = (compared.usable & keep)[..., None]
            clean = row if counted.all() else np.where(counted, row, 0.0)
            mean = ratio(clean.sum(axis=-2), count)
            scale = (factor / length)[block, :, member, None]
            side[into] = 0.0
            side[into, :, : chunk.width] = (clean[block, :, member] - mean[block]) * scale

    def deviation(self, name: str, defined: Bool[np.ndarray, "query group"]) -> float:
        x, y = self.rows[name]
        total = float(defined.sum())
        return rotation_variance(x, y, self.dims[self.sample], queries=self.dims.size, defined=total) ** 0.5


def _outside_span(v: BlockVectors, compared: Compared) -> tuple[Sequence[np.ndarray], np.ndarray, Sequence[np.ndarray]]:
    """x and y outside the heads' span (or else less their components along zsl), x_i·y_j, and where they are not 0."""
    p, lengths = compared.products, (compared.x_norm, compared.y_norm)
    if v.off:
        squares, sides, pairs = [dot(side, side) for side in v.off], v.off, inner_products(*v.off)
    else:
        less = compared.without_zsl()
        squares = [p.uu - np.nan_to_num(ratio(p.uz**2, p.zz)), p.ww - np.nan_to_num(ratio(p.wz**2, p.zz))]
        sides, pairs = (v.u + less.beta[..., None] * v.z, v.w + less.delta[..., None] * v.z), less.pairs()
    return sides, pairs, [~short(square, length) for square, length in zip(squares, lengths, strict=True)]


def rotation_variance(
    x: Float[np.ndarray, "member group dim"],
    y: Float[np.ndarray, "member group dim"],
    dims: Int[np.ndarray, " member"],
    *,
    queries: int,
    defined: float,
) -> float:
    """The variance of the mean x_i·y_i, over queries and heads, when one random rotation Q turns all the y together.

    mean x_i·Q y_i = ⟨Q, C⟩ with C the mean of x_i y_iᵀ, and for a uniformly random Q in d dimensions this has mean 0
    and variance ‖C‖²/d, which is the mean over all pairs of (x_i·x_j)(y_i·y_j)/d. Heads count as further vectors: they
    are turned together, so that directions which several heads share weigh as much as they should. x and y are those of
    a sample of the `queries`; `defined` pairs of vectors there are in all of them. Maps of different lengths are laid
    side by side from the first column, then from the last, and the larger counts. NaN where nothing is defined.
    """
    kept = len(x)
    if not defined:
        return float("nan")
    there = np.isfinite(dot(x, x) * dot(y, y))[..., None]
    chosen = [np.where(there, side, 0.0).transpose(1, 0, 2) for side in (x, y)]
    layouts = [chosen]
    if np.ptp(dims) > 0:
        layouts.append([_from_the_end(side, dims) for side in chosen])
    largest = 0.0
    for left, right in layouts:
        own, everything = _outer_products(left / np.sqrt(dims)[:, None], right)
        between = max(0.0, everything - own)
        scaled = own * queries / kept
        scaled += between * queries * (queries - 1) / (kept * (kept - 1)) if kept > 1 else 0.0
        largest = max(largest, scaled)
    return largest / defined**2


def _outer_products(
    x: Float[np.ndarray, "group member dim"], y: Float[np.ndarray, "group member dim"]
) -> tuple[float, float]:
    """Σ_i ‖C_i‖² and ‖Σ_i C_i‖², with C_i = Σ_heads x_i y_iᵀ: from the C_i, or from inner products if that is less."""
    groups, kept, dim = x.shape
    if dim < groups * kept:
        outer = x.transpose(1, 2, 0) @ y.transpose(1, 0, 2)
        return float(np.vdot(outer, outer)), float(np.square(outer.sum(axis=0)).sum())
    flat = [side.reshape(1, groups * kept, dim) for side in (x, y)]
    products = np.multiply(*(inner_products(side, side)[0] for side in flat)).reshape(groups, kept, groups, kept)
    return float(np.einsum("giGi->", products)), float(products.sum())


def _from_the_end(
    unit: Float[np.ndarray, "group member dim"], dims: Int[np.ndarray, " member"]
) -> Float[np.ndarray, "group member dim"]:
    """Each vector's `dims` entries moved to the end of its row."""
    source = np.arange(int(unit.shape[2])) - (unit.shape[2] - dims[:, None])
    return np.where(source >= 0, np.take_along_axis(unit, np.maximum(source, 0)[None], axis=2), 0.0)
