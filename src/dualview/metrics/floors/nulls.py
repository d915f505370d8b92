"""What a similarity would be if ICL and FT were unrelated, computed from the records alone.

Floors, each with the per-query excess of the similarity over it:

- `gaussian`: FT's update replaced by a random one of the same norm.
- `shuffled_query`: FT's update replaced by its update of another query. Tells what is common to all queries from what
  is the query's own, and gives an exact permutation test. Outputs are compared with those of the same class: whoever
  learns the task writes the class's answer, and queries are exchangeable within a class alone, as in `agreement`.
- `mean_direction`: the part of the similarity owed to the mean update over those queries; the excess is what is left
  once the mean direction is removed from both sides.
- `rotated` (for updates): what FT does to each query beyond the direction that those queries share, or have more or
  less of by their covariates (`floors.covariates`), and outside the heads' span, turned as a whole at random. This
  keeps every relation between queries, and so separates similarity from the chance alignment of directions that many
  queries share in part, which no number of queries averages away. Its excess is the similarity once what is shared and
  the span are both gone: either would carry the other past its test.
- `noise` (for normalised outputs): the analytic noise floor of each query and layer.
- `before` (for maps): the similarity of ICL's map to the map before fine-tuning.
- `head_span` (for outputs): the part owed to the span of the heads' own zero-shot outputs O_h y_h and to what queries
  share, as in `rotated`. Attention to demonstrations takes mass from each head's own output, −Σ_h λ_h O_h y_h, so two
  settings that merely shrink heads agree.
- `zsl_direction`: the same for the direction of the ZSL vector alone, for maps and for records without `off_span`;
  `rotated` then removes that direction instead of the span.

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

from dualview.metrics.arrays import NUMPY, Backend, as_type, library, put_like, to_numpy
from dualview.metrics.cosine import Form, defined_mean, long_enough, overall_mean, ratio
from dualview.metrics.floors.covariates import known_numbers
from dualview.metrics.floors.rotations import BlockChunk, Rotations, UpdateSources, block_chunks
from dualview.metrics.floors.updates import BlockProducts, Compared, gaussian, random_directions
from dualview.metrics.label_contrast import FLIPPED
from dualview.metrics.sim_aou import noise_floor
from dualview.metrics.statistics import cosine_above_p, found_at, generator
from dualview.records import Records

OUTPUT_BLOCK = 64
MAP_BLOCK = 16
_PERMUTATIONS = 999
_ROTATION_SAMPLE = 64
_LEAST_ORDERS = 100


@dataclass(frozen=True)
class Floor:
    """One floor, per query and layer, and the similarity's excess over it on the same footing.

    What is beyond the mean update may be many times a query's own update, if that is short: its test weighs it as it
    is, the floor takes it for no more than a similarity can be.
    """

    per_query: Float[np.ndarray, "query layer"]
    excess: Float[np.ndarray, "query layer"]


@dataclass(frozen=True)
class ShuffleTest:
    """Permutation p-values of a similarity against pairing each query with another one's update."""

    p: float | None
    p_per_layer: Float[np.ndarray, " layer"]
    below_p: float | None = None
    """The same that it is not below that of other queries."""
    spread: float = 0.0
    """The standard deviation of the mean similarity over permutations."""


@dataclass(frozen=True)
class Rotated:
    """Standard deviations over random rotations of FT's updates, about a mean of 0.

    Each layer has its own, and they are put together for two kinds of chance; the larger counts:

    together   rotations in all dimensions, the mean of the layers' deviations: layers that write into one residual
               stream may all be aligned by the same chance
    apart      rotations within the directions that both settings write in (`crowding`), which differ from layer to
               layer: the root of the sum of squares

    Layers count alike, but for the label contrast: most layers hardly see the labels, so each counts as much as
    flipping them changes it, ‖x‖ ‖y‖ / ‖h_zsl‖² on average. A rotation keeps lengths, so this favours no outcome.
    """

    whole: float
    """Of the similarity itself."""
    specific: float
    """Of the cosine of what is left beyond the shared direction and outside the heads' span."""
    portion: float
    """How long that is over the whole updates, ICL's times FT's, on average."""
    left: float
    """The cosine itself."""


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
    def below_p(self) -> float | None:
        """One-sided p, the largest of every test's, that the similarity is not below 0; None if one cannot be made."""
        found = [test.below_p for test in self.tests.values()]
        value = overall_mean(self.value)
        if self.rotated is None or not np.isfinite(value) or any(p is None for p in found):
            return None
        turned = ((value, self.rotated.whole), (self.rotated.left, self.rotated.specific))
        return max(*(cosine_above_p(-at, deviation) for at, deviation in turned), *(p for p in found if p is not None))

    @property
    def detectable(self) -> float | None:
        """The smallest similarity beyond its floors that is found at p < .01 with a probability of 80 %."""
        spreads = [test.spread for test in self.tests.values() if test.p is not None]
        spreads += [] if self.rotated is None else [self.rotated.specific * self.rotated.portion]
        return found_at(0.01) * max(spreads) if spreads else None


