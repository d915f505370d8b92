"""Every metric of one run, from its records: what `dualview run` reports and `dualview metrics` recomputes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from dualview.metrics.agreement import Agreement, agreement, label_agreement
from dualview.metrics.arrays import NUMPY, Backend
from dualview.metrics.cosine import defined_mean, layer_means, overall_mean
from dualview.metrics.floors.tables import FORMS, RecordTables
from dualview.metrics.label_contrast import FLIPPED, specific_contrast
from dualview.metrics.measured import LayerBounds
from dualview.metrics.predictions import Rec2FTP, accuracy, prediction_warnings, rec2ftp
from dualview.metrics.sim_am import DemoMass, SimAM, by_query, demo_mass_summary
from dualview.metrics.sim_aou import noise_floor
from dualview.metrics.statistics import wilson_interval
from dualview.records import Records, as_records


def plain(value: float) -> float | None:
    """A number as JSON can hold it: NaN becomes null."""
    return float(value) if np.isfinite(value) else None


@dataclass(frozen=True)
class Layered:
    """One metric per query and layer (NaN where undefined), with its averages: queries first, then layers."""

    per_query: Float[np.ndarray, "query layer"]
    undefined: int
    """How many of `counted` single values (per head, where there are heads) are undefined and left out."""
    counted: int

    @classmethod
    def of(cls, values: Float[np.ndarray, "query layer *head"]) -> Layered:
        per_query = by_query(values) if values.ndim == 3 else values
        return cls(per_query, int(np.isnan(values).sum()), int(values.size))

    @property
    def value(self) -> float | None:
        return plain(overall_mean(self.per_query))

    @property
    def per_layer(self) -> list[float | None]:
        return [plain(value) for value in layer_means(self.per_query)]

    @property
    def reason(self) -> str | None:
        """Why there is no value, if there is none."""
        return None if self.value is not None else "undefined for every query: one side did not change, or diverged"


NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Metrics:
    """All metrics of one run; None where the records lack the arrays. `to_json` gives the result file's keys."""

    accuracy: Mapping[str, float]
    n: int
    """Queries."""
    rec2ftp: Rec2FTP
    sim_aou_raw: Layered | None
    sim_aou_normalised: Layered | None
    sim_am_before: Layered | None
    sim_am_after: Layered | None
    sim_am_delta: Layered | None
    update_norm_icl: Layered | None
    update_norm_ft: Layered | None
    heads: SimAM | None
    """SimAM of every query, layer and head."""
    demo_mass: DemoMass | None
    agreement: Agreement
    label_contrast: Layered | None
    """None where flipped labels were not run."""
    label_specific: float | None
    """The label contrast beyond what all queries share; None where it is undefined or flipped labels were not run."""
    label_agreement: Agreement | None
    """The same of the log-odds."""
    warnings: tuple[str, ...]

    @property
    def accuracy_intervals(self) -> Mapping[str, tuple[float, float]]:
        """Wilson's 95 % interval of every accuracy."""
        found = {name: wilson_interval(round(value * self.n), self.n) for name, value in self.accuracy.items()}
        return {name: (each.low, each.high) for name, each in found.items() if each is not None}

    @property
    def sim_aou_per_query(self) -> Float[np.ndarray, "query layer"] | None:
        """Raw SimAOU of every query and layer."""
        return None if self.sim_aou_raw is None else self.sim_aou_raw.per_query

    @property
    def sim_am_per_query(self) -> Float[np.ndarray, "query layer"] | None:
        """SimAM-delta of every query and layer, averaged over heads."""
        return None if self.sim_am_delta is None else self.sim_am_delta.per_query

    @property
    def noise_floor(self) -> float | None:
        """The analytic noise floor of normalised SimAOU at the run's mean relative update norms."""
        if self.update_norm_icl is None or self.update_norm_ft is None:
            return None
        sizes = [np.array(np.nan if n.value is None else n.value) for n in (self.update_norm_icl, self.update_norm_ft)]
        return plain(float(noise_floor(sizes[0], sizes[1])))

    @property
    def noise_floor_per_layer(self) -> list[float | None] | None:
        if self.update_norm_icl is None or self.update_norm_ft is None:
            return None
        sizes = [layer_means(n.per_query) for n in (self.update_norm_icl, self.update_norm_ft)]
        return [plain(value) for value in noise_floor(sizes[0], sizes[1])]

    def to_json(self) -> dict[str, object]:
        """The contract's keys as plain numbers and nulls, with reasons and counts."""
        return {
            "accuracy": dict(self.accuracy),
            "accuracy_ci": {name: list(interval) for name, interval in self.accuracy_intervals.items()},
            "rec2ftp": self.rec2ftp.to_json(),
            "sim_aou": {
                **_block({"raw": self.sim_aou_raw, "normalised": self.sim_aou_normalised}),
                "noise_floor": self.noise_floor,
                "noise_floor_per_layer": self.noise_floor_per_layer,
            },
            "sim_am": _block({"before": self.sim_am_before, "after": self.sim_am_after, "delta": self.sim_am_delta}),
            "update_norm": _block({"icl": self.update_norm_icl, "ft": self.update_norm_ft}),
            "demo_mass": None if self.demo_mass is None else self.demo_mass.to_json(),
            "agreement": self.agreement.to_json(),
            "label_contrast": self._label_contrast(),
            "warnings": list(self.warnings),
        }

    def _label_contrast(self) -> dict[str, object] | None:
        found = self.label_contrast
        if found is None:
            return None
        log_odds = None if self.label_agreement is None else self.label_agreement.to_json()
        return {
            "value": found.value,
            "per_layer": found.per_layer,
            "specific": self.label_specific,
            "reason": found.reason,
            "log_odds": log_odds,
        }


