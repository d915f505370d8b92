"""Cosines with the rule for undefined values, and the averages that every similarity shares.

Arrays come as [query, group, dim] for one layer: the group is the head for attention maps and a single 1 for
attention outputs. All arithmetic is float64, whatever the records were stored in; one layer at a time keeps memory low.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float, Int

from dualview.metrics.arrays import NUMPY, Backend, as_type, library
from dualview.records.setting import is_away, to_host

T = TypeVar("T")

UNDEFINED_BELOW = 1e-4
"""A cosine is undefined (rounding) if one of its vectors is shorter than this fraction of the ZSL vector."""

Form = Literal["update", "normalised", "map"]
"""What is compared: `update` s − zsl; `normalised` s/‖s‖ − zsl/‖zsl‖; `map` s itself."""


def dot(a: Float[np.ndarray, "*batch dim"], b: Float[np.ndarray, "*batch dim"]) -> Float[np.ndarray, "*batch"]:
    return np.einsum("...d,...d->...", a, b) if library(a) is np else (a * b).sum(-1)


def norm(a: Float[np.ndarray, "*batch dim"]) -> Float[np.ndarray, "*batch"]:
    return root(dot(a, a))


def root(squared: Float[np.ndarray, "*_shape"]) -> Float[np.ndarray, "*_shape"]:
    """The square root, 0 of what rounding has made negative."""
    return library(squared).sqrt(squared.clip(0.0))


def ratio(a: Float[np.ndarray, "*_shape"], b: Float[np.ndarray, "*_shape"]) -> Float[np.ndarray, "*_shape"]:
    """a / b, NaN where b is 0 or anything is not finite; never a warning."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = a / b
    if library(quotient) is np:
        return np.where(np.isfinite(quotient), quotient, float("nan"))
    given: Any = quotient
    return given.nan_to_num(*[float("nan")] * 3)  # one step instead of six: each costs a device time to begin


def each_layer(work: Callable[[int], T], layers: int, at: Backend = NUMPY) -> list[T]:
    """`work` on every layer, on several threads."""
    return at.each(work, range(layers))


def place_of(*stacks: Float[np.ndarray, "query layer d_model"]) -> Backend:
    """Where to compute with these: on the device of those that are tensors, if any is."""
    away: list[Any] = [stack for stack in stacks if is_away(stack)]
    return Backend(away[0].device) if away else NUMPY


def outputs_of(
    stack: Float[np.ndarray, "query layer d_model"], layer: int, at: Backend
) -> Float[np.ndarray, "query d_model"]:
    """One layer of `h` in double precision, there."""
    return layer_of(stack, layer)[:, 0] if at.device is None else as_type(at.put(stack[:, layer]), "float64")


def layer_of(
    array: Float[np.ndarray, "query layer *rest"], layer: int, columns: Int[np.ndarray, " query"] | None = None
) -> Float[np.ndarray, "query group dim"]:
    """One layer of `h` (group 1) or `m` (group = heads, zero beyond each query's columns) as numpy's float64."""
    values: np.ndarray = to_host(array[:, layer]).astype(np.float64)
    if values.ndim == 2:
        return values[:, None, :]
    if columns is not None:
        beyond: np.ndarray = np.arange(int(values.shape[-1])) >= columns.reshape(-1, 1, 1)
        np.copyto(values, 0.0, where=beyond)
    return values


def compared(
    form: Form, zsl: Float[np.ndarray, "*batch dim"], setting: Float[np.ndarray, "*batch dim"]
) -> Float[np.ndarray, "*batch dim"]:
    """The vector of one setting that enters the cosine."""
    with np.errstate(invalid="ignore", over="ignore"):
        if form == "map":
            return setting
        if form == "update":
            return setting - zsl
        sides = [side * ratio(np.ones(()), norm(side))[..., None] for side in (setting, zsl)]
        return sides[0] - sides[1]


def reference_norm(form: Form, zsl: Float[np.ndarray, "*batch dim"]) -> Float[np.ndarray, "*batch"]:
    """The norm of the ZSL vector in the same units: 1 once outputs are normalised."""
    return np.ones(zsl.shape[:-1]) if form == "normalised" else norm(zsl)


def long_enough(
    length: Float[np.ndarray, "*batch"], reference: Float[np.ndarray, "*batch"]
) -> Float[np.ndarray, "*batch"]:
    """The length itself, NaN where it is below `UNDEFINED_BELOW` of the reference, zero or not finite."""
    xp = library(length)
    with np.errstate(invalid="ignore", over="ignore"):
        defined = xp.isfinite(length) & (length >= UNDEFINED_BELOW * reference) & (length > 0)
    return xp.where(defined, length, float("nan"))


def cosine(
    a: Float[np.ndarray, "*batch dim"], b: Float[np.ndarray, "*batch dim"], reference: Float[np.ndarray, "*batch"]
) -> Float[np.ndarray, "*batch"]:
    """cos(a, b), NaN where undefined: 1 the same direction, 0 orthogonal, −1 opposite."""
    with np.errstate(invalid="ignore", over="ignore"):
        return ratio(dot(a, b), long_enough(norm(a), reference) * long_enough(norm(b), reference))


def similarity(
    form: Form,
    zsl: Float[np.ndarray, "query group dim"],
    icl: Float[np.ndarray, "query group dim"],
    ft: Float[np.ndarray, "query group dim"],
) -> Float[np.ndarray, "query group"]:
    """cos of what ICL and FT did to each query, for one layer; NaN where undefined."""
    return cosine(compared(form, zsl, icl), compared(form, zsl, ft), reference_norm(form, zsl))


def defined_mean(values: Float[np.ndarray, "*_shape"], axis: int) -> Float[np.ndarray, "*_shape"]:
    """The mean over one axis of what is defined (not NaN); NaN where nothing is."""
    xp = library(values)
    defined = ~xp.isnan(values)
    return ratio(xp.where(defined, values, 0.0).sum(axis=axis), as_type(defined.sum(axis=axis), "float64"))


def similarity_table(
    form: Form,
    zsl: Float[np.ndarray, "query layer *rest"],
    icl: Float[np.ndarray, "query layer *rest"],
    ft: Float[np.ndarray, "query layer *rest"],
    columns: Int[np.ndarray, " query"] | None = None,
) -> Float[np.ndarray, "query layer"]:
    """`similarity` of every layer of `h` or `m`, averaged over the heads that are defined."""

    def of_layer(layer: int) -> np.ndarray:
        return defined_mean(similarity(form, *(layer_of(array, layer, columns) for array in (zsl, icl, ft))), axis=1)

    return np.stack(each_layer(of_layer, zsl.shape[1]), axis=1)


def layer_means(values: Float[np.ndarray, "query layer"]) -> Float[np.ndarray, " layer"]:
    """Per-layer values: means over queries."""
    return defined_mean(values, axis=0)


def overall_mean(values: Float[np.ndarray, "query layer"]) -> float:
    """Queries first, then layers; a layer without any defined value is left out. NaN when nothing is defined."""
    return float(defined_mean(layer_means(values), axis=0))