def output_blocks(
    n_queries: int, seed: int, gold: Int[np.ndarray, " query"] | None = None
) -> list[Int[np.ndarray, " _member"]]:
    """Random blocks of at most `OUTPUT_BLOCK` queries of one class: permuting within is as exact, n² pairs cheaper."""
    order = generator(seed, "blocks/h").permutation(n_queries)
    label = np.zeros(n_queries, dtype=np.int64) if gold is None else gold
    same = [order[label[order] == each] for each in np.unique(label)]
    return [block for group in same for block in _split(group, OUTPUT_BLOCK)]


def map_blocks(columns: Int[np.ndarray, " query"], seed: int) -> list[Int[np.ndarray, " _member"]]:
    """Random blocks of at most `MAP_BLOCK` queries that have the same number of columns."""
    order = generator(seed, "blocks/m").permutation(columns.shape[0])
    same = [order[columns[order] == count] for count in np.unique(columns)]
    return [block for group in same for block in _split(group, MAP_BLOCK)]


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
        expected += to_numpy((~library(block).isnan(block)).sum(axis=(1, 2))) / block.shape[1]
    orders = sum(math.lgamma(int(block.shape[1]) + 1) for block in pairs)
    if not expected.any() or orders < math.log(_LEAST_ORDERS):  # so few orders cannot give a small p
        return ShuffleTest(None, np.full(layers, np.nan))
    weight = put_like(np.where(expected > 0, 1.0 / np.maximum(expected, 1e-300), 0.0), pairs[0])
    observed, shuffled = (put_like(np.zeros(shape), pairs[0]) for shape in ((layers,), (_PERMUTATIONS, layers)))
    rng, xp = generator(seed, name), library(pairs[0])
    for block in pairs:
        values, member = xp.nan_to_num(block) * weight[:, None, None], np.arange(int(block.shape[1]))
        observed += xp.einsum("lii->l", values)
        orders = rng.permuted(np.broadcast_to(member, (_PERMUTATIONS, member.size)), axis=1)
        rows = as_type(values.reshape(layers, -1).T, "float64")  # a permutation takes whole rows: all layers at once
        places = put_like(np.ascontiguousarray((orders + member * member.size).T), rows)
        if xp is not np:  # one step for all members: a device takes longer to begin each than to make it
            shuffled += rows[places].sum(axis=0)
            continue
        for taken in places:
            shuffled += rows[taken]
    observed, shuffled = to_numpy(observed), to_numpy(shuffled)
    slack = 1e-12 * np.abs(observed).sum()
    per_layer = (1 + (shuffled >= observed - slack).sum(axis=0)) / (_PERMUTATIONS + 1)
    overall = (1 + int((shuffled.sum(axis=1) >= observed.sum() - slack).sum())) / (_PERMUTATIONS + 1)
    below = (1 + int((shuffled.sum(axis=1) <= observed.sum() + slack).sum())) / (_PERMUTATIONS + 1)
    spread = float(shuffled.sum(axis=1).std()) / int((expected > 0).sum())
    return ShuffleTest(overall, np.where(expected > 0, per_layer, np.nan), below, spread)


@dataclass(frozen=True)
class _Collected:
    """One form's arrays while the layers are being gone through."""

    tables: Mapping[str, Float[np.ndarray, "layer query"]]
    pairs: Sequence[Float[np.ndarray, "layer _member _member"]]
    centred: Sequence[Float[np.ndarray, "layer _member _member"]]
    deviations: Mapping[str, Float[np.ndarray, " layer"]]

    @classmethod
    def empty(cls, n: int, layers: int, blocks: Sequence[Int[np.ndarray, " _member"]], at: Backend) -> _Collected:
        def full(*shape: int) -> np.ndarray:
            return at.full(shape, np.nan)

        pairs, centred = ([full(layers, block.size, block.size) for block in blocks] for _ in range(2))
        names = ("value", "shrinkage", "gaussian", "noise", "before", "rest", "cosines", "portion", "size")
        deviations = {name: full(layers) for name in ("whole", "specific", "crowding")}
        return cls({name: full(layers, n) for name in names}, pairs, centred, deviations)

    def fill_queries(self, layers: slice, form: Form, own: dict[str, np.ndarray], random: np.ndarray) -> None:
        """What each query has by itself; `own` is [layer, query, group]."""
        means = {"value": own["value"], "shrinkage": own["shrinkage"], "gaussian": random}
        if form == "map":
            means["before"] = ratio(own["x_z"], own["x_norm"] * long_enough(own["z_norm"], own["z_norm"]))
        if form == "normalised":
            means["noise"] = noise_floor(own["x_size"], own["y_size"])
        for name, values in means.items():
            self.tables[name][layers] = defined_mean(values, axis=-1)

    def fill_blocks(self, layers: slice, chunk: BlockChunk, compared: Compared) -> None:
        """Compare queries within blocks."""
        others = compared.other_queries()
        rest = defined_mean(compared.beyond_mean(compared.pairs()), axis=-3)
        for at, number in enumerate(chunk.numbers):
            self.pairs[number][layers], self.centred[number][layers] = others[:, at], rest[:, at]


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
    backend: Backend = NUMPY,
) -> Mapping[Form, RecordFloors]:
    """All floors of `h` (three axes) or `m` (four) for the given forms, a few layers at a time.

    off     ICL's and FT's `off_span`, where they were recorded
    gold    the queries' labels: outputs are then compared within classes
    known   what is known of each query (`floors.covariates`)
    """
    sources = UpdateSources(zsl, icl, ft, off=off, known=known)
    return _floors(sources, forms, columns, gold, seed, backend, by_size=False)


