"""One layer's updates, and what its similarities become when FT's updates are replaced, pooled, or turned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dualview.metrics.vectors import (
    Form,
    compared,
    cosine,
    defined_mean,
    dot,
    long_enough,
    norm,
    ratio,
    reference_norm,
)

_GAUSSIAN_DRAWS = 4


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
    """One layer's vectors for one form: z, ICL's and FT's compared vectors x and y, and FT's update b."""

    form: Form
    z: Float[np.ndarray, "query group dim"]
    x: Float[np.ndarray, "query group dim"]
    y: Float[np.ndarray, "query group dim"]
    b: Float[np.ndarray, "query group dim"]

    @classmethod
    def of(cls, form: Form, z: np.ndarray, icl: np.ndarray, ft: np.ndarray) -> LayerVectors:
        y = compared(form, z, ft)
        return cls(form, z, compared(form, z, icl), y, y if form == "update" else compared("update", z, ft))

    def take(self, block: Int[np.ndarray, " member"]) -> LayerVectors:
        y = self.y[block]
        return LayerVectors(self.form, self.z[block], self.x[block], y, y if self.b is self.y else self.b[block])

    @property
    def reference(self) -> Float[np.ndarray, "query group"]:
        return reference_norm(self.form, self.z)

    def cosines(self) -> Float[np.ndarray, "query group"]:
        return cosine(self.x, self.y, self.reference)

    def lengths(self, side: Float[np.ndarray, "query group dim"]) -> Float[np.ndarray, "query group"]:
        """‖x‖ or ‖y‖, NaN where it makes the cosine undefined."""
        return long_enough(norm(side), self.reference)

    def update_norm(self) -> Float[np.ndarray, "query group"]:
        """‖b‖, NaN where too short to have a direction, if direction is all that counts."""
        length = norm(self.b)
        return long_enough(length, norm(self.z)) if self.form == "update" else length


def zsl_direction(layer: LayerVectors) -> Float[np.ndarray, "query group"]:
    """(x·z)(y·z) / (‖z‖² ‖x‖ ‖y‖): the similarity the components along zsl give by themselves."""
    along = ratio(dot(layer.x, layer.z) * dot(layer.y, layer.z), norm(layer.z) ** 2)
    return ratio(along, layer.lengths(layer.x) * layer.lengths(layer.y))


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
    scale = norm(layer.b) / np.sqrt(along**2 + beside**2 + rest)
    z_norm = norm(layer.z)
    x_z = dot(layer.x, layer.z)
    x_along = np.nan_to_num(ratio(x_z, z_norm))
    x_beside = np.sqrt(np.maximum(dot(layer.x, layer.x) - x_along**2, 0.0))
    cosines = cosine_with_update(
        layer.form,
        x_b=scale * (x_along * along + x_beside * beside),
        z_b=scale * z_norm * along,
        b_norm=layer.update_norm(),
        x_z=x_z,
        x_norm=layer.lengths(layer.x),
        z_norm=z_norm,
    )
    return defined_mean(cosines, axis=0)


def pair_cosines(layer: LayerVectors) -> Float[np.ndarray, "member member"]:
    """cos between query i's ICL and query j's FT update applied to i, averaged over heads; NaN where undefined."""
    z, x, b = (np.moveaxis(side, 0, 1) for side in (layer.z, layer.x, layer.b))
    b_columns = np.swapaxes(b, 1, 2)
    cosines = cosine_with_update(
        layer.form,
        x_b=x @ b_columns,
        z_b=np.zeros(1) if layer.form == "update" else z @ b_columns,
        b_norm=layer.update_norm().T[:, None, :],
        x_z=dot(layer.x, layer.z).T[:, :, None],
        x_norm=layer.lengths(layer.x).T[:, :, None],
        z_norm=norm(layer.z).T[:, :, None],
    )
    return defined_mean(cosines, axis=0)


@dataclass(frozen=True)
class Sides:
    """ICL's and FT's vectors, scaled so that their inner products are cosines or parts of them."""

    x: Float[np.ndarray, "query group dim"]
    y: Float[np.ndarray, "query group dim"]

    def pairs(self) -> Float[np.ndarray, "query query"]:
        """x_i·y_j, averaged over the heads where it is defined."""
        return defined_mean(np.moveaxis(self.x, 0, 1) @ np.moveaxis(self.y, 0, 2), axis=0)


def units(layer: LayerVectors) -> Sides:
    """x/‖x‖ and y/‖y‖; NaN where undefined."""
    sides = [ratio(side, layer.lengths(side)[..., None]) for side in (layer.x, layer.y)]
    return Sides(sides[0], sides[1])


def centred(layer: LayerVectors) -> Sides:
    """(x − x̄)/‖x‖ and (y − ȳ)/‖y‖, each times √(n/(n−1)): what each query has beyond the mean vectors of its block.

    The factor makes the products of a query's own two sides an unbiased covariance. NaN where undefined.
    """
    usable = np.isfinite(norm(layer.x)) & np.isfinite(norm(layer.y))
    count: np.ndarray = usable.sum(axis=0).astype(np.float64)
    factor = np.sqrt(ratio(count, count - 1))[:, None]
    sides: list[np.ndarray] = []
    for side in (layer.x, layer.y):
        total: np.ndarray = np.where(usable[..., None], side, 0.0).sum(axis=0)
        rest = (side - ratio(total, count[:, None])) * factor
        sides.append(ratio(rest, layer.lengths(side)[..., None]))
    return Sides(sides[0], sides[1])


def rotation_variance(
    sides: Sides, dims: Int[np.ndarray, " query"], sample: Int[np.ndarray, " member"]
) -> Float[np.ndarray, " group"]:
    """The variance of each head's mean x_i·y_i over random rotations Q of all the y together.

    mean x_i·Q y_i = ⟨Q, C⟩ with C the mean of x_i y_iᵀ, and for a uniformly random Q in d dimensions this has mean 0
    and variance ‖C‖²/d, which is the mean over all pairs of (x_i·x_j)(y_i·y_j)/d. Pairs of different queries are taken
    from a sample. Maps of different lengths are laid side by side from the first column, then from the last, and the
    larger variance counts.
    """
    defined = np.isfinite(norm(sides.x)) & np.isfinite(norm(sides.y))
    own: np.ndarray = norm(sides.x) ** 2 * norm(sides.y) ** 2 / dims[:, None]
    n, kept = (np.maximum(mask.sum(axis=0), 1).astype(np.float64) for mask in (defined, defined[sample]))
    filled = [np.moveaxis(np.where(defined[..., None], side, 0.0)[sample], 0, 1) for side in (sides.x, sides.y)]
    weight = ratio(1 - np.eye(sample.size), np.sqrt(np.outer(dims[sample], dims[sample])))
    between = np.zeros_like(n)
    for laid in (filled, [_from_the_end(side, dims[sample]) for side in filled]):
        grams = [side @ np.swapaxes(side, 1, 2) for side in laid]
        pairs: np.ndarray = (grams[0] * grams[1] * weight).sum(axis=(1, 2))
        between = np.fmax(between, ratio(pairs, kept * (kept - 1)))
    return (defined_mean(np.where(defined, own, np.nan), axis=0) + (n - 1) * between) / n


def _from_the_end(
    unit: Float[np.ndarray, "group member dim"], dims: Int[np.ndarray, " member"]
) -> Float[np.ndarray, "group member dim"]:
    """Each vector's `dims` entries moved to the end of its row."""
    source = np.arange(int(unit.shape[2])) - (unit.shape[2] - dims[:, None])
    return np.where(source >= 0, np.take_along_axis(unit, np.maximum(source, 0)[None], axis=2), 0.0)
