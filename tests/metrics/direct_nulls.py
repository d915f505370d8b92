"""The floors computed from whole vectors, one by one: the slow counterpart of `dualview.metrics.floors.nulls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from dualview.metrics.cosine import (
    UNDEFINED_BELOW,
    Form,
    compared,
    defined_mean,
    dot,
    each_layer,
    layer_of,
    long_enough,
    norm,
    overall_mean,
    ratio,
    reference_norm,
)
from dualview.metrics.floors.nulls import Floor, RecordFloors, Rotated, map_blocks, output_blocks, shuffle_test
from dualview.metrics.sim_aou import noise_floor
from dualview.metrics.statistics import generator

_ROTATION_SAMPLE = 64
_GAUSSIAN_DRAWS = 4
_SERIAL = 64**3


def inner_products(
    a: Float[np.ndarray, "*batch left dim"], b: Float[np.ndarray, "*batch right dim"]
) -> Float[np.ndarray, "*batch left right"]:
    """a_i·b_j for each group (and block, where there are several).

    In slices too small for BLAS to start its threads: there are thousands of these little products, and on a busy
    machine waking the threads for each cost ten times the products themselves.
    """
    step = max(8, _SERIAL // (a.shape[-2] * b.shape[-2]))
    total = np.zeros((*a.shape[:-1], b.shape[-2]))
    for start in range(0, a.shape[-1], step):
        total += a[..., start : start + step] @ b[..., start : start + step].swapaxes(-1, -2)
    return total


def cosine_with_update(
    form: Form,
    *,
    x_b: Float[np.ndarray, "*_pair"],
    z_b: Float[np.ndarray, "*_pair"],
    b_norm: Float[np.ndarray, "*_b"],
    x_z: Float[np.ndarray, "*_x"],
    x_norm: Float[np.ndarray, "*_x"],
    z_norm: Float[np.ndarray, "*_x"],
) -> Float[np.ndarray, "*_pair"]:
    """cos(x, y), x being ICL's compared vector and y what `form` compares once zsl has been moved by b.

    Written in inner products, so that neither another query's update nor a random one has to be formed.
    """
    if form == "update":
        return ratio(x_b, x_norm * b_norm)
    moved = np.sqrt(np.maximum(z_norm**2 + 2 * z_b + b_norm**2, 0.0))
    if form == "map":
        return ratio(x_z + x_b, x_norm * moved)
    towards_zsl = ratio(z_norm**2 + z_b, z_norm * moved)
    length = np.sqrt(np.maximum(2 - 2 * towards_zsl, 0.0))
    return ratio(ratio(x_z + x_b, moved) - ratio(x_z, z_norm), x_norm * long_enough(length, np.ones_like(length)))


@dataclass(frozen=True)
class LayerVectors:
    """One layer's vectors for one form, with the lengths and products that everything else is made from.

    `query` is all of them, or (`take`) blocks of equally many: then there is one more axis in front, and what compares
    queries compares those of a block.
    """

    form: Form
    z: Float[np.ndarray, "*block query group dim"]
    """The ZSL vectors."""
    x: Float[np.ndarray, "*block query group dim"]
    """What is compared of ICL."""
    y: Float[np.ndarray, "*block query group dim"]
    """What is compared of FT."""
    b: Float[np.ndarray, "*block query group dim"]
    """FT's update, whatever the form."""
    z_norm: Float[np.ndarray, "*block query group"]
    x_norm: Float[np.ndarray, "*block query group"]
    """‖x‖, NaN where it makes the cosine undefined; y_norm alike."""
    y_norm: Float[np.ndarray, "*block query group"]
    b_norm: Float[np.ndarray, "*block query group"]
    x_z: Float[np.ndarray, "*block query group"]
    off: tuple[np.ndarray, np.ndarray] | None = None
    """What is compared of ICL and of FT outside the heads' span, where it was recorded."""
    known: np.ndarray | None = None
    """What is known of each query, a row for each number."""

    @classmethod
    def of(
        cls, form: Form, z: np.ndarray, icl: np.ndarray, ft: np.ndarray, off: Sequence[np.ndarray] = ()
    ) -> LayerVectors:
        x, y = compared(form, z, icl), compared(form, z, ft)
        b = y if form == "update" else compared("update", z, ft)
        z_norm, reference = norm(z), reference_norm(form, z)
        x_norm, y_norm = long_enough(norm(x), reference), long_enough(norm(y), reference)
        b_norm = y_norm if form == "update" else norm(b)
        outside = None
        if off:
            scales = [ratio(np.ones(()), norm(side)) if form == "normalised" else np.ones(1) for side in (icl, ft)]
            outside = off[0] * scales[0][..., None], off[1] * scales[1][..., None]
        return cls(form, z, x, y, b, z_norm, x_norm, y_norm, b_norm, dot(x, z), outside)

    def take(self, block: Int[np.ndarray, "*block member"]) -> LayerVectors:
        z, x, y, z_norm, x_norm, y_norm, b_norm, x_z = (
            side[block]
            for side in (self.z, self.x, self.y, self.z_norm, self.x_norm, self.y_norm, self.b_norm, self.x_z)
        )
        b = y if self.b is self.y else self.b[block]
        return LayerVectors(self.form, z, x, y, b, z_norm, x_norm, y_norm, b_norm, x_z)

    def cosines(self) -> Float[np.ndarray, "query group"]:
        return ratio(dot(self.x, self.y), self.x_norm * self.y_norm)


