"""Records as an xarray dataset, for those who slice by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from dualview.io.netcdf import import_xarray
from dualview.records.setting import Setting

DIMS = {
    "log_probs": ("query", "candidate"),
    "h": ("query", "layer", "d_model"),
    "m": ("query", "layer", "head", "key"),
    "demo_mass": ("query", "layer", "head"),
    "top_ids": ("query", "rank"),
    "top_probs": ("query", "rank"),
    "off_span": ("query", "layer", "d_model"),
    "off_contrast": ("query", "layer", "d_model"),
}


def to_xarray(
    gold: Int[np.ndarray, " query"],
    settings: Mapping[str, Setting],
    columns: Int[np.ndarray, " query"] | None,
    meta: Mapping[str, object],
) -> Any:
    """One variable for each kind of array, its first dimension `setting`; NaN (−1 for ids) where there is none."""
    xr = import_xarray("Records.to_xarray")
    variables: dict[str, Any] = {"gold": ("query", gold)}
    if columns is not None:
        variables["columns"] = ("query", columns, {"meaning": "m holds this many keys of the query, zeros after them"})
    for name, dims in DIMS.items():
        arrays = [getattr(setting, name) for setting in settings.values()]
        known = next((array for array in arrays if array is not None), None)
        if known is not None:
            missing = np.nan if np.issubdtype(known.dtype, np.floating) else -1
            stacked = np.stack([np.full_like(known, missing) if array is None else array for array in arrays])
            variables[name] = (("setting", *dims), stacked)
    return xr.Dataset(variables, coords={"setting": list(settings)}, attrs=dict(meta))
