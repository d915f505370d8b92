"""What a similarity would be if ICL and FT were unrelated, computed from the records alone.

Floors, each with the per-query excess of the similarity over it:

- `gaussian`: FT's update replaced by a random one of the same norm.
- `shuffled_query`: FT's update replaced by its update of another query. Tells what is common to all queries from what
  is the query's own, and gives an exact permutation test.
- `mean_direction`: the part of the similarity owed to the mean update over queries; the excess is what is left once
  the mean direction is removed from both sides.
- `rotated` (for updates): what FT does to each query beyond its mean update and beside the ZSL direction, turned as a
  whole in a random way. This keeps every relation between queries, and so separates similarity from the chance
  alignment of directions that many queries share in part, which no number of queries averages away. Its excess is the
  similarity once mean and ZSL direction are both gone: either of them would carry the other past its own test.
- `noise` (for normalised outputs): the analytic noise floor of each query and layer.
- `before` (for maps): the similarity of ICL's map to the map before fine-tuning.
- `zsl_direction`: the part owed to the direction of the ZSL vector. Both updates start there, so two settings that
  merely shrink it (as any attention to demonstrations does: attention = λ·demonstrations + (1−λ)·query) agree.

`shuffled_query` and `mean_direction` compare queries with one another, in blocks. Attention maps of different queries
have different numbers of columns, and no way of cutting or shifting them keeps every common pattern (the template's
first words, its last) in place; so a map is only ever compared with maps of as many columns. A query that is alone
with its number of columns has no such floor and is left out of these two tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dualview.metrics._scipy import normal_quantile
from dualview.metrics.cosine import Form, defined_mean, dot, each_layer, layer_of, long_enough, norm, ratio
from dualview.metrics.label_contrast import FLIPPED
from dualview.metrics.null_updates import (
    LayerVectors,
    Sides,
    beside_zsl,
    centred,
    gaussian,
    pair_cosines,
    rotation_variance,
    units,
    zsl_direction,
)
from dualview.metrics.sim_aou import noise_floor
from dualview.metrics.statistics import generator
from dualview.records import Records

OUTPUT_BLOCK = 64
MAP_BLOCK = 16
_PERMUTATIONS = 999
_ROTATION_SAMPLE = 64
_LEAST_ORDERS = 100


@dataclass(frozen=True)
class Floor:
    """One floor, per query and layer, and the similarity's excess over it on the same footing."""

    per_query: Float[np.ndarray, "query layer"]
    excess: Float[np.ndarray, "query layer"]


@dataclass(frozen=True)
class ShuffleTest:
    """Permutation p-values of a similarity against pairing each query with another one's update."""

    p: float | None
    p_per_layer: Float[np.ndarray, " layer"]
    spread: float = 0.0
    """The standard deviation of the mean similarity over permutations."""


@dataclass(frozen=True)
class Rotated:
    """Standard deviations over random rotations of FT's updates, about a mean of 0.

    Each layer has its own; that of their mean is taken to be the mean of theirs, the most it can be. Layers that write
    into one residual stream may be aligned by the same chance.
    """

    whole: float
    """Of the similarity itself."""
    specific: float
    """Of what is left of it beyond the mean updates and beside the ZSL direction."""


@dataclass(frozen=True)
class RecordFloors:
    """One similarity and its floors, as far as they need nothing but the records."""

    value: Float[np.ndarray, "query layer"]
    floors: Mapping[str, Floor]
    tests: Mapping[str, ShuffleTest]
    """Exact permutation tests, for the floors that have one."""
    rotated: Rotated | None
    """For updates only."""

    @property
    def detectable(self) -> float | None:
        """The smallest similarity beyond its floors that is found at p < .01 with a probability of 80 %."""
        spreads = [test.spread for test in self.tests.values() if test.p is not None]
        spreads += [] if self.rotated is None else [self.rotated.specific]
        return (normal_quantile(0.99) + normal_quantile(0.8)) * max(spreads) if spreads else None


