"""Reading blocks of queries from the records, and what random rotations of FT's updates would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dualview.metrics.arrays import Backend, as_type, library, put_like
from dualview.metrics.cosine import dot, ratio, root
from dualview.metrics.floors.beyond import beyond_shared
from dualview.metrics.floors.updates import BlockVectors, Compared, inner_products


@dataclass(frozen=True)
class BlockChunk:
    """Blocks of equally many queries, which are read together."""

    numbers: Sequence[int]
    """Of the blocks."""
    members: Int[np.ndarray, "block member"]
    width: int
    """How many entries their vectors have."""
    widths: Int[np.ndarray, " block"] | None = None
    """How many of these each block has, if not all; the rest are zeros, which add nothing to any product."""

    def read(self, stack: Float[np.ndarray, "query layer *rest"]) -> Float[np.ndarray, "layer block group member dim"]:
        """Some layers of `h` or `m`, in double precision; what lies beyond a map's columns is left out."""
        xp = library(stack)
        part = xp.moveaxis(stack[put_like(self.members, stack)], 2, 0)
        part = part[:, :, None] if part.ndim == 4 else part[..., : self.width].swapaxes(2, 3)
        if self.widths is not None:
            part = xp.where(put_like(np.arange(self.width) < self.widths[:, None, None, None], stack), part, 0.0)
        return as_type(part, "float64")


def block_chunks(
    blocks: Sequence[Int[np.ndarray, " _member"]], dims: Int[np.ndarray, " query"], groups: int, backend: Backend
) -> list[BlockChunk]:
    """Blocks of as many queries and equal widths together, as far as they make one array of the right size.

    A device takes different widths together, too: each of a chunk's thousand small steps costs it more than zeros do.
    """
    same: dict[tuple[int, int], list[int]] = {}
    for number, block in enumerate(blocks):
        width = int(dims[block[0]] if backend.device is None else dims.max())
        same.setdefault((width, block.size), []).append(number)
    chunks: list[BlockChunk] = []
    for (width, size), numbers in same.items():
        several = backend.fitting(width * size * groups)
        for some in (numbers[start : start + several] for start in range(0, len(numbers), several)):
            widths = np.array([dims[blocks[number][0]] for number in some])
            ragged = widths if widths.min() < width else None
            chunks.append(BlockChunk(some, np.stack([blocks[number] for number in some]), width, ragged))
    return chunks


@dataclass(frozen=True)
class UpdateSources:
    """Whose updates are compared: ICL's u = icl − icl_base, FT's w = ft − ft_base; bases None for zsl."""

    zsl: np.ndarray
    icl: np.ndarray
    ft: np.ndarray
    icl_base: np.ndarray | None = None
    ft_base: np.ndarray | None = None
    off: Sequence[np.ndarray] = ()
    """Both changes beyond what all queries share and outside the heads' span, where they were recorded."""
    known: Float[np.ndarray, "number query"] | None = None
    """What is known of each query (`floors.covariates`)."""

    def put(self, layers: slice, backend: Backend) -> UpdateSources:
        """Some layers of every source, where they are computed with."""

        def of(stack: np.ndarray) -> np.ndarray:
            return backend.put(stack[:, layers])

        icl_base, ft_base = (None if base is None else of(base) for base in (self.icl_base, self.ft_base))
        off = [of(side) for side in self.off]
        return UpdateSources(of(self.zsl), of(self.icl), of(self.ft), icl_base, ft_base, off, self.known)

    def read(self, chunk: BlockChunk) -> BlockVectors:
        z, u, w = (chunk.read(side) for side in (self.zsl, self.icl, self.ft))
        u -= z if self.icl_base is None else chunk.read(self.icl_base)
        w -= z if self.ft_base is None else chunk.read(self.ft_base)
        known = None if self.known is None else put_like(self.known[:, chunk.members].swapaxes(0, 1), z)
        return BlockVectors(z, u, w, tuple(chunk.read(side) for side in self.off), known)


