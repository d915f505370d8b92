"""The bounds of every similarity: floors (ICL and FT unrelated) and ceilings (ICL compared with itself).

Floors come from the records alone (`metrics.floors.nulls`) and from control settings recorded with zsl, icl and ft. A
control in ICL's place gives the floor sim(control − zsl, ft − zsl), one in FT's place sim(icl − zsl, control − zsl).
A ceiling compares ICL with itself: sim(icl − zsl, icl' − zsl), icl' the same demonstrations in another order, or other
demonstrations. A whole other model (untrained) brings its own three settings, `<name>_zsl`, `<name>_icl` and
`<name>_ft`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from dualview.metrics.arrays import NUMPY, Backend
from dualview.metrics.cosine import Form, defined_mean, overall_mean, similarity_table
from dualview.metrics.floors.covariates import known_numbers
from dualview.metrics.floors.nulls import Floor, RecordFloors, contrast_floors, off_spans_of, record_floors
from dualview.metrics.floors.tables import RecordTables
from dualview.metrics.measured import LayerBounds
from dualview.metrics.predictions import correct, rec2ftp
from dualview.metrics.statistics import (
    DRAWS,
    Interval,
    another_draw_p,
    benjamini_hochberg,
    cosine_above_p,
    detectable_beyond,
    holm,
    paired_interval,
    query_interval,
    sign_flip_p,
    wilson_interval,
)
from dualview.metrics.summary import NOT_RECORDED, layer_bounds, plain
from dualview.records import MAIN_SETTINGS, Records, Setting


@dataclass(frozen=True)
class Role:
    """What a control setting is for: the place it takes, and whether it bounds from below, above, or neither."""

    place: Literal["icl", "ft"]
    bound: Literal["floor", "ceiling", "other"]
    meaning: str


ROLES: Mapping[str, Role] = {
    "zsl_shifted": Role("icl", "floor", "the query moved to its in-context position, without demonstrations"),
    "icl_random_labels": Role("icl", "floor", "demonstrations with random labels"),
    "icl_other_task": Role("icl", "floor", "demonstrations of another task"),
    "icl_random_text": Role("icl", "floor", "random text of the demonstrations' length"),
    "ft_random_labels": Role("ft", "floor", "fine-tuning on random labels"),
    "ft_other_task": Role("ft", "floor", "fine-tuning on another task"),
    "ft_sign_flipped": Role("ft", "floor", "fine-tuning up the gradient"),
    "ft_random_directions": Role("ft", "floor", "as large a change of the same weights in random directions"),
    "icl_flipped_labels": Role("icl", "other", "demonstrations with flipped labels"),
    "ft_flipped_labels": Role("ft", "other", "fine-tuning on flipped labels"),
    "icl_reordered": Role("ft", "ceiling", "ICL with the same demonstrations in another order"),
    "icl_other_demos": Role("ft", "ceiling", "ICL with other demonstrations"),
    "ft_distilled": Role("ft", "ceiling", "the most that a change of K and V can carry: ICL distilled into them"),
    "ft_all_params": Role("ft", "other", "fine-tuning of all parameters"),
    "ft_sgd": Role("ft", "other", "fine-tuning by gradient descent"),
    "ft_layer_causal": Role("ft", "other", "layer-causal fine-tuning"),
    "ft_linearised": Role("ft", "other", "fine-tuning of the linearised model"),
}
"""Known control settings. An `icl_…` or `zsl_…` not listed here is reported in ICL's place, an `ft_…` in FT's."""


def role_of(name: str) -> Role | None:
    if base_name(name) in ROLES:
        return ROLES[base_name(name)]
    if name.startswith(("icl_", "zsl_")):
        return Role("icl", "other", name)
    return Role("ft", "other", name) if name.startswith("ft_") else None


@dataclass(frozen=True)
class Similarity:
    """Which array a similarity compares, and in which form."""

    array: Literal["h", "m"]
    form: Form
    title: str


SIMILARITIES: Mapping[str, Similarity] = {
    "sim_aou": Similarity("h", "update", "raw SimAOU"),
    "sim_aou_normalised": Similarity("h", "normalised", "normalised SimAOU"),
    "sim_am": Similarity("m", "update", "SimAM-delta"),
    "sim_am_after": Similarity("m", "map", "SimAM after"),
}


@dataclass(frozen=True)
class FloorResult:
    """A floor's mean, and the one-sided p that the similarity does not exceed it."""

    value: float | None
    p: float | None
    draws: tuple[float, ...] = ()
    """Of a control that is drawn at random: its value in each draw."""