def shrinkage(layer: LayerVectors) -> Float[np.ndarray, "query group"]:
    """The similarity that the parts in the heads' span (or else along zsl) give by themselves.

    (x·y − x'·y') / (‖x‖ ‖y‖), x' and y' outside the span; along zsl (x·z)(y·z) / (‖z‖² ‖x‖ ‖y‖).
    """
    if layer.off is None:
        return ratio(layer.x_z * dot(layer.y, layer.z), layer.z_norm**2 * layer.x_norm * layer.y_norm)
    return ratio(dot(layer.x, layer.y) - dot(*layer.off), layer.x_norm * layer.y_norm)


def gaussian(
    layer: LayerVectors, dims: Int[np.ndarray, " query"], rng: np.random.Generator
) -> Float[np.ndarray, "query group"]:
    """The mean cosine with random updates of FT's norm.

    Of a uniformly random direction in `dims` dimensions only its components along z and along what x has beside z
    matter; they are t₁ and t₂ over √(t₁² + t₂² + χ²), so nothing d-dimensional is drawn.
    """
    shape, free = (_GAUSSIAN_DRAWS, *layer.z.shape[:2]), dims[:, None] - 2
    along, beside = rng.standard_normal(shape), rng.standard_normal(shape) * (free >= 0)
    rest = np.where(free > 0, rng.chisquare(np.maximum(free, 1), shape), 0.0)
    scale = layer.b_norm / np.sqrt(along**2 + beside**2 + rest)
    x_along = np.nan_to_num(ratio(layer.x_z, layer.z_norm))
    x_beside = np.sqrt(np.maximum(layer.x_norm**2 - x_along**2, 0.0))
    cosines = cosine_with_update(
        layer.form,
        x_b=scale * (x_along * along + x_beside * beside),
        z_b=scale * layer.z_norm * along,
        b_norm=layer.b_norm,
        x_z=layer.x_z,
        x_norm=layer.x_norm,
        z_norm=layer.z_norm,
    )
    return defined_mean(cosines, axis=0)


def pair_cosines(layer: LayerVectors) -> Float[np.ndarray, "*block member member"]:
    """cos between query i's ICL and query j's FT update applied to i, averaged over heads; NaN where undefined."""
    z, x, b = (side.swapaxes(-3, -2) for side in (layer.z, layer.x, layer.b))
    cosines = cosine_with_update(
        layer.form,
        x_b=inner_products(x, b),
        z_b=np.zeros(1) if layer.form == "update" else inner_products(z, b),
        b_norm=layer.b_norm.swapaxes(-2, -1)[..., None, :],
        x_z=layer.x_z.swapaxes(-2, -1)[..., None],
        x_norm=layer.x_norm.swapaxes(-2, -1)[..., None],
        z_norm=layer.z_norm.swapaxes(-2, -1)[..., None],
    )
    return defined_mean(cosines, axis=-3)