class Rotations:
    """Some layers' updates as the rotations see them: whole, and beyond what a block shares and outside the span."""

    def __init__(
        self,
        dims: Int[np.ndarray, " query"],
        layers: int,
        groups: int,
        sample: Int[np.ndarray, " member"],
        at: Backend,
        *,
        outputs: bool,
    ):
        shape = (layers, sample.size, groups, int(dims.max()))
        self.rows = {
            name: tuple(at.full(shape, fill) for _ in range(2)) for name, fill in (("whole", 0.0), ("specific", np.nan))
        }
        self.dims, self.sample, self.at, self.outputs = dims, sample, at, outputs
        self.slot = np.full(dims.size, -1)
        self.slot[sample] = np.arange(sample.size)
        self.rest, self.cosines, self.portion = (at.full((layers, dims.size, groups), np.nan) for _ in range(3))

    def add(self, chunk: BlockChunk, v: BlockVectors, compared: Compared) -> None:
        """Take in the queries of some blocks."""
        found = np.nonzero(self.slot[chunk.members] >= 0)
        block, member, into = (self.at.put(each) for each in (*found, self.slot[chunk.members[found]]))

        def sampled(side: Float[np.ndarray, "layer block group member *dim"]) -> np.ndarray:
            return side.swapaxes(2, 3)[:, block, member]

        lengths = compared.x_norm, compared.y_norm
        if found[0].size:
            for side, row, length in zip(self.rows["whole"], (v.u, v.w), lengths, strict=True):
                side[:, into, :, : chunk.width] = sampled(row) / sampled(length)[..., None]
        if chunk.members.shape[1] < 2:
            return
        sides, members = beyond_shared(v, compared, outputs=self.outputs), self.at.put(chunk.members)
        both = dot(sides[0].rows, sides[1].rows)
        count = as_type(compared.usable.sum(axis=-1), "float64")[..., None]
        fitted = library(both).maximum(sides[0].fitted, sides[1].fitted)[..., None]
        unbiased = ratio(count, (count - fitted).clip(0.0))  # NaN where as much is fitted as there are queries
        self.rest[:, members] = ratio(both * unbiased, lengths[0] * lengths[1]).swapaxes(2, 3)
        self.cosines[:, members] = (both * sides[0].inverse * sides[1].inverse + 0 * unbiased).swapaxes(2, 3)
        self.portion[:, members] = (sides[0].portion * sides[1].portion).swapaxes(2, 3)
        if found[0].size:
            for side, own in zip(self.rows["specific"], sides, strict=True):
                side[:, into] = 0.0
                side[:, into, :, : chunk.width] = sampled(own.rows) * sampled(own.inverse)[..., None]

    def deviation(self, name: str, defined: Bool[np.ndarray, "layer query group"]) -> Float[np.ndarray, " layer"]:
        x, y = self.rows[name]
        total = as_type(defined.sum(axis=(1, 2)), "float64")
        return root(rotation_variance(x, y, self.dims[self.sample], queries=self.dims.size, defined=total))

    @property
    def crowding(self) -> Float[np.ndarray, " layer"]:
        """How much nearer ICL's update of one query is to FT's of another than in all dimensions; at least 1."""
        x, y = self.rows["specific"]
        return crowding(x, y, self.dims[self.sample])


