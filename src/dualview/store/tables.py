"""A result as rows: one flat row per cell, and longer tables of its layers, queries and controls.

Column names are the result file's keys joined by underscores. The rows do not say when or where a cell was run, so
two runs of the same cell give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]

from dualview.options import RunOptions

TableName = Literal["cells", "layers", "queries", "controls"]
ArrowTable = Any
ArrowType = Any
ArrowSchema = Any
"""pyarrow ships no types."""
TABLES: tuple[TableName, ...] = get_args(TableName)

# The controls' names for metrics, and the column that holds the metric's value.
_VALUE_COLUMN = {
    "accuracy_icl": "accuracy_icl_gain",
    "accuracy_ft": "accuracy_ft_gain",
    "rec2ftp": "rec2ftp",
    "agreement": "agreement",
    "label_contrast": "label_contrast",
    "sim_aou": "sim_aou_raw",
    "sim_aou_normalised": "sim_aou_normalised",
    "sim_am": "sim_am_delta",
    "sim_am_after": "sim_am_after",
}
_BOUNDS = ("floor", "ceiling", "position")
_KENDALL = ("released", "dual_v", "dual_k")

# Numbers of the summary row, by their place in the result.
_NUMBERS: tuple[str, ...] = (
    *(f"accuracy.{name}" for name in ("zsl", "icl", "ft")),
    *(f"rec2ftp.{name}" for name in ("value", "chance", "p", "reverse")),
    *(f"sim_aou.{name}" for name in ("raw", "normalised", "noise_floor")),
    *(f"sim_am.{name}" for name in ("before", "after", "delta")),
    *(f"update_norm.{name}" for name in ("icl", "ft")),
    "agreement.value",
    "label_contrast.value",
    "label_contrast.log_odds.value",
    "ft.final_loss",
    "demo_mass.mean",
    "kendall.value",
    *(f"kendall.{form}{at}.{tau}" for form in _KENDALL for at in ("", "_lr0") for tau in ("tau_token", "tau_demo")),
    *(f"overlap.{name}.token_overlap" for name in ("zsl", "ft", "icl_reordered")),
    *(f"order_sensitivity.{name}" for name in ("icl", "ft")),
    *(f"calibrated.accuracy.{name}" for name in ("zsl", "icl", "ft")),
)
_NEWER = ("agreement", "label_contrast")
"""Metrics whose column is their name; older ones keep `_value`."""
_COUNTS = ("task.shots_used", "rec2ftp.n_ft", "rec2ftp.n_both", "ft.steps", "provenance.threads")
_LEVELS = ("learning", "predictions", "representations", "attention", "labels")
_TEXTS = (
    "ft.status",
    "verdict.overall",
    "verdict.sentence",
    *(f"verdict.levels.{level}.outcome" for level in _LEVELS),
)
_ABOUT = ("architecture", "weights_hash", "prompts_hash")

_LAYERED = {
    "sim_aou_raw": "sim_aou.raw_per_layer",
    "sim_aou_normalised": "sim_aou.normalised_per_layer",
    "sim_aou_noise_floor": "sim_aou.noise_floor_per_layer",
    "sim_am_before": "sim_am.before_per_layer",
    "sim_am_after": "sim_am.after_per_layer",
    "sim_am_delta": "sim_am.delta_per_layer",
    "update_norm_icl": "update_norm.icl_per_layer",
    "update_norm_ft": "update_norm.ft_per_layer",
    "label_contrast": "label_contrast.per_layer",
    "demo_mass": "demo_mass.per_layer",
    "sim_aou_raw_p": "controls.sim_aou.p_per_layer.raw",
    "sim_aou_raw_p_holm": "controls.sim_aou.p_per_layer.holm",
    "sim_am_delta_p": "controls.sim_am.p_per_layer.raw",
    "sim_am_delta_p_holm": "controls.sim_am.p_per_layer.holm",
}
_SETTINGS = ("zsl", "icl", "ft")


@dataclass(frozen=True)
class KeyedResult:
    """A result with its key and options."""

    key: str
    asked: str
    code: str
    options: RunOptions
    """As given."""
    content: Mapping[str, Any]
    """The result's JSON."""


@lru_cache
def schema(name: TableName) -> ArrowSchema:
    """The fixed columns of a table; a missing number is null."""
    key = pa.field("key", pa.string())
    if name == "layers":
        return pa.schema([key, ("layer", pa.int32()), *((column, pa.float64()) for column in _LAYERED)])
    if name == "queries":
        scores = [(f"{setting}_log_probs", pa.list_(pa.float64())) for setting in _SETTINGS]
        answers = [(f"{setting}_predicted", pa.int32()) for setting in _SETTINGS]
        return pa.schema([key, ("query", pa.int32()), ("gold", pa.int32()), *answers, *scores])
    if name == "controls":
        texts = [(column, pa.string()) for column in ("metric", "kind", "name")]
        return pa.schema([key, *texts, ("value", pa.float64()), ("p", pa.float64())])
    return pa.schema([key, *_cell_columns()])