@dataclass(frozen=True)
class Sides:
    """ICL's and FT's vectors, scaled so that their inner products are cosines or parts of them; NaN where undefined."""

    x: Float[np.ndarray, "*block query group dim"]
    y: Float[np.ndarray, "*block query group dim"]

    def pairs(self) -> Float[np.ndarray, "*block query query"]:
        """x_i·y_j, averaged over the heads where it is defined."""
        return defined_mean(inner_products(self.x.swapaxes(-3, -2), self.y.swapaxes(-3, -2)), axis=-3)


def units(layer: LayerVectors) -> Sides:
    """x/‖x‖ and y/‖y‖."""
    return Sides(layer.x / layer.x_norm[..., None], layer.y / layer.y_norm[..., None])


def centred(layer: LayerVectors) -> Sides:
    """(x − x̄)/‖x‖ and (y − ȳ)/‖y‖, each times √(n/(n−1)): what each query has beyond the mean vectors of its block.

    The factor makes the products of a query's own two sides an unbiased covariance.
    """
    usable = np.isfinite(layer.x_norm) & np.isfinite(layer.y_norm)
    count: np.ndarray = usable.sum(axis=-2, keepdims=True).astype(np.float64)
    factor = np.sqrt(ratio(count, count - 1))
    sides: list[np.ndarray] = []
    for side, length in ((layer.x, layer.x_norm), (layer.y, layer.y_norm)):
        total: np.ndarray = np.where(usable[..., None], side, 0.0).sum(axis=-3, keepdims=True)
        sides.append((side - ratio(total, count[..., None])) * (factor / length)[..., None])
    return Sides(sides[0], sides[1])