def _floors(
    sources: UpdateSources,
    forms: Sequence[Form],
    columns: Int[np.ndarray, " query"] | None,
    gold: Int[np.ndarray, " query"] | None,
    seed: int,
    backend: Backend,
    *,
    by_size: bool,
) -> Mapping[Form, RecordFloors]:
    zsl = sources.zsl
    n, layers, array = zsl.shape[0], zsl.shape[1], "m" if zsl.ndim == 4 else "h"
    dims = np.full(n, zsl.shape[-1]) if columns is None or array == "h" else columns
    blocks = map_blocks(dims, seed) if array == "m" else output_blocks(n, seed, gold)
    groups = zsl.shape[2] if array == "m" else 1
    chunks = block_chunks(blocks, dims, groups, backend)
    sample = generator(seed, "rotated").permutation(n)[:_ROTATION_SAMPLE]
    collected: dict[Form, _Collected] = {form: _Collected.empty(n, layers, blocks, backend) for form in forms}
    with_z = bool(set(forms) - {"update"}) or ("update" in forms and not sources.off)

    def random(form: Form, step: slice) -> Float[np.ndarray, "3 draw layer query group"]:
        def of(layer: int) -> np.ndarray:
            return random_directions(dims, groups, generator(seed, f"gaussian/{array}/{form}/{layer}"))

        each = map if backend.device is None else NUMPY.each  # numpy's steps are on several threads already
        return backend.put(np.stack(list(each(of, range(step.start, step.stop))), axis=2))

    def fill(step: slice) -> None:
        here, count = sources.put(step, backend), step.stop - step.start
        own: dict[Form, dict[str, np.ndarray]] = {form: {} for form in forms}
        rotations = Rotations(dims, count, groups, sample, backend, outputs=array == "h") if "update" in forms else None
        for chunk in chunks:
            v, members = here.read(chunk), backend.put(chunk.members)
            products = BlockProducts.of(v, with_z=with_z)
            for form, into in collected.items():
                compared = Compared.of(form, products)
                for name, values in compared.own.items():
                    if name not in own[form]:
                        own[form][name] = backend.full((count, n, groups), np.nan)
                    own[form][name][:, members] = values.swapaxes(2, 3)
                if chunk.members.shape[1] > 1:
                    into.fill_blocks(step, chunk, compared)
                if form == "update" and rotations is not None:
                    rotations.add(chunk, v, compared)
        for form, into in collected.items():
            into.fill_queries(step, form, own[form], gaussian(form, own[form], random(form, step)))
        if rotations is not None:
            into, lengths = collected["update"], own["update"]["x_norm"] * own["update"]["b_norm"]
            isfinite = library(lengths).isfinite
            for name in ("rest", "cosines", "portion"):
                into.tables[name][step] = defined_mean(getattr(rotations, name), axis=-1)
            z_norm = own["update"]["z_norm"]
            scale = library(z_norm).where(z_norm > 0, z_norm, 1.0) ** 2  # without a zero-shot output: as they are
            into.tables["size"][step] = defined_mean(rotations.portion * lengths / scale, axis=-1)
            into.deviations["whole"][step] = rotations.deviation("whole", isfinite(lengths))
            into.deviations["specific"][step] = rotations.deviation("specific", isfinite(rotations.rest))
            into.deviations["crowding"][step] = rotations.crowding

    def quietly(step: slice) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # a diverged fine-tuning leaves infinities: they become NaN
            fill(step)

    numbers = n * groups * int(zsl.shape[-1])  # a device gets copies of whole layers
    if backend.device is None:
        numbers = max(chunk.members.size * chunk.width * groups for chunk in chunks)
    backend.each(quietly, backend.steps(layers, numbers))
    span = "head_span" if sources.off else "zsl_direction"
    return {form: _finish(into, blocks, seed, f"{array}/{form}", span, by_size) for form, into in collected.items()}