def _cell_columns() -> list[tuple[str, ArrowType]]:
    number, whole, text = pa.float64(), pa.int64(), pa.string()
    hints = get_type_hints(RunOptions)
    columns = [("asked", text), ("code", text)]
    columns += [(f.name, _type_of(f.name, hints[f.name])) for f in fields(RunOptions)]
    columns += [("seed_asked", text), ("lr_asked", text), ("n_queries_used", whole)]
    columns += [(name, text) for name in _ABOUT]
    columns += [(_column(path), whole) for path in _COUNTS]
    columns += [(_column(path), number) for path in _NUMBERS]
    for metric, value in _VALUE_COLUMN.items():
        columns += [(value, number)] if value.endswith("_gain") else []
        columns += [(f"{value}_{part}", number) for part in ("ci_low", "ci_high", *_BOUNDS)]
        columns += [(f"{value}_p", number)] if metric != "rec2ftp" else []
    columns += [(_column(path), text) for path in _TEXTS]
    return [*columns, ("warnings", pa.list_(text))]


def _column(path: str) -> str:
    """A column's name.

    >>> _column("task.shots_used"), _column("agreement.value"), _column("verdict.levels.labels.outcome")
    ('shots_used', 'agreement', 'verdict_labels')
    """
    plain = path.removeprefix("provenance.").removeprefix("task.").removesuffix(".overall").removesuffix(".outcome")
    plain = plain.replace(".levels.", ".")
    return plain.removesuffix(".value" if plain.startswith(_NEWER) else "").replace(".", "_")


def _type_of(name: str, kind: Any) -> ArrowType:
    """The type of an option's column; a seed or a rate is the number used, and `auto` is in seed_asked or lr_asked."""
    if name == "adapter":
        return pa.list_(pa.string())
    parts = get_args(kind) if get_origin(kind) is not Literal else ()
    for python, arrow in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64())):
        if kind is python or python in parts:
            return pa.list_(pa.float64()) if name == "lr_grid" else arrow
    return pa.string()


def tables_of(cell: KeyedResult) -> dict[TableName, ArrowTable]:
    """All four tables of one cell."""
    rows: dict[TableName, list[dict[str, Any]]] = {
        "cells": [_cell(cell)],
        "layers": _layers(cell.content),
        "queries": _queries(cell.content["queries"]),
        "controls": _controls(cell.content.get("controls") or {}),
    }
    return {
        name: pa.Table.from_pylist([{"key": cell.key, **row} for row in found], schema=schema(name))
        for name, found in rows.items()
    }


def _plain(value: Any) -> Any:
    """A value of an option as a column holds it: paths are text."""
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _cell(cell: KeyedResult) -> dict[str, Any]:
    content, options = cell.content, cell.options
    row: dict[str, Any] = {"asked": cell.asked, "code": cell.code}
    for name, value in vars(options).items():
        row[name] = [_plain(each) for each in value] if isinstance(value, tuple) else _plain(value)
    about = content["provenance"]
    row |= {
        "task": content["task"]["name"],
        "device": about["device"],
        "seed": about["seeds"]["demos"],
        "seed_asked": str(options.seed),
        "lr": content["ft"]["lr"],
        "lr_asked": str(options.lr),
        "n_queries_used": content["task"]["n_queries"],
        "warnings": list(content["warnings"]),
        **{name: about[name] for name in _ABOUT},
    }
    row |= {_column(path): at(content, path) for path in (*_COUNTS, *_NUMBERS, *_TEXTS)}
    for metric, value in _VALUE_COLUMN.items():
        found = at(content, f"verdict.by_metric.{metric}")
        if found is not None:
            row |= {f"{value}_{part}": found[part] for part in _BOUNDS}
            row[f"{value}_ci_low"], row[f"{value}_ci_high"] = found["ci"] or (None, None)
            row[f"{value}_p"] = found["p"]
            row[value] = found["value"]
    row.pop("rec2ftp", None)  # its value is in rec2ftp_value
    return row


def at(content: Any, path: str) -> Any:
    """The value at a dotted path; None where a part of it is missing."""
    for part in path.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


def _layers(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns: dict[str, Sequence[Any]] = {name: at(content, path) or [] for name, path in _LAYERED.items()}
    depth = max(len(values) for values in columns.values())
    return [
        {"layer": layer, **{name: values[layer] for name, values in columns.items() if values}}
        for layer in range(depth)
    ]


def _queries(queries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    answers = {name: _predicted([query[name] for query in queries]) for name in _SETTINGS}
    return [
        {
            "query": index,
            "gold": query["gold"],
            **{f"{name}_predicted": answers[name][index] for name in _SETTINGS},
            **{f"{name}_log_probs": query[name] for name in _SETTINGS},
        }
        for index, query in enumerate(queries)
    ]


def _predicted(scores: Sequence[Sequence[float | None]]) -> list[int]:
    """The best candidate of each query; rows are padded where queries have fewer candidates."""
    from dualview.metrics.predictions import predictions  # imports scipy, which reading a store does not need

    widest = max(len(row) for row in scores)
    padded = np.full((len(scores), widest), -np.inf)
    for index, row in enumerate(scores):
        padded[index, : len(row)] = [np.nan if score is None else score for score in row]
    return [int(label) for label in predictions(padded)]


def _controls(controls: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for metric, found in controls.items():
        chances = found.get("floors_p") or {}
        for kind in ("floors", "ceilings", "others"):
            rows += [
                {"metric": metric, "kind": kind[:-1], "name": name, "value": value, "p": chances.get(name)}
                for name, value in (found.get(kind) or {}).items()
            ]
    return rows