def _block(parts: Mapping[str, Layered | None]) -> dict[str, object]:
    """value, value_per_layer, and what was left out, for the variants of one metric."""
    result: dict[str, object] = {name: None if part is None else part.value for name, part in parts.items()}
    result |= {f"{name}_per_layer": None if part is None else part.per_layer for name, part in parts.items()}
    result["undefined"] = {
        name: None if part is None else {"count": part.undefined, "of": part.counted} for name, part in parts.items()
    }
    result["reason"] = {name: NOT_RECORDED if part is None else part.reason for name, part in parts.items()}
    return result


def plain_tables(records: Records, backend: Backend = NUMPY) -> RecordTables:
    """The similarities of ICL and FT, and the label contrast where flipped labels were run."""
    return RecordTables.of(records, {name: "icl" for name in FLIPPED.values() if name in records.settings}, backend)


def compute_metrics(records: object, tables: RecordTables | None = None) -> Metrics:
    """Every metric of one run from its records alone (or anything `as_records` reads).

    Averages: heads, then queries, then layers. Undefined values are left out and counted, never 0.

    tables   the records' similarities, where they are known already
    """
    data = as_records(records)
    tables = tables or plain_tables(data)
    zsl, icl, ft = (data[name] for name in ("zsl", "icl", "ft"))
    raw = normalised = icl_norm = ft_norm = contrast = None
    if (h := tables.h) is not None:
        raw, normalised = (Layered.of(h.main[form][..., 0]) for form in FORMS["h"])
        icl_norm, ft_norm = (Layered.of(h.sizes[name]) for name in ("icl", "ft"))
        contrast = None if h.contrast is None else Layered.of(h.contrast)
    heads = None
    if (m := tables.m) is not None and m.before is not None:
        heads = SimAM(m.before, m.main["map"], m.main["update"])
    return Metrics(
        accuracy={name: accuracy(setting.log_probs, data.gold) for name, setting in data.settings.items()},
        n=data.n_queries,
        rec2ftp=rec2ftp(data.gold, zsl.log_probs, icl.log_probs, ft.log_probs),
        sim_aou_raw=raw,
        sim_aou_normalised=normalised,
        sim_am_before=None if heads is None else Layered.of(heads.before),
        sim_am_after=None if heads is None else Layered.of(heads.after),
        sim_am_delta=None if heads is None else Layered.of(heads.delta),
        update_norm_icl=icl_norm,
        update_norm_ft=ft_norm,
        heads=heads,
        demo_mass=None if icl.demo_mass is None else demo_mass_summary(icl.demo_mass),
        agreement=agreement(data.gold, zsl.log_probs, icl.log_probs, ft.log_probs),
        label_contrast=contrast,
        label_specific=_label_specific(data),
        label_agreement=_label_agreement(data),
        warnings=tuple(_warnings(data)),
    )


_CONTRASTED = ("zsl", "icl", FLIPPED["icl"], "ft", FLIPPED["ft"])


def _label_specific(records: Records) -> float | None:
    h = [records[name].h for name in _CONTRASTED if name in records.settings]
    known = [each for each in h if each is not None]
    if len(known) < len(_CONTRASTED):
        return None
    return plain(float(defined_mean(specific_contrast(*known), axis=0)))


def _label_agreement(records: Records) -> Agreement | None:
    if any(name not in records.settings for name in _CONTRASTED):
        return None
    zsl, icl, icl_flipped, ft, ft_flipped = (records[name].log_probs for name in _CONTRASTED)
    return label_agreement(records.gold, zsl, icl, icl_flipped, ft, ft_flipped)


def _warnings(records: Records) -> list[str]:
    if "learner" in records.meta:  # the whole records have them all
        return []
    return prediction_warnings({name: each.log_probs for name, each in records.settings.items() if "/" not in name})


QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}


def layer_bounds(
    values: Float[np.ndarray, "query layer"],
    floors: Mapping[str, Float[np.ndarray, "query layer"]],
    ceilings: Mapping[str, Float[np.ndarray, "query layer"]],
) -> LayerBounds:
    """One similarity layer by layer: its quantiles over queries, and the mean of every floor and ceiling."""
    columns = [layer[np.isfinite(layer)] for layer in values.T]
    return LayerBounds(
        quantiles={
            name: [float(np.quantile(column, at)) if column.size else None for column in columns]
            for name, at in QUANTILES.items()
        },
        floors={name: [plain(mean) for mean in layer_means(table)] for name, table in floors.items()},
        ceilings={name: [plain(mean) for mean in layer_means(table)] for name, table in ceilings.items()},
    )