def rotation_variance(
    x: Float[np.ndarray, "layer member group dim"],
    y: Float[np.ndarray, "layer member group dim"],
    dims: Int[np.ndarray, " member"],
    *,
    queries: int,
    defined: Float[np.ndarray, " layer"],
) -> Float[np.ndarray, " layer"]:
    """The variance of the mean x_i·y_i, over queries and heads, when one random rotation Q turns all the y together.

    mean x_i·Q y_i = ⟨Q, C⟩ with C the mean of x_i y_iᵀ, and for a uniformly random Q in d dimensions this has mean 0
    and variance ‖C‖²/d, which is the mean over all pairs of (x_i·x_j)(y_i·y_j)/d. Heads count as further vectors: they
    are turned together, so that directions which several heads share weigh as much as they should. x and y are those of
    a sample of the `queries`; `defined` pairs of vectors there are in all of them. Maps of different lengths are laid
    side by side from the first column, then from the last, and the larger counts. NaN where nothing is defined.
    """
    kept, xp = int(x.shape[1]), library(x)
    there = xp.isfinite(dot(x, x) * dot(y, y))[..., None]
    chosen = [xp.where(there, side, 0.0).swapaxes(1, 2) for side in (x, y)]
    layouts = [chosen]
    if np.ptp(dims) > 0:
        layouts.append([_from_the_end(side, dims) for side in chosen])
    largest, scale = xp.zeros_like(defined), put_like(dims[:, None] ** -0.5, x)
    for left, right in layouts:
        own, everything = _outer_products(left * scale, right)
        between = (everything - own).clip(0.0)
        scaled = own * queries / kept
        scaled += between * queries * (queries - 1) / (kept * (kept - 1)) if kept > 1 else 0.0
        largest = xp.maximum(largest, scaled)
    return ratio(largest, defined**2)


def crowding(
    x: Float[np.ndarray, "layer member group dim"],
    y: Float[np.ndarray, "layer member group dim"],
    dims: Int[np.ndarray, " member"],
) -> Float[np.ndarray, " layer"]:
    """d · mean of (x_i·y_j)² over different queries i and j, at least 1: all dimensions over those that both write in.

    Directions drawn from all d dimensions have a mean of 1/d. Where ICL and FT both write into a few, however each
    query is paired, they meet more often by chance, and so do x and a y turned within those few: with 1/d replaced by
    this mean, ‖C‖²/d is the variance under such rotations. Only rows of as many dimensions can be compared (maps of
    several lengths cannot: 1).
    """
    xp, kept = library(x), int(x.shape[1])
    if np.ptp(dims) > 0 or kept < 2:
        return xp.ones_like(x[:, 0, 0, 0])
    left, right = (xp.nan_to_num(side).swapaxes(1, 2) for side in (x, y))
    squared = inner_products(left, right) ** 2
    there = [as_type(dot(side, side) > 0, "float64") for side in (left, right)]
    pairs, own = (there[0].sum(axis=-1) * there[1].sum(axis=-1)), (there[0] * there[1]).sum(axis=-1)
    others = squared.sum(axis=(-1, -2)) - xp.einsum("lgii->lg", squared)
    return xp.nan_to_num(ratio(others.sum(axis=-1) * int(dims[0]), (pairs - own).sum(axis=-1))).clip(1.0)


def _outer_products(
    x: Float[np.ndarray, "layer group member dim"], y: Float[np.ndarray, "layer group member dim"]
) -> tuple[Float[np.ndarray, " layer"], Float[np.ndarray, " layer"]]:
    """Σ_i ‖C_i‖² and ‖Σ_i C_i‖², with C_i = Σ_heads x_i y_iᵀ: from the C_i, or from inner products if that is less."""
    layers, groups, kept, dim = x.shape
    if dim < groups * kept:
        outer = x.swapaxes(1, 2).swapaxes(2, 3) @ y.swapaxes(1, 2)
        return (outer**2).sum(axis=(1, 2, 3)), (outer.sum(axis=1) ** 2).sum(axis=(1, 2))
    grams = [inner_products(flat, flat) for flat in (side.reshape(layers, groups * kept, dim) for side in (x, y))]
    products = (grams[0] * grams[1]).reshape(layers, groups, kept, groups, kept)
    return library(x).einsum("lgiGi->l", products), products.sum(axis=(1, 2, 3, 4))


def _from_the_end(
    unit: Float[np.ndarray, "layer group member dim"], dims: Int[np.ndarray, " member"]
) -> Float[np.ndarray, "layer group member dim"]:
    """Each vector's `dims` entries moved to the end of its row."""
    source = np.arange(int(unit.shape[3])) - (unit.shape[3] - dims[:, None])
    member, at = put_like(np.arange(dims.size)[:, None], unit), put_like(np.maximum(source, 0), unit)
    return library(unit).where(put_like(source >= 0, unit), unit[:, :, member, at], 0.0)