def known_basis(rows: list[np.ndarray], there: list[bool], known: np.ndarray | None) -> np.ndarray:
    """An orthonormal basis, a column each, of what is known of the queries that are there: by least squares."""
    member = np.array(there, dtype=np.float64)
    mean = sum(row for row, here in zip(rows, there, strict=True) if here) / len(rows) + 0 * rows[0]
    strength = np.array([row @ mean for row in rows]) * member
    numbers = [member, strength, *([] if known is None else [number * member for number in known])]
    basis: list[np.ndarray] = []
    for number in numbers[: max(1, len(rows) // 2)]:
        left = number
        if basis:
            left = number - np.stack(basis, 1) @ np.linalg.lstsq(np.stack(basis, 1), number, rcond=None)[0]
        if norm(left) > 1e-3 * norm(number):
            basis.append(left / norm(left))
    return np.stack(basis, 1) if basis else np.zeros((len(rows), 1))


def beyond_known(rows: list[np.ndarray], outside: list[np.ndarray], known: np.ndarray) -> np.ndarray:
    """Each row outside its own span and beyond what all share, or share by what is known of them, by dense matrices.

    outside   the projection off each row's span
    known     an orthonormal basis, a column each, the first of all ones
    """
    size = known.shape[1] * rows[0].size
    matrix = 0.01 * np.eye(size) + sum(np.kron(np.outer(z, z), p) for z, p in zip(known, outside, strict=True))
    total = sum(np.kron(z, p @ row) for z, p, row in zip(known, outside, rows, strict=True))
    fitted = np.linalg.solve(matrix, total).reshape(known.shape[1], -1)
    found: list[np.ndarray] = []
    for z, p, row in zip(known, outside, rows, strict=True):
        left, along = p @ (row - z @ fitted), p @ (z[0] * fitted[0])
        found.append(left - (left @ along) / (along @ along if along.any() else 1.0) * along)
    return np.stack(found)


def beyond_mean_and_span(
    layer: LayerVectors, block: Int[np.ndarray, " member"], group: int, *, outputs: bool
) -> tuple[list[np.ndarray], np.ndarray, int]:
    """ICL's and FT's vectors of a block beyond what is known of the queries and outside the heads' span, or else off
    each query's zsl, each followed by where they are more than rounding; who is there; how many numbers were fitted."""
    lengths = layer.x_norm[block, group], layer.y_norm[block, group]
    usable = np.isfinite(lengths[0] * lengths[1])
    found: list[np.ndarray] = []
    own: list[np.ndarray] = []
    most, directions = 1, list[np.ndarray]()
    for side, whole in zip(layer.off or (layer.x, layer.y), lengths, strict=True):
        rows = [side[i, group] for i in block]
        kept = [bool(u and norm(row) >= UNDEFINED_BELOW * w) for row, u, w in zip(rows, usable, whole, strict=True)]
        rows = [row if keep else np.zeros_like(row) for row, keep in zip(rows, kept, strict=True)]
        count = max(1, int(usable.sum()))
        if layer.off is not None:
            rest = np.stack(rows) - sum(rows) / count
        else:
            directions = [
                layer.z[i, group] if keep else 0 * layer.z[i, group] for i, keep in zip(block, kept, strict=True)
            ]
            known = known_basis(rows, kept, None if layer.known is None else layer.known[:, block])
            outside = [np.eye(z.size) - np.outer(z, z) / (z @ z if z.any() else 1.0) for z in directions]
            rest = beyond_known(rows, outside, known)
            most = max(most, np.count_nonzero(known.any(axis=0)))
        found += [rest, np.array(kept)]
        own.append(np.zeros((block.size, rows[0].size)) if layer.off is not None else np.stack(directions))
    if group == 0 and outputs:
        (found[0], found[2]), fitted = without_most_shared(found, own)
        most += fitted
    for at, whole in ((0, lengths[0]), (2, lengths[1])):
        found[at + 1] = found[at + 1] & ~(norm(found[at]) < UNDEFINED_BELOW * whole)
    return found, usable, most


def without_most_shared(found: list[np.ndarray], own: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """Both sides less the directions that both share most, found on the other half of the block, by dense matrices."""
    x, x_there, y, y_there = found
    members, d, both = len(x), x.shape[1], x_there & y_there
    several = min(2, members // 12)
    if not several:
        return [x, y], 0
    halves, numbers, directions = [np.arange(members) % 2 == half for half in (0, 1)], list[np.ndarray](), []
    for half in halves:
        product = sum((np.outer(x[q], y[q]) for q in np.flatnonzero(~half & both)), np.zeros((d, d)))
        values, vectors = np.linalg.eigh((product + product.T) / 2)
        largest = vectors[:, np.argsort(abs(values))[::-1][:several]]
        directions.append(largest)
        numbers += [half * both, *(half * both * (side @ u) for u in largest.T for side in (x, y))]
    basis: list[np.ndarray] = []
    for number in (each.astype(np.float64) for each in numbers):
        left = number - (
            np.stack(basis, 1) @ np.linalg.lstsq(np.stack(basis, 1), number, rcond=None)[0] if basis else 0
        )
        if norm(left) > 1e-3 * norm(number):
            basis.append(left / norm(left))
    known, left = np.stack(basis, 1), list[np.ndarray]()
    for rows, mine in ((x, own[0]), (y, own[1])):
        outside = [np.eye(d) - np.outer(z, z) / (z @ z if z.any() else 1.0) for z in mine]
        matrix = 0.01 * np.eye(known.shape[1] * d)
        matrix += sum(np.kron(np.outer(k, k), p) for k, p in zip(known, outside, strict=True))
        total = sum(np.kron(k, p @ row) for k, p, row in zip(known, outside, rows, strict=True))
        change = np.linalg.solve(matrix, total).reshape(known.shape[1], d)
        rest: list[np.ndarray] = []
        for q, (k, p, row) in enumerate(zip(known, outside, rows, strict=True)):
            u = p @ directions[0 if halves[0][q] else 1]
            own_part = p @ (row - k @ change)
            rest.append(own_part - u @ np.linalg.lstsq(u, own_part, rcond=None)[0])
        left.append(np.stack(rest))
    if all(
        np.linalg.norm(rest[both]) < 0.1 * np.linalg.norm(side[both]) for rest, side in zip(left, (x, y), strict=True)
    ):
        left = [x, y]  # nothing else in the whole block
    return left, known.shape[1] - 1


def rotation_variance(sides: Sides, dims: Int[np.ndarray, " query"], sample: Int[np.ndarray, " member"]) -> float:
    """The variance of the mean x_i·y_i, over queries and heads, when one random rotation Q turns all the y together.

    mean x_i·Q y_i = ⟨Q, C⟩ with C the mean of x_i y_iᵀ, and for a uniformly random Q in d dimensions this has mean 0
    and variance ‖C‖²/d, which is the mean over all pairs of (x_i·x_j)(y_i·y_j)/d. Heads count as further vectors: they
    are turned together, so that directions which several heads share weigh as much as they should. Pairs of different
    queries are taken from a sample. Maps of different lengths are laid side by side from the first column, then from
    the last, and the larger variance counts. NaN where nothing is defined.
    """
    defined = np.isfinite(dot(sides.x, sides.x) * dot(sides.y, sides.y))
    total, kept, n = float(defined.sum()), sample.size, sides.x.shape[0]
    if not total:
        return float("nan")
    chosen = [np.where(defined[sample][..., None], side[sample], 0.0).transpose(1, 0, 2) for side in (sides.x, sides.y)]
    layouts = [chosen]
    if np.ptp(dims) > 0:
        layouts.append([_from_the_end(side, dims[sample]) for side in chosen])
    largest = 0.0
    for x, y in layouts:
        own, everything = _outer_products(x / np.sqrt(dims[sample])[:, None], y)
        between = max(0.0, everything - own)
        scaled = own * n / kept + (between * n * (n - 1) / (kept * (kept - 1)) if kept > 1 else 0.0)
        largest = max(largest, scaled)
    return largest / total**2


def crowding(sides: Sides, dims: Int[np.ndarray, " query"], sample: Int[np.ndarray, " member"]) -> float:
    """d · mean (x_i·y_j)² over different queries of the sample, head by head; at least 1, and 1 for unequal widths."""
    if np.ptp(dims) > 0:
        return 1.0
    x, y = (np.nan_to_num(side) for side in (sides.x, sides.y))
    found = [
        (x[i, g] @ y[j, g]) ** 2
        for g in range(x.shape[1])
        for i in sample
        for j in sample
        if i != j and x[i, g].any() and y[j, g].any()
    ]
    return max(1.0, float(dims[0] * np.mean(found))) if found else 1.0


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


def _of_one_size(blocks: Sequence[Int[np.ndarray, " _member"]]) -> list[list[int]]:
    """The numbers of the blocks, in lists of blocks of one size."""
    sizes: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        sizes.setdefault(block.size, []).append(number)
    return list(sizes.values())


@dataclass(frozen=True)
class _Collected:
    """One form's arrays while the layers are being gone through."""

    tables: Mapping[str, Float[np.ndarray, "query layer"]]
    pairs: Sequence[Float[np.ndarray, "layer _member _member"]]
    centred: Sequence[Float[np.ndarray, "layer _member _member"]]
    deviations: Mapping[str, Float[np.ndarray, " layer"]]

    @classmethod
    def empty(cls, n: int, layers: int, blocks: Sequence[Int[np.ndarray, " _member"]]) -> _Collected:
        squares = [[np.full((layers, block.size, block.size), np.nan) for block in blocks] for _ in range(2)]
        names = ("value", "shrinkage", "gaussian", "noise", "before", "rest", "cosines", "portion", "size")
        tables = {name: np.full((n, layers), np.nan) for name in names}
        deviations = {name: np.full(layers, np.nan) for name in ("whole", "specific", "crowding")}
        return cls(tables, squares[0], squares[1], deviations)

    def fill(self, index: int, layer: LayerVectors, random: Float[np.ndarray, "query group"]) -> None:
        self.tables["value"][:, index] = defined_mean(layer.cosines(), axis=1)
        self.tables["shrinkage"][:, index] = defined_mean(shrinkage(layer), axis=1)
        self.tables["gaussian"][:, index] = defined_mean(random, axis=1)
        if layer.form == "map":
            before = ratio(layer.x_z, layer.x_norm * long_enough(layer.z_norm, layer.z_norm))
            self.tables["before"][:, index] = defined_mean(before, axis=1)

    def fill_blocks(self, index: int, layer: LayerVectors, blocks: Sequence[Int[np.ndarray, " _member"]]) -> None:
        """Compare queries within blocks, those of one size together."""
        for numbers in _of_one_size(blocks):
            part = layer.take(np.stack([blocks[number] for number in numbers]))
            for number, pairs, rest in zip(numbers, pair_cosines(part), centred(part).pairs(), strict=True):
                self.pairs[number][index], self.centred[number][index] = pairs, rest

    def fill_rotated(
        self,
        index: int,
        layer: LayerVectors,
        blocks: Sequence[Int[np.ndarray, " _member"]],
        dims: Int[np.ndarray, " query"],
        sample: Int[np.ndarray, " member"],
        *,
        outputs: bool,
    ) -> None:
        """What is similar outside the span and beyond the block's mean, and how far chance alone carries it."""
        n, groups = layer.x_norm.shape
        tables = {name: np.full((n, groups), np.nan) for name in ("rest", "cosines", "portion", "size")}
        units_ = Sides(np.full(layer.x.shape, np.nan), np.full(layer.y.shape, np.nan))
        for block in blocks:
            for group in range(groups):
                (x, x_left, y, y_left), usable, fitted = beyond_mean_and_span(layer, block, group, outputs=outputs)
                count = int(usable.sum())
                for at, i in enumerate(block):
                    if not usable[at] or count < 2:
                        continue
                    whole, own = layer.x_norm[i, group] * layer.y_norm[i, group], norm(x[at]) * norm(y[at])
                    tables["rest"][i, group] = (
                        x[at] @ y[at] * count / (count - fitted) / whole if count > fitted else np.nan
                    )
                    tables["cosines"][i, group] = x[at] @ y[at] / own if x_left[at] and y_left[at] else 0.0
                    sizes = norm(x[at]) / layer.x_norm[i, group], norm(y[at]) / layer.y_norm[i, group]
                    tables["portion"][i, group] = min(1.0, sizes[0]) * min(1.0, sizes[1])
                    tables["size"][i, group] = tables["portion"][i, group] * whole / layer.z_norm[i, group] ** 2
                    units_.x[i, group] = x[at] / norm(x[at]) if x_left[at] else 0.0
                    units_.y[i, group] = y[at] / norm(y[at]) if y_left[at] else 0.0
        for name, table in tables.items():
            self.tables[name][:, index] = defined_mean(table, axis=1)
        for name, sides in {"whole": units(layer), "specific": units_}.items():
            self.deviations[name][index] = rotation_variance(sides, dims, sample) ** 0.5
        self.deviations["crowding"][index] = crowding(units_, dims, sample)


def record_floors(
    zsl: Float[np.ndarray, "query layer *rest"],
    icl: Float[np.ndarray, "query layer *rest"],
    ft: Float[np.ndarray, "query layer *rest"],
    forms: Sequence[Form],
    *,
    columns: Int[np.ndarray, " query"] | None = None,
    off: Sequence[Float[np.ndarray, "query layer d_model"]] = (),
    gold: Int[np.ndarray, " query"] | None = None,
    known: Float[np.ndarray, "number query"] | None = None,
    seed: int = 0,
    by_size: bool = False,
) -> Mapping[Form, RecordFloors]:
    """All floors of `h` (three axes) or `m` (four) for the given forms, one layer at a time.

    off   ICL's and FT's `off_span`, where they were recorded
    """
    n, layers, array = zsl.shape[0], zsl.shape[1], "m" if zsl.ndim == 4 else "h"
    dims = np.full(n, zsl.shape[-1]) if columns is None or array == "h" else columns
    blocks = [b for b in (map_blocks(dims, seed) if array == "m" else output_blocks(n, seed, gold)) if b.size > 1]
    sample = generator(seed, "rotated").permutation(n)[:_ROTATION_SAMPLE]
    collected: dict[Form, _Collected] = {form: _Collected.empty(n, layers, blocks) for form in forms}

    def fill(index: int) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # a diverged fine-tuning leaves infinities: they become NaN
            z, p, f, *outside = (layer_of(stack, index, columns) for stack in (zsl, icl, ft, *off))
            for form, into in collected.items():
                layer = replace(LayerVectors.of(form, z, p, f, outside), known=known)
                into.fill(index, layer, gaussian(layer, dims, generator(seed, f"gaussian/{array}/{form}/{index}")))
                if form == "normalised":
                    sizes = [ratio(norm(side - z), layer.z_norm)[:, 0] for side in (p, f)]
                    into.tables["noise"][:, index] = noise_floor(sizes[0], sizes[1])
                into.fill_blocks(index, layer, blocks)
                if form == "update":
                    into.fill_rotated(index, layer, blocks, dims, sample, outputs=array == "h")

    each_layer(fill, layers)
    span = "head_span" if off else "zsl_direction"
    return {form: _finish(into, blocks, seed, f"{array}/{form}", span, by_size) for form, into in collected.items()}


def _finish(
    into: _Collected, blocks: Sequence[Int[np.ndarray, " _member"]], seed: int, name: str, span: str, by_size: bool
) -> RecordFloors:
    value = into.tables["value"]
    others, specific = np.full_like(value, np.nan), np.full_like(value, np.nan)
    for block, pairs, rest in zip(blocks, into.pairs, into.centred, strict=True):
        own = np.eye(block.size, dtype=bool)
        others[block] = defined_mean(np.where(own, np.nan, pairs), axis=2).T
        specific[block] = np.diagonal(rest, axis1=1, axis2=2).T
    floors: dict[str, Floor] = {
        "gaussian": Floor(into.tables["gaussian"], value - into.tables["gaussian"]),
        "shuffled_query": Floor(others, value - others),
        "mean_direction": Floor(value - specific.clip(-1.0, 1.0), specific),
        span: Floor(into.tables["shrinkage"], value - into.tables["shrinkage"]),
    }
    for own_floor in ("noise", "before"):
        if not np.isnan(table := into.tables[own_floor]).all():
            floors[own_floor] = Floor(table, value - table)
    tests = {
        "shuffled_query": shuffle_test(into.pairs, seed=seed, name=f"shuffle/{name}"),
        "mean_direction": shuffle_test(into.centred, seed=seed, name=f"centred/{name}"),
    }
    whole, rest = (float(defined_mean(into.deviations[part], axis=0)) for part in ("whole", "specific"))
    if not whole > 0 or not rest > 0:
        return RecordFloors(value, floors, tests, None)
    floors["rotated"] = Floor(value - into.tables["rest"].clip(-1.0, 1.0), into.tables["cosines"])
    left, parts = overall_mean(into.tables["cosines"]), into.deviations
    sizes = [float(not np.isnan(each)) for each in parts["specific"]]
    shares = {"whole": [float(not np.isnan(each)) for each in parts["whole"]]}
    if by_size:
        sizes = [float(np.nanmean(column)) for column in into.tables["size"].T]
        cosines = [float(np.nanmean(column)) for column in into.tables["cosines"].T]
        rest = sum(w * d for w, d in zip(sizes, into.deviations["specific"], strict=True)) / sum(sizes)
        left = sum(w * c for w, c in zip(sizes, cosines, strict=True)) / sum(sizes)
    shares["specific"] = sizes

    def apart(name: str) -> float:
        each = zip(shares[name], np.nan_to_num(parts[name]), parts["crowding"], strict=True)
        return sum((w * d) ** 2 * c for w, d, c in each) ** 0.5 / sum(shares[name])

    whole, rest = max(whole, apart("whole")), max(rest, apart("specific"))
    return RecordFloors(value, floors, tests, Rotated(whole, rest, overall_mean(into.tables["portion"]), left))
