"""The records of a run: one `Setting` each for zsl, icl and ft, over the same queries.

Everything is plain numpy (but see `Setting`): metrics never see a model, and a test can build records with a planted
answer (`Records.from_arrays`, or `as_records` on a plain mapping).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from jaxtyping import Int

from dualview.io.display import as_html
from dualview.io.errors import UserError
from dualview.records.as_xarray import to_xarray
from dualview.records.parsing import parse_mapping
from dualview.records.setting import AXES, MAIN_SETTINGS, Setting, TokenScores, is_learner


@dataclass(frozen=True)
class Records:
    """All settings of one run; `settings` always holds zsl, icl and ft, and controls under their own names.

    Shapes are checked: every array of one kind has the same shape in every setting.
    """

    gold: Int[np.ndarray, " query"]
    settings: Mapping[str, Setting]
    columns: Int[np.ndarray, " query"] | None = None
    meta: Mapping[str, object] = field(default_factory=dict[str, object])
    token_scores: TokenScores | None = None

    def __post_init__(self) -> None:
        _check(self)

    def __getitem__(self, name: str) -> Setting:
        return self.settings[name]

    @property
    def n_queries(self) -> int:
        return int(self.gold.shape[0])

    @property
    def controls(self) -> Mapping[str, Setting]:
        """The settings other than zsl, icl and ft."""
        return {name: setting for name, setting in self.settings.items() if name not in MAIN_SETTINGS}

    def _repr_html_(self) -> str | None:
        """In a notebook: each setting's accuracy, and the shapes."""
        return as_html(self)

    @property
    def learners(self) -> tuple[str, ...]:
        """The settings that are compared with icl as ft is."""
        return tuple(filter(is_learner, self.settings))

    def judged_as_ft(self, learner: str) -> Records:
        """The records of another learner than ft: itself in ft's place, with its own controls and those of ICL.

        What was fine-tuned stays out: its controls are as large as ft's update, not as this one's.
        """
        if learner not in self.learners:
            known = ", ".join(self.learners) or "none"
            raise UserError(f"records: there is no learner {learner}; the learners next to ft: {known}.")
        shared = {n: s for n, s in self.settings.items() if "/" not in n and n.startswith(("zsl", "icl"))}
        shared |= {n: s for n, s in self.settings.items() if "/" not in n and n.endswith(("_zsl", "_icl"))}
        own = {n.partition("/")[2]: s for n, s in self.settings.items() if n.startswith(f"{learner}/")}
        settings = {**shared, "ft": self[learner], **own}
        return Records(self.gold, settings, self.columns, {**self.meta, "learner": learner})

    def on_host(self) -> Records:
        """The records themselves if they are all numpy's, else a copy that is; settings that are one stay one."""
        moved = {id(setting): setting.on_host() for setting in self.settings.values()}
        if all(moved[id(setting)] is setting for setting in self.settings.values()):
            return self
        return replace(self, settings={name: moved[id(setting)] for name, setting in self.settings.items()})

    def to_xarray(self) -> Any:
        """The arrays as an `xarray.Dataset` (extra `xarray`): setting, query, candidate, layer, head, …"""
        return to_xarray(self.gold, self.settings, self.columns, self.meta)

    @classmethod
    def from_mapping(cls, source: Mapping[str, object]) -> Records:
        """Records from a plain mapping; `as_records` lists the layouts."""
        return cls(*parse_mapping(source))

    @classmethod
    def from_arrays(
        cls,
        gold: object,
        zsl: object,
        icl: object,
        ft: object,
        *,
        h: object = None,
        m: object = None,
        demo_mass: object = None,
        columns: object = None,
        controls: Mapping[str, object] | None = None,
        meta: Mapping[str, object] | None = None,
    ) -> Records:
        """Records from bare arrays.

        `zsl`, `icl`, `ft`: log-probs [query, candidate], or predicted labels [query] (integers). `h`, `m` and
        `demo_mass`: a mapping from setting name to array, or the three arrays in the order zsl, icl, ft. An `m` may be
        a list of [layer, head, columns of that query] arrays, or padded with NaN; `columns` is then inferred.
        `controls`: further settings, each a `Setting`, a mapping with its fields, or log-probs alone.
        """
        source: dict[str, object] = {"gold": gold, "columns": columns, "meta": meta}
        source["settings"] = {"zsl": zsl, "icl": icl, "ft": ft, **(controls or {})}
        source |= {"h": h, "m": m, "demo_mass": demo_mass}
        return Records.from_mapping(source)


# ---------------------------------------------------------------------------------------------------------- checks


def _shape_error(name: str, what: str, got: object, wanted: object) -> UserError:
    return UserError(f"records: {name}.{what} has shape {got}, expected {wanted}; record every setting the same way.")


def _check(records: Records) -> None:
    missing = [name for name in MAIN_SETTINGS if name not in records.settings]
    if missing:
        raise UserError(f"records: setting {', '.join(missing)} is missing; zsl, icl and ft are all needed.")
    gold, n = records.gold, records.gold.shape[0]
    if gold.ndim != 1 or n == 0 or not np.issubdtype(gold.dtype, np.integer):
        raise UserError("records: gold must be a non-empty list of integer labels, one for each query.")
    scores = records["zsl"].log_probs
    if scores.ndim != 2 or scores.shape[0] != n:
        raise _shape_error("zsl", "log_probs", scores.shape, f"({n} queries, candidates)")
    if gold.min() < 0 or gold.max() >= scores.shape[1]:
        raise UserError(
            f"records: gold holds label {int(gold.max() if gold.min() >= 0 else gold.min())}, "
            f"but log_probs has {scores.shape[1]} candidates; labels run from 0 to {scores.shape[1] - 1}."
        )
    for what, dimensions in AXES.items():
        _check_shapes(records, what, dimensions)
    _check_columns(records)
    _check_token_scores(records.token_scores)


def _check_shapes(records: Records, what: str, dimensions: int) -> None:
    """Every setting that has this array has it in the shape of the first one that does."""
    wanted: tuple[int, ...] | None = None
    for name, setting in records.settings.items():
        array = cast("np.ndarray | None", getattr(setting, what))
        if array is None:
            continue
        if array.ndim != dimensions or array.shape[0] != records.n_queries or 0 in array.shape:
            described = f"{dimensions} axes, the first one the {records.n_queries} queries, none empty"
            raise _shape_error(name, what, array.shape, described)
        wanted = wanted or array.shape
        if array.shape != wanted:
            raise _shape_error(name, what, array.shape, wanted)


def _check_columns(records: Records) -> None:
    columns, m = records.columns, records["zsl"].m
    if columns is None:
        return
    if columns.shape != records.gold.shape or not np.issubdtype(columns.dtype, np.integer) or columns.min() < 1:
        raise UserError("records: columns must be one positive number of query tokens for each query.")
    if m is not None and columns.max() > m.shape[-1]:
        raise UserError(f"records: columns holds {int(columns.max())}, but m has only {m.shape[-1]} columns.")


def _check_token_scores(tokens: TokenScores | None) -> None:
    if tokens is None:
        return
    shapes = {name: scores.shape for name, scores in tokens.by_rule.items()}
    if "icl" not in shapes or len(set(shapes.values())) > 1 or shapes["icl"][2:] != tokens.demo.shape:
        raise UserError(f"records: token_scores must hold icl and have one shape, not {shapes}.")
