"""One layer's updates, and what its similarities become when FT's updates are replaced, pooled, or turned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from dualview.metrics.cosine import Form, compared, defined_mean, dot, long_enough, norm, ratio, reference_norm

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

    @classmethod
    def of(cls, form: Form, z: np.ndarray, icl: np.ndarray, ft: np.ndarray) -> LayerVectors:
        x, y = compared(form, z, icl), compared(form, z, ft)
        b = y if form == "update" else compared("update", z, ft)
        z_norm, reference = norm(z), reference_norm(form, z)
        x_norm, y_norm = long_enough(norm(x), reference), long_enough(norm(y), reference)
        return cls(form, z, x, y, b, z_norm, x_norm, y_norm, y_norm if form == "update" else norm(b), dot(x, z))

    def take(self, block: Int[np.ndarray, "*block member"]) -> LayerVectors:
        z, x, y, z_norm, x_norm, y_norm, b_norm, x_z = (
            side[block]
            for side in (self.z, self.x, self.y, self.z_norm, self.x_norm, self.y_norm, self.b_norm, self.x_z)
        )
        b = y if self.b is self.y else self.b[block]
        return LayerVectors(self.form, z, x, y, b, z_norm, x_norm, y_norm, b_norm, x_z)

    def cosines(self) -> Float[np.ndarray, "query group"]:
        return ratio(dot(self.x, self.y), self.x_norm * self.y_norm)


def zsl_direction(layer: LayerVectors) -> Float[np.ndarray, "query group"]:
    """(x·z)(y·z) / (‖z‖² ‖x‖ ‖y‖): the similarity the components along zsl give by themselves."""
    return ratio(layer.x_z * dot(layer.y, layer.z), layer.z_norm**2 * layer.x_norm * layer.y_norm)


def gaussian(
    layer: LayerVectors, dims: Int[np.ndarray, " query"], rng: np.random.Generator
) -> Float[np.ndarray, "query group"]:
    """The mean cosine with random updates of FT's norm.

    Of a uniformly random direction in `dims` dimensions only its components along z and along x's part orthogonal to z
    matter; they are t₁ and t₂ over √(t₁² + t₂² + χ²), so nothing d-dimensional is drawn.
    """
    shape, free = (_GAUSSIAN_DRAWS, *layer.z.shape[:2]), dims[:, None] - 2
    along, across = rng.standard_normal(shape), rng.standard_normal(shape) * (free >= 0)
    rest = np.where(free > 0, rng.chisquare(np.maximum(free, 1), shape), 0.0)
    scale = layer.b_norm / np.sqrt(along**2 + across**2 + rest)
    x_along = np.nan_to_num(ratio(layer.x_z, layer.z_norm))
    x_across = np.sqrt(np.maximum(layer.x_norm**2 - x_along**2, 0.0))
    cosines = cosine_with_update(
        layer.form,
        x_b=scale * (x_along * along + x_across * across),
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


def orthogonal_to_zsl(layer: LayerVectors) -> LayerVectors:
    """x and y less their components along zsl; their lengths stay those of the whole, so that shares stay shares."""
    away = ratio(layer.z, layer.z_norm[..., None])
    x, y = (side - np.nan_to_num(dot(side, away)[..., None] * away) for side in (layer.x, layer.y))
    return replace(layer, x=x, y=y)


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
