"""Records from plain mappings, in any of the layouts that `as_records` lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from jaxtyping import Float, Int

from dualview.io.errors import UserError
from dualview.records.setting import AXES, MAIN_SETTINGS, Setting


@dataclass
class _Draft:
    """Fields by setting, while a mapping is being read."""

    gold: object = None
    columns: object = None
    meta: object = None
    settings: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])

    def put(self, setting: str, name: str, value: object) -> None:
        if value is not None:
            self.settings.setdefault(setting, {})[name] = value

    def put_setting(self, setting: str, value: object) -> None:
        if isinstance(value, Setting):
            for name in AXES:
                self.put(setting, name, getattr(value, name))
        elif isinstance(value, Mapping):
            for key, array in cast("Mapping[str, object]", value).items():
                if key not in AXES:
                    raise UserError(f"records: {setting}.{key} is no field of a setting; use {', '.join(AXES)}.")
                self.put(setting, key, array)
        else:
            self.put(setting, "log_probs", value)


Parsed = tuple[Int[np.ndarray, " query"], Mapping[str, Setting], Int[np.ndarray, " query"] | None, Mapping[str, object]]
"""gold, settings, columns and meta of `Records`, before their shapes are checked against each other."""


def parse_mapping(source: Mapping[str, object]) -> Parsed:
    """The records a plain mapping describes; see `dualview.records.as_records` for the layouts."""
    draft = _Draft()
    for key, value in source.items():
        if value is not None:
            _read_entry(draft, key, value)
    if draft.gold is None:
        raise UserError("records: the field gold is missing; give the right label's index for each query.")
    gold = _integers("gold", draft.gold)
    maps, columns = _pad_maps({name: fields["m"] for name, fields in draft.settings.items() if "m" in fields})
    columns = columns if draft.columns is None else _integers("columns", draft.columns)
    width = _candidates(draft, gold)
    settings = {name: _setting(name, fields, maps.get(name), width) for name, fields in draft.settings.items()}
    return gold, settings, columns, cast("Mapping[str, object]", draft.meta or {})


def _read_entry(draft: _Draft, key: str, value: object) -> None:
    if key in ("gold", "columns", "meta"):
        setattr(draft, key, value)
    elif key == "settings":
        for name, setting in _mapping(key, value).items():
            draft.put_setting(name, setting)
    elif key == "queries":
        _read_queries(draft, cast("Sequence[Mapping[str, object]]", value))
    elif key in AXES:
        for name, array in _by_setting(key, value).items():
            draft.put(name, key, array)
    elif isinstance(value, Mapping | Setting) or (parts := _split_key(key)) is None:
        draft.put_setting(key, cast("object", value))
    else:
        draft.put(*parts, value)


def _read_queries(draft: _Draft, rows: Sequence[Mapping[str, object]]) -> None:
    """A result's `queries`: `{gold, zsl, icl, ft}` a row, with log-probs for that row's candidates."""
    try:
        draft.gold = [row["gold"] for row in rows]
        for name in MAIN_SETTINGS:
            scores = [np.asarray(row[name], dtype=np.float64) for row in rows]
            table = np.full((len(rows), max((len(row) for row in scores), default=0)), -np.inf)
            for i, row in enumerate(scores):
                table[i, : len(row)] = row
            draft.put(name, "log_probs", table)
    except (KeyError, TypeError, ValueError):
        raise UserError("records: each row of queries must hold gold, zsl, icl and ft.") from None


def _split_key(key: str) -> tuple[str, str] | None:
    """`h_icl`, `icl_h` and `icl.h` are all the array h of the setting icl."""
    for array in AXES:
        for separator in "_.":
            if key.startswith(array + separator):
                return key[len(array) + 1 :], array
            if key.endswith(separator + array):
                return key[: -len(array) - 1], array
    return None


def _mapping(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise UserError(f"records: {name} must be a mapping from setting names.")
    return cast("Mapping[str, object]", value)


def _by_setting(name: str, value: object) -> Mapping[str, object]:
    if isinstance(value, list | tuple) and len(cast("list[object]", value)) == len(MAIN_SETTINGS):
        return dict(zip(MAIN_SETTINGS, cast("list[object]", value), strict=True))
    if not isinstance(value, Mapping):
        raise UserError(f"records: {name} must name its settings, or list three arrays in the order zsl, icl, ft.")
    return cast("Mapping[str, object]", value)


def _integers(name: str, value: object) -> Int[np.ndarray, " query"]:
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or not bool(np.all(array == np.floor(array))):
        raise UserError(f"records: {name} must be a list of whole numbers, one for each query.")
    return array.astype(np.int64)


def _floats(name: str, value: object) -> Float[np.ndarray, "*_shape"]:
    try:
        array = np.asarray(value)
        if array.dtype.kind == "c":
            raise TypeError
        return array if array.dtype.kind == "f" else array.astype(np.float64)
    except (TypeError, ValueError):
        raise UserError(f"records: {name} is not a rectangular array of real numbers.") from None


def _candidates(draft: _Draft, gold: Int[np.ndarray, " query"]) -> int:
    """How many candidates there are, so that bare predictions can be written as scores."""
    widths = [int(gold.max(initial=0)) + 1]
    for name, fields in draft.settings.items():
        scores = _floats(f"{name}.log_probs", fields.get("log_probs", 0.0))
        widths.append(scores.shape[1] if scores.ndim == 2 else int(scores.max(initial=0)) + 1)
    return max(widths)


def _setting(name: str, fields: Mapping[str, object], m: np.ndarray | None, width: int) -> Setting:
    given = fields.get("log_probs")
    if given is None:
        raise UserError(f"records: {name}.log_probs is missing; give one score for each query and candidate.")
    scores = _floats(f"{name}.log_probs", given)
    if scores.ndim == 1:
        predicted = _integers(f"{name}.log_probs", given)
        scores = np.where(np.arange(width) == predicted[:, None], 0.0, -np.inf)
    arrays = {"log_probs": scores} | ({} if m is None else {"m": m})
    for what in AXES:
        if what in fields and what not in arrays:
            arrays[what] = np.asarray(fields[what]) if what == "top_ids" else _floats(f"{name}.{what}", fields[what])
    for what, array in arrays.items():
        if array.ndim != AXES[what]:
            raise UserError(f"records: {name}.{what} has shape {array.shape}, expected {AXES[what]} axes.")
    return Setting(**arrays)


def _pad_maps(given: Mapping[str, object]) -> tuple[Mapping[str, np.ndarray], Int[np.ndarray, " query"] | None]:
    """Attention maps as one padded array a setting; columns from ragged lists, or from zsl's NaN padding."""
    arrays: dict[str, np.ndarray] = {}
    columns: np.ndarray | None = None
    for name, value in given.items():
        rows = [np.asarray(q) for q in cast("list[Any]", value)] if isinstance(value, list | tuple) else []
        if len({row.shape for row in rows}) > 1:
            if len({row.shape[:-1] for row in rows}) > 1 or rows[0].ndim != 3:
                raise UserError(f"records: each query's {name}.m must be [layer, head, columns of that query].")
            own = np.array([row.shape[-1] for row in rows], dtype=np.int64)
            if columns is not None and not np.array_equal(own, columns):
                raise UserError(f"records: {name}.m and another setting's m differ in a query's number of columns.")
            columns = own
            arrays[name] = np.stack([np.pad(q, ((0, 0), (0, 0), (0, int(columns.max()) - q.shape[-1]))) for q in rows])
        else:
            arrays[name] = _floats(f"{name}.m", cast("object", value))
    base = arrays.get("zsl")
    if columns is None and base is not None and bool(np.isnan(base).any()):
        # How many columns each query fills, the rest being NaN in every layer and head.
        filled = np.isfinite(base).any(axis=tuple(range(1, base.ndim - 1)))
        own = np.where(filled, np.arange(1, base.shape[-1] + 1), 1).max(axis=1).astype(np.int64)
        beyond = np.arange(base.shape[-1]) >= own.reshape(-1, 1, 1, 1)
        return {name: np.where(beyond, 0.0, array) for name, array in arrays.items()}, own
    return arrays, columns