@dataclass(frozen=True)
class MetricControls:
    """One metric with its interval, floors and ceilings.

    `p`: for a similarity the permutation p against the shuffled query, for Rec2FTP the hypergeometric one. `below_p`:
    one-sided p that the similarity is not below 0, the largest of the records' own tests. `position`: 0 at the highest
    floor, 1 at the highest ceiling.
    """

    metric: str
    value: float | None
    ci: Interval | None = None
    floors: Mapping[str, FloorResult] = field(default_factory=dict[str, FloorResult])
    ceilings: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    others: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    p: float | None = None
    p_per_layer: Float[np.ndarray, " layer"] | None = None
    below_p: float | None = None
    reason: str | None = None
    per_layer: LayerBounds | None = None
    detectable: float | None = None
    """The smallest value beyond its floors that would have been found with a probability of 80 %."""

    @classmethod
    def over_queries(
        cls,
        metric: str,
        values: Float[np.ndarray, " query *layer"],
        floors: Mapping[str, Float[np.ndarray, " query *layer"]],
        ceilings: Mapping[str, float | None],
    ) -> MetricControls:
        """A metric that every query has: its interval over queries, and its floors tested query by query."""
        tested = {
            name: FloorResult(
                plain(overall_mean(floor)), sign_flip_p(values - floor, seed=0, name=f"floor/{metric}/{name}")
            )
            for name, floor in floors.items()
        }
        interval = query_interval(values, seed=0, name=f"ci/{metric}")
        return cls(metric, plain(overall_mean(values)), interval, tested, ceilings)

    @property
    def floor(self) -> float | None:
        """The highest floor."""
        return max((floor.value for floor in self.floors.values() if floor.value is not None), default=None)

    @property
    def ceiling(self) -> float | None:
        """The highest ceiling."""
        return max((value for value in self.ceilings.values() if value is not None), default=None)

    @property
    def position(self) -> float | None:
        if self.value is None or self.floor is None or self.ceiling is None or self.ceiling <= self.floor:
            return None
        return (self.value - self.floor) / (self.ceiling - self.floor)

    def to_json(self) -> dict[str, object]:
        result: dict[str, object] = {
            "value": self.value,
            "ci": None if self.ci is None else self.ci.to_json(),
            "ci_kind": None if self.ci is None else self.ci.kind,
            "floors": {name: floor.value for name, floor in self.floors.items()},
            "floors_p": {name: floor.p for name, floor in self.floors.items()},
            "floors_draws": {name: list(floor.draws) for name, floor in self.floors.items() if floor.draws},
            "detectable": self.detectable,
            "ceiling": self.ceiling,
            "ceilings": dict(self.ceilings),
            "others": dict(self.others),
            "position": self.position,
            "p": self.p,
            "below_p": self.below_p,
            "reason": self.reason,
        }
        if self.p_per_layer is not None:
            corrected = {"raw": self.p_per_layer, "holm": holm(self.p_per_layer)}
            corrected["benjamini_hochberg"] = benjamini_hochberg(self.p_per_layer)
            result["p_per_layer"] = {name: [plain(p) for p in values] for name, values in corrected.items()}
        if self.per_layer is not None:
            result["per_layer"] = self.per_layer.model_dump()
        return result


@dataclass(frozen=True)
class ControlOptions:
    """Seed and sizes of every random draw, and where to compute."""

    seed: int = 0
    draws: int = DRAWS
    level: float = 0.95
    backend: Backend = NUMPY


LEAST_DEFINED = 0.5
"""A control that changes nothing but rounding has a cosine here and there; what those few say is no floor."""


def record_tables(records: Records, backend: Backend = NUMPY) -> RecordTables:
    """The similarities of ICL and FT, with every control in the place of one of them, and of other models."""
    found = {name: role_of(name) for name in control_trios(records)}
    wholes = [name for name in found if name not in records.controls]
    own = {name: role for name, role in found.items() if role is not None and name not in wholes}
    return RecordTables.of(records, {name: role.place for name, role in own.items()}, backend, wholes)


