"""What one layer's similarities become when FT's updates are replaced, pooled, or turned, from inner products alone.

With z the ZSL vector, u ICL's update and w FT's, every form compares x = αu + βz with y = γw + δz:

    update       α = 1, β = 0               map   α = β = 1
    normalised   α = 1/‖z+u‖, β = α − 1/‖z‖

(γ and δ likewise for w). So the products of z, u and w of the queries of a block give everything, once: lengths,
cosines, other queries' updates, the mean direction, and what is left once the zero-shot direction is removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from dualview.metrics.arrays import as_type, library
from dualview.metrics.cosine import UNDEFINED_BELOW, Form, defined_mean, dot, long_enough, ratio, root

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
    whole = a.shape[-1] // step * step
    if whole <= step or library(a) is not np:
        return a @ b.swapaxes(-1, -2)
    parts = [side[..., :whole].reshape(*side.shape[:-1], -1, step).swapaxes(-2, -3) for side in (a, b)]
    total: np.ndarray = (parts[0] @ parts[1].swapaxes(-1, -2)).sum(axis=-3)
    return total if whole == a.shape[-1] else total + a[..., whole:] @ b[..., whole:].swapaxes(-1, -2)


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
    moved = root(z_norm**2 + 2 * z_b + b_norm**2)
    if form == "map":
        return ratio(x_z + x_b, x_norm * moved)
    towards_zsl = ratio(z_norm**2 + z_b, z_norm * moved)
    length = root(2 - 2 * towards_zsl)
    return ratio(ratio(x_z + x_b, moved) - ratio(x_z, z_norm), x_norm * long_enough(length, 0 * length + 1))


@dataclass(frozen=True)
class BlockVectors:
    """Some layers' vectors of blocks of equally many queries, in double precision."""

    z: Float[np.ndarray, "*layer block group member dim"]
    u: Float[np.ndarray, "*layer block group member dim"]
    w: Float[np.ndarray, "*layer block group member dim"]
    off: tuple[Float[np.ndarray, "*layer block group member dim"], ...] = ()
    """ICL's and FT's updates outside the heads' span, where they were recorded."""
    known: Float[np.ndarray, "block number member"] | None = None
    """What is known of each query (`floors.covariates`)."""


@dataclass(frozen=True)
class BlockProducts:
    """The inner products of `BlockVectors`: each query's own, and between the queries of a block."""

    zz: Float[np.ndarray, "*layer group member"]
    uu: Float[np.ndarray, "*layer group member"]
    ww: Float[np.ndarray, "*layer group member"]
    uz: Float[np.ndarray, "*layer group member"]
    wz: Float[np.ndarray, "*layer group member"]
    uw: Float[np.ndarray, "*layer group member"]
    off_uw: Float[np.ndarray, "*layer group member"] | None = None
    u_w: Float[np.ndarray, "*layer block group member member"] | None = None
    """u_i·w_j; None where queries are not compared with one another."""
    u_z: Float[np.ndarray, "*layer block group member member"] | None = None
    """u_i·z_j; None where no form needs z between queries. Likewise z_i·w_j and z_i·z_j."""
    z_w: Float[np.ndarray, "*layer block group member member"] | None = None
    z_z: Float[np.ndarray, "*layer block group member member"] | None = None

    @classmethod
    def of(cls, v: BlockVectors, *, with_z: bool) -> BlockProducts:
        own = BlockProducts(
            zz=dot(v.z, v.z),
            uu=dot(v.u, v.u),
            ww=dot(v.w, v.w),
            uz=dot(v.u, v.z),
            wz=dot(v.w, v.z),
            uw=dot(v.u, v.w),
            off_uw=dot(v.off[0], v.off[1]) if v.off else None,
            u_w=inner_products(v.u, v.w),
        )
        if not with_z:
            return own
        u_z, z_w, z_z = (inner_products(a, b) for a, b in ((v.u, v.z), (v.z, v.w), (v.z, v.z)))
        return replace(own, u_z=u_z, z_w=z_w, z_z=z_z)


