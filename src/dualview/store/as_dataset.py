"""A table of a store as an `xarray.Dataset`: its cells, and their layers, queries and candidates, as dimensions."""

from __future__ import annotations

import json
from typing import Any

from dualview.io.netcdf import import_xarray

_DIMENSIONS = {"cells": ["key"], "layers": ["key", "layer"], "queries": ["key", "query"]}


def to_dataset(rows: Any, table: str) -> Any:
    """One variable for each column; NaN where a cell has no such layer, query or candidate.

    Lists of numbers by candidate have the dimension `candidate`; other lists are JSON, and a missing text is empty.
    """
    xr = import_xarray("A NetCDF file")
    frame = rows.to_pandas()
    scores = [name for name in frame.columns if name.endswith("_log_probs")]
    for name in frame.columns.difference(scores):
        if frame[name].dtype.kind not in "biuf":
            frame[name] = [_text(value) for value in frame[name]]
    dims = _DIMENSIONS.get(table, ["row"])
    frame = frame.rename_axis("row") if dims == ["row"] else frame.set_index(dims)
    found = xr.Dataset.from_dataframe(frame.drop(columns=scores))
    if scores:
        long = frame[scores].explode(scores)
        number = long.groupby(level=dims).cumcount().rename("candidate")
        found = found.merge(xr.Dataset.from_dataframe(long.astype(float).set_index(number, append=True)))
    return found


def _text(value: Any) -> str:
    if hasattr(value, "tolist"):
        return json.dumps(value.tolist())
    return "" if value is None or value != value else str(value)  # NaN differs from itself