def compute_controls(
    records: Records, options: ControlOptions | None = None, tables: RecordTables | None = None
) -> Mapping[str, MetricControls]:
    """Interval, floors, ceilings and p-values of accuracy gains, Rec2FTP and every similarity the records allow."""
    options = options or ControlOptions()
    tables, seed, backend = tables or record_tables(records, options.backend), options.seed, options.backend
    results = {f"accuracy_{name}": accuracy_gain(records, name, options) for name in ("icl", "ft")}
    results["rec2ftp"] = rec2ftp_controls(records, options)
    for array in ("h", "m"):
        names = [name for name, similarity in SIMILARITIES.items() if similarity.array == array]
        stacks = [getattr(records[name], array) for name in MAIN_SETTINGS]
        if any(stack is None for stack in stacks):
            results |= {name: MetricControls(name, None, reason=NOT_RECORDED) for name in names}
            continue
        forms: list[Form] = [SIMILARITIES[name].form for name in names]
        off = off_spans_of(records) if array == "h" else ()
        z, p, f = stacks
        columns, gold = records.columns, records.gold
        known = known_numbers(records["zsl"].log_probs, gold, columns)
        floors = record_floors(
            z, p, f, forms, columns=columns, off=off, gold=gold, known=known, seed=seed, backend=backend
        )
        for name in names:
            results[name] = similarity_controls(records, name, floors[SIMILARITIES[name].form], options, tables)
    contrast = contrast_floors(records, seed=seed, backend=backend)
    name = "label_contrast"
    if contrast is None:
        results[name] = MetricControls(name, None, reason=NOT_RECORDED)
    else:
        results[name] = _from_records(name, contrast, options)
    return results


def accuracy_gain(records: Records, name: str, options: ControlOptions) -> MetricControls:
    """How much more often a setting is right than zero-shot, with the interval of the paired difference."""
    right = {which: correct(records[which].log_probs, records.gold).astype(np.float64) for which in ("zsl", name)}
    metric = f"accuracy_{name}"
    interval = paired_interval(
        right[name], right["zsl"], seed=options.seed, name=metric, draws=options.draws, level=options.level
    )
    return MetricControls(metric, float((right[name] - right["zsl"]).mean()), interval)


def rec2ftp_controls(records: Records, options: ControlOptions) -> MetricControls:
    """Rec2FTP against its chance level and with each control in ICL's or FT's place."""

    def of(zsl: Setting, icl: Setting, ft: Setting) -> float | None:
        return rec2ftp(records.gold, zsl.log_probs, icl.log_probs, ft.log_probs).value

    own = rec2ftp(records.gold, *(records[name].log_probs for name in MAIN_SETTINGS))
    floors, bounds = {"chance": FloorResult(own.chance, own.p)}, _Bounds()
    for name, trio in control_trios(records).items():
        value = of(trio.zsl, trio.icl, trio.ft)
        if trio.bound == "floor":
            floors[name] = FloorResult(value, None)
        else:
            bounds.put(name, trio, value)
    interval = wilson_interval(own.n_both, own.n_ft, options.level)
    return MetricControls(
        "rec2ftp", own.value, interval, floors, bounds.ceilings, bounds.others, own.p, reason=own.reason
    )


def similarity_controls(
    records: Records,
    name: str,
    from_records: RecordFloors,
    options: ControlOptions,
    known: RecordTables | None = None,
) -> MetricControls:
    """One similarity with its interval, every floor's p-value, and its ceilings."""
    tables: dict[str, dict[str, np.ndarray]] = {"floor": {}, "ceiling": {}, "other": {}}
    for control, trio in control_trios(records).items():
        table = _table(name, control, trio, records.columns, known)
        if table is not None:
            undefined = np.isfinite(table).mean() < LEAST_DEFINED
            tables[trio.bound][control] = np.full_like(table, np.nan) if undefined else table
    own = _from_records(name, from_records, options)
    draws: dict[str, list[np.ndarray]] = {}
    for control, table in tables["floor"].items():
        draws.setdefault(base_name(control), []).append(table)
    bounds = {control: defined_mean(np.stack(several), axis=0) for control, several in draws.items()}
    per_layer = layer_bounds(
        from_records.value,
        {**{floor: f.per_query for floor, f in from_records.floors.items() if floor != "rotated"}, **bounds},
        tables["ceiling"],
    )
    drawn = {control: _drawn(own.value, several) for control, several in draws.items()}
    reaches = [own.detectable, *(detectable_beyond(floor.draws, 0.01) for floor in drawn.values())]
    return replace(
        own,
        floors={**own.floors, **drawn},
        detectable=max((reach for reach in reaches if reach is not None), default=None),
        ceilings={control: plain(overall_mean(table)) for control, table in tables["ceiling"].items()},
        others={control: plain(overall_mean(table)) for control, table in tables["other"].items()},
        per_layer=per_layer,
    )