@dataclass(frozen=True)
class Compared:
    """What one form compares of a chunk: x = αu + βz and y = γw + δz."""

    form: Form
    products: BlockProducts
    alpha: Float[np.ndarray, "*layer block group member"]
    beta: Float[np.ndarray, "*layer block group member"]
    gamma: Float[np.ndarray, "*layer block group member"]
    delta: Float[np.ndarray, "*layer block group member"]
    x_norm: Float[np.ndarray, "*layer block group member"]
    """‖x‖, NaN where it makes the cosine undefined; y_norm too."""
    y_norm: Float[np.ndarray, "*layer block group member"]

    @classmethod
    def of(cls, form: Form, p: BlockProducts) -> Compared:
        z_norm, one = root(p.zz), library(p.zz).ones_like(p.zz)
        if form == "normalised":
            scales = [ratio(one, root(p.zz + 2 * az + aa)) for az, aa in ((p.uz, p.uu), (p.wz, p.ww))]
            (alpha, beta), (gamma, delta) = ((scale, scale - ratio(one, z_norm)) for scale in scales)
        else:
            alpha = gamma = one
            beta = delta = one if form == "map" else 0 * one
        reference = one if form == "normalised" else z_norm
        x_norm, y_norm = (
            long_enough(root(a * a * aa + 2 * a * b * az + b * b * p.zz), reference)
            for a, b, aa, az in ((alpha, beta, p.uu, p.uz), (gamma, delta, p.ww, p.wz))
        )
        return cls(form, p, alpha, beta, gamma, delta, x_norm, y_norm)

    @cached_property
    def own(self) -> dict[str, Float[np.ndarray, "*layer block group member"]]:
        """Each query's own numbers, by name."""
        p = self.products
        x_z, y_z = self.alpha * p.uz + self.beta * p.zz, self.gamma * p.wz + self.delta * p.zz
        x_y = self.alpha * (self.gamma * p.uw + self.delta * p.uz) + self.beta * y_z
        lengths, z_norm = self.x_norm * self.y_norm, root(p.zz)
        # The part of the similarity owed to the heads' span; where it was not recorded, to the direction of zsl.
        shrunk = ratio(x_z * y_z, p.zz) if p.off_uw is None else x_y - self.alpha * self.gamma * p.off_uw
        found = {"value": ratio(x_y, lengths), "shrinkage": ratio(shrunk, lengths)}
        b_norm = self.y_norm if self.form == "update" else root(p.ww)
        if self.form == "normalised":  # relative update norms, for the noise floor
            found |= {name: ratio(root(side), z_norm) for name, side in (("x_size", p.uu), ("y_size", p.ww))}
        return {**found, "x_z": x_z, "x_norm": self.x_norm, "z_norm": z_norm, "b_norm": b_norm}

    def other_queries(self) -> Float[np.ndarray, "*layer block member member"]:
        """cos between query i's ICL and query j's FT update applied to i, averaged over heads; NaN where undefined."""
        p, own = self.products, self.own
        assert p.u_w is not None
        z_b = p.u_w if p.z_w is None else p.z_w
        cosines = cosine_with_update(
            self.form,
            x_b=p.u_w if self.form == "update" else self.alpha[..., None] * p.u_w + self.beta[..., None] * z_b,
            z_b=z_b,  # not looked at for updates
            b_norm=own["b_norm"][..., None, :],
            **{name: own[name][..., None] for name in ("x_z", "x_norm", "z_norm")},
        )
        return defined_mean(cosines, axis=-3)

    def pairs(self) -> Float[np.ndarray, "*layer block group member member"]:
        """x_i·y_j."""
        p, a, b, c, d = self.products, *(side[..., None] for side in (self.alpha, self.beta)), self.gamma, self.delta
        assert p.u_w is not None
        found = a * c[..., None, :] * p.u_w
        if p.u_z is None or p.z_w is None or p.z_z is None:
            return found
        c, d = c[..., None, :], d[..., None, :]
        return found + a * d * p.u_z + b * c * p.z_w + b * d * p.z_z

    @cached_property
    def usable(self) -> Bool[np.ndarray, "*layer block group member"]:
        isfinite = library(self.x_norm).isfinite
        return isfinite(self.x_norm) & isfinite(self.y_norm)

    def beyond_mean(
        self, pairs: Float[np.ndarray, "*layer block group member member"]
    ) -> Float[np.ndarray, "*layer block group member member"]:
        """(x_i − x̄)·(y_j − ȳ) n/(n−1) over ‖x_i‖ ‖y_j‖, from the x_i·y_j: what is beyond the mean vectors of a block.

        The factor makes the products of a query's own two sides an unbiased covariance.
        """
        xp, usable = library(pairs), self.usable
        count = as_type(usable.sum(axis=-1), "float64")[..., None, None]
        rows, columns = usable[..., :, None], usable[..., None, :]
        of_y, of_x = (
            ratio(xp.where(which, pairs, 0.0).sum(axis=axis, keepdims=True), count)
            for which, axis in ((rows, -2), (columns, -1))
        )
        of_both = ratio(xp.where(columns, of_y, 0.0).sum(axis=-1, keepdims=True), count)
        centred = pairs - of_y - of_x + of_both
        lengths = self.x_norm[..., :, None] * self.y_norm[..., None, :]
        return ratio(centred * ratio(count, count - 1), lengths)


def short(
    squared: Float[np.ndarray, "*layer block group member"], whole: Float[np.ndarray, "*layer block group member"]
) -> Bool[np.ndarray, "*layer block group member"]:
    """Where what is left of a vector is rounding against the whole, and counts as 0."""
    return root(squared) < UNDEFINED_BELOW * whole


def random_directions(
    dims: Int[np.ndarray, " query"], groups: int, rng: np.random.Generator
) -> Float[np.ndarray, "3 draw query group"]:
    """Of random directions in `dims` dimensions: t₁, t₂ and χ², see `gaussian`."""
    shape, free = (_GAUSSIAN_DRAWS, dims.size, groups), dims[:, None] - 2
    along, across = rng.standard_normal(shape), rng.standard_normal(shape) * (free >= 0)
    return np.stack([along, across, np.where(free > 0, rng.chisquare(np.maximum(free, 1), shape), 0.0)])


def gaussian(
    form: Form,
    own: dict[str, Float[np.ndarray, "layer query group"]],
    drawn: Float[np.ndarray, "3 draw layer query group"],
) -> Float[np.ndarray, "layer query group"]:
    """The mean cosine with random updates of FT's norm.

    Of a uniformly random direction only its components along z and along the rest of x matter; they are t₁ and t₂ over
    √(t₁² + t₂² + χ²), so nothing d-dimensional is drawn.
    """
    x_z, x_norm, z_norm, b_norm = (own[name] for name in ("x_z", "x_norm", "z_norm", "b_norm"))
    along, across, rest = drawn
    scale = b_norm / root(along**2 + across**2 + rest)
    x_along = library(x_z).nan_to_num(ratio(x_z, z_norm))
    x_across = root(x_norm**2 - x_along**2)
    cosines = cosine_with_update(
        form,
        x_b=scale * (x_along * along + x_across * across),
        z_b=scale * z_norm * along,
        b_norm=b_norm,
        x_z=x_z,
        x_norm=x_norm,
        z_norm=z_norm,
    )
    return defined_mean(cosines, axis=0)