def contrast_floors(records: Records, *, seed: int = 0, backend: Backend = NUMPY) -> RecordFloors | None:
    """The label contrast with its floors (another query, the mean direction, rotations); None if it was not recorded.

    The floors are those of an update: each contrast counts as what a setting adds to h_zsl.
    """
    if any(name not in records.settings for name in FLIPPED.values()):
        return None
    names = [*FLIPPED, *FLIPPED.values()]
    h = [each for name in ("zsl", *names) if (each := records[name].h) is not None]
    if len(h) < 5:
        return None
    off = [each for name in FLIPPED if (each := records[name].off_contrast) is not None]
    known = known_numbers(records["zsl"].log_probs, records.gold, records.columns)
    sources = UpdateSources(h[0], h[1], h[2], h[3], h[4], off if len(off) == 2 else (), known)
    return _floors(sources, ["update"], None, records.gold, seed, backend, by_size=True)["update"]


def off_spans_of(records: Records) -> list[Float[np.ndarray, "query layer d_model"]]:
    """ICL's and FT's `off_span`; empty if either was not recorded."""
    found = [each for name in ("icl", "ft") if (each := records[name].off_span) is not None]
    return found if len(found) == 2 else []


def _finish(
    into: _Collected, blocks: Sequence[Int[np.ndarray, " _member"]], seed: int, name: str, span: str, by_size: bool
) -> RecordFloors:
    tables = {name: to_numpy(table).T for name, table in into.tables.items()}
    value = tables["value"]
    others, specific = np.full_like(value, np.nan), np.full_like(value, np.nan)
    several = [number for number, block in enumerate(blocks) if block.size > 1]
    for block, pairs, rest in ((blocks[at], into.pairs[at], into.centred[at]) for at in several):
        own, xp = put_like(np.eye(block.size, dtype=bool), pairs), library(pairs)
        others[block] = to_numpy(defined_mean(xp.where(own, float("nan"), pairs), axis=-1)).T
        specific[block] = to_numpy(xp.einsum("lii->li", rest)).T
    floors: dict[str, Floor] = {
        "gaussian": Floor(tables["gaussian"], value - tables["gaussian"]),
        "shuffled_query": Floor(others, value - others),
        "mean_direction": Floor(value - specific.clip(-1.0, 1.0), specific),
        span: Floor(tables["shrinkage"], value - tables["shrinkage"]),
    }
    for own_floor in ("noise", "before"):
        if not np.isnan(table := tables[own_floor]).all():
            floors[own_floor] = Floor(table, value - table)
    tests = {
        "shuffled_query": shuffle_test([into.pairs[at] for at in several], seed=seed, name=f"shuffle/{name}"),
        "mean_direction": shuffle_test([into.centred[at] for at in several], seed=seed, name=f"centred/{name}"),
    }
    whole, specific, crowded = (to_numpy(into.deviations[part]) for part in ("whole", "specific", "crowding"))
    left = defined_mean(tables["cosines"], axis=0)
    weights = defined_mean(tables["size"], axis=0) if by_size else np.ones_like(left)
    weights = np.where(np.isfinite(weights * left * specific), weights, 0.0)
    if not defined_mean(whole, axis=0) > 0 or not weights @ np.nan_to_num(specific) > 0:
        return RecordFloors(value, floors, tests, None)
    # The floor is what is left of the similarity itself; the test compares the queries' cosines beyond shared direction
    # and span. Shares would not do: the longer a query's update is for its part, the smaller its share, and what ICL
    # and FT have in common in length alone would pass for similarity.
    floors["rotated"] = Floor(value - tables["rest"].clip(-1.0, 1.0), tables["cosines"])
    rotated = Rotated(
        whole=_of_layers(whole, crowded, np.isfinite(whole).astype(np.float64)),
        specific=_of_layers(specific, crowded, weights),
        portion=overall_mean(tables["portion"]),
        left=float(weights @ np.nan_to_num(left) / weights.sum()),
    )
    return RecordFloors(value, floors, tests, rotated)


def _of_layers(
    deviation: Float[np.ndarray, " layer"], crowded: Float[np.ndarray, " layer"], weights: Float[np.ndarray, " layer"]
) -> float:
    """The deviation of the layers' mean, by the larger of two chances: see `Rotated`."""
    each = weights * np.nan_to_num(deviation) / weights.sum()
    return max(float(each.sum()), float((each**2 @ crowded) ** 0.5))