def _from_records(name: str, found: RecordFloors, options: ControlOptions) -> MetricControls:
    """A similarity with the floors that its records give."""
    value = plain(overall_mean(found.value))
    floors = {
        floor: FloorResult(plain(overall_mean(f.per_query)), _floor_p(name, floor, f, found, options))
        for floor, f in found.floors.items()
    }
    bounds = {floor: f.per_query for floor, f in found.floors.items() if floor != "rotated"}
    return MetricControls(
        metric=name,
        value=value,
        ci=query_interval(found.value, seed=options.seed, name=f"ci/{name}", draws=options.draws, level=options.level),
        floors=floors,
        p=found.tests["shuffled_query"].p,
        p_per_layer=found.tests["shuffled_query"].p_per_layer,
        below_p=found.below_p,
        reason=None if value is not None else "undefined for every query",
        per_layer=layer_bounds(found.value, bounds, {}),
        detectable=found.detectable,
    )


def _drawn(value: float | None, tables: Sequence[np.ndarray]) -> FloorResult:
    """A control's floor: its mean over draws, and how likely another draw is to reach the value."""
    means = [mean for table in tables if np.isfinite(mean := overall_mean(table))]
    if value is None or not means:
        return FloorResult(None, None)
    return FloorResult(float(np.mean(means)), another_draw_p(value, means), tuple(means))


def base_name(control: str) -> str:
    """The name of a control without the number of its draw.

    >>> base_name("icl_random_labels@3")
    'icl_random_labels'
    """
    return control.partition("@")[0]


def _floor_p(metric: str, name: str, floor: Floor, from_records: RecordFloors, options: ControlOptions) -> float | None:
    """The floor's own null where it has one (permutations, rotations), else sign flips of the per-query excess."""
    if name in from_records.tests:
        return from_records.tests[name].p
    if name == "rotated":
        rotated = from_records.rotated
        return None if rotated is None else cosine_above_p(rotated.left, rotated.specific)
    return sign_flip_p(floor.excess, seed=options.seed, name=f"floor/{metric}/{name}", draws=options.draws)


@dataclass(frozen=True)
class _Trio:
    """Three settings to compare as zsl, icl and ft."""

    zsl: Setting
    icl: Setting
    ft: Setting
    bound: Literal["floor", "ceiling", "other"] = "floor"


@dataclass(frozen=True)
class _Bounds:
    ceilings: dict[str, float | None] = field(default_factory=dict[str, float | None])
    others: dict[str, float | None] = field(default_factory=dict[str, float | None])

    def put(self, name: str, trio: _Trio, value: float | None) -> None:
        (self.ceilings if trio.bound == "ceiling" else self.others)[name] = value


def control_trios(records: Records) -> Mapping[str, _Trio]:
    """Every control as the three settings it compares."""
    settings, trios = records.settings, dict[str, _Trio]()
    stems = {name.removesuffix("_zsl") for name in records.controls if name.endswith("_zsl")}
    whole = {stem for stem in stems if all(f"{stem}_{part}" in settings for part in MAIN_SETTINGS)}
    for stem in sorted(whole):
        trios[stem] = _Trio(settings[f"{stem}_zsl"], settings[f"{stem}_icl"], settings[f"{stem}_ft"])
    parts = {f"{stem}_{part}" for stem in whole for part in MAIN_SETTINGS}
    for name, setting in records.controls.items():
        role = None if name in parts else role_of(name)
        if role is not None:
            icl, ft = (setting, records["ft"]) if role.place == "icl" else (records["icl"], setting)
            trios[name] = _Trio(records["zsl"], icl, ft, role.bound)
    return trios


def _table(
    name: str, control: str, trio: _Trio, columns: Int[np.ndarray, " query"] | None, known: RecordTables | None
) -> Float[np.ndarray, "query layer"] | None:
    similarity = SIMILARITIES[name]
    tables = None if known is None else getattr(known, similarity.array)
    if tables is not None and control in tables.controls:
        return tables.controls[control][similarity.form]
    stacks = [getattr(setting, similarity.array) for setting in (trio.zsl, trio.icl, trio.ft)]
    if any(stack is None for stack in stacks):
        return None
    return similarity_table(similarity.form, stacks[0], stacks[1], stacks[2], columns)