def output_blocks(n_queries: int, seed: int) -> list[Int[np.ndarray, " _member"]]:
    """Random blocks of at most `OUTPUT_BLOCK` queries: permuting within blocks is as exact, and n² pairs cheaper."""
    order = generator(seed, "blocks/h").permutation(n_queries)
    return _split(order, OUTPUT_BLOCK)


def map_blocks(columns: Int[np.ndarray, " query"], seed: int) -> list[Int[np.ndarray, " _member"]]:
    """Random blocks of at most `MAP_BLOCK` queries that have the same number of columns."""
    order = generator(seed, "blocks/m").permutation(columns.shape[0])
    same = [order[columns[order] == count] for count in np.unique(columns)]
    return [block for group in same for block in _split(group, MAP_BLOCK)]


def _of_one_size(blocks: Sequence[Int[np.ndarray, " _member"]]) -> list[list[int]]:
    """The numbers of the blocks, in lists of blocks of one size."""
    sizes: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        sizes.setdefault(block.size, []).append(number)
    return list(sizes.values())


def _split(order: Int[np.ndarray, " query"], largest: int) -> list[Int[np.ndarray, " _member"]]:
    return np.array_split(order, -(-order.size // largest))


def shuffle_test(pairs: Sequence[Float[np.ndarray, "layer _member _member"]], *, seed: int, name: str) -> ShuffleTest:
    """Exact one-sided permutation test: is FT's update of the same query more similar than that of any other?

    `pairs[block][l, i, j]` is the similarity of query i with j's update. Under the null the updates of a block are
    exchangeable among its queries; 999 random permutations within blocks. The statistic is the mean over layers;
    undefined pairs count 0, weighted so that no permutation changes a layer's weight.
    """
    layers = int(pairs[0].shape[0]) if pairs else 0
    expected = np.zeros(layers)
    for block in pairs:
        expected += (~np.isnan(block)).sum(axis=(1, 2)) / block.shape[1]
    orders = sum(math.lgamma(int(block.shape[1]) + 1) for block in pairs)
    if not expected.any() or orders < math.log(_LEAST_ORDERS):  # so few orders cannot give a small p
        return ShuffleTest(None, np.full(layers, np.nan))
    weight = np.where(expected > 0, 1.0 / np.maximum(expected, 1e-300), 0.0)
    observed, shuffled = np.zeros(layers), np.zeros((layers, _PERMUTATIONS))
    rng = generator(seed, name)
    for block in pairs:
        values, member = np.nan_to_num(block) * weight[:, None, None], np.arange(int(block.shape[1]))
        observed += np.trace(values, axis1=1, axis2=2)
        orders = rng.permuted(np.broadcast_to(member, (_PERMUTATIONS, member.size)), axis=1)
        flat = values.reshape(layers, -1)
        shuffled += np.take(flat, member * member.size + orders, axis=1).sum(axis=2)
    slack = 1e-12 * np.abs(observed).sum()
    per_layer = (1 + (shuffled >= observed[:, None] - slack).sum(axis=1)) / (_PERMUTATIONS + 1)
    overall = (1 + int((shuffled.sum(axis=0) >= observed.sum() - slack).sum())) / (_PERMUTATIONS + 1)
    spread = float(shuffled.sum(axis=0).std()) / int((expected > 0).sum())
    return ShuffleTest(overall, np.where(expected > 0, per_layer, np.nan), spread)


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
        tables = {
            name: np.full((n, layers), np.nan)
            for name in ("value", "zsl_direction", "gaussian", "noise", "before", "beside")
        }
        return cls(tables, squares[0], squares[1], {name: np.full(layers, np.nan) for name in ("whole", "specific")})

    def fill(self, index: int, layer: LayerVectors, random: Float[np.ndarray, "query group"]) -> None:
        self.tables["value"][:, index] = defined_mean(layer.cosines(), axis=1)
        self.tables["zsl_direction"][:, index] = defined_mean(zsl_direction(layer), axis=1)
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
    ) -> None:
        """What is alike beside the ZSL direction and beyond the block's mean, and how far chance alone carries it."""
        rest, away = Sides(np.full(layer.x.shape, np.nan), np.full(layer.y.shape, np.nan)), beside_zsl(layer)
        for numbers in _of_one_size(blocks):
            several = np.stack([blocks[number] for number in numbers])
            sides = centred(away.take(several))
            rest.x[several], rest.y[several] = sides.x, sides.y
        self.tables["beside"][:, index] = defined_mean(dot(rest.x, rest.y), axis=1)
        for name, sides in {"whole": units(layer), "specific": rest}.items():
            self.deviations[name][index] = rotation_variance(sides, dims, sample) ** 0.5


def record_floors(
    zsl: Float[np.ndarray, "query layer *rest"],
    icl: Float[np.ndarray, "query layer *rest"],
    ft: Float[np.ndarray, "query layer *rest"],
    forms: Sequence[Form],
    *,
    columns: Int[np.ndarray, " query"] | None = None,
    seed: int = 0,
) -> Mapping[Form, RecordFloors]:
    """All floors of `h` (three axes) or `m` (four) for the given forms, one layer at a time."""
    n, layers, array = zsl.shape[0], zsl.shape[1], "m" if zsl.ndim == 4 else "h"
    dims = np.full(n, zsl.shape[-1]) if columns is None or array == "h" else columns
    blocks = [b for b in (map_blocks(dims, seed) if array == "m" else output_blocks(n, seed)) if b.size > 1]
    sample = generator(seed, "rotated").permutation(n)[:_ROTATION_SAMPLE]
    collected: dict[Form, _Collected] = {form: _Collected.empty(n, layers, blocks) for form in forms}

    def fill(index: int) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # a diverged fine-tuning leaves infinities: they become NaN
            z, p, f = (layer_of(stack, index, columns) for stack in (zsl, icl, ft))
            for form, into in collected.items():
                layer = LayerVectors.of(form, z, p, f)
                into.fill(index, layer, gaussian(layer, dims, generator(seed, f"gaussian/{array}/{form}/{index}")))
                if form == "normalised":
                    sizes = [ratio(norm(side - z), layer.z_norm)[:, 0] for side in (p, f)]
                    into.tables["noise"][:, index] = noise_floor(sizes[0], sizes[1])
                into.fill_blocks(index, layer, blocks)
                if form == "update":
                    into.fill_rotated(index, layer, blocks, dims, sample)

    each_layer(fill, layers)
    return {form: _finish(into, blocks, seed, f"{array}/{form}") for form, into in collected.items()}


def contrast_floors(records: Records, *, seed: int = 0) -> RecordFloors | None:
    """The label contrast with its floors (another query, the mean direction, rotations); None if it was not recorded.

    The floors are those of an update: each contrast is laid on h_zsl, as if it were what a setting adds to it.
    """
    if any(name not in records.settings for name in FLIPPED.values()):
        return None
    zsl = records["zsl"].h
    sides = [(records[name].h, records[flipped].h) for name, flipped in FLIPPED.items()]
    if zsl is None or any(true is None or flipped is None for true, flipped in sides):
        return None
    icl, ft = (zsl + (true - flipped) for true, flipped in sides if true is not None and flipped is not None)
    return record_floors(zsl, icl, ft, ["update"], seed=seed)["update"]


def _finish(into: _Collected, blocks: Sequence[Int[np.ndarray, " _member"]], seed: int, name: str) -> RecordFloors:
    value = into.tables["value"]
    others, specific = np.full_like(value, np.nan), np.full_like(value, np.nan)
    for block, pairs, rest in zip(blocks, into.pairs, into.centred, strict=True):
        own = np.eye(block.size, dtype=bool)
        others[block] = defined_mean(np.where(own, np.nan, pairs), axis=2).T
        specific[block] = np.diagonal(rest, axis1=1, axis2=2).T
    floors: dict[str, Floor] = {
        "gaussian": Floor(into.tables["gaussian"], value - into.tables["gaussian"]),
        "shuffled_query": Floor(others, value - others),
        "mean_direction": Floor(value - specific, specific),
        "zsl_direction": Floor(into.tables["zsl_direction"], value - into.tables["zsl_direction"]),
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
    beside = into.tables["beside"]
    floors["rotated"] = Floor(value - beside, beside)
    return RecordFloors(value, floors, tests, Rotated(whole, rest))
