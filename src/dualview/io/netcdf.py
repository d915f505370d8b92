"""Datasets with named dimensions as NetCDF files, which xarray, R, Julia and MATLAB read (extra `xarray`)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from dualview.io.atomic import whole
from dualview.io.errors import UserError, first_line


def import_xarray(what: str) -> Any:
    """xarray, or the sentence that says how to install it."""
    try:
        return importlib.import_module("xarray")
    except ImportError:
        raise UserError(f"{what} needs xarray; install it with: pip install 'dualview[xarray]'.") from None


def write_netcdf(dataset: Any, path: Path) -> None:
    """Write an `xarray.Dataset`, whole or not at all.

    The format is NetCDF 3 with 64-bit offsets, which scipy writes, so no HDF5 library is needed. It holds text and
    numbers: attributes of another kind are written as JSON.
    """
    plain = {
        k: v if isinstance(v, str | int | float) and not isinstance(v, bool) else json.dumps(v)
        for k, v in dataset.attrs.items()
    }
    with whole(path) as temporary:
        try:
            dataset.assign_attrs(plain).to_netcdf(temporary, engine="scipy", format="NETCDF3_64BIT")
        except (TypeError, ValueError) as error:  # a number that the format cannot hold
            raise UserError(f"{path} cannot be written as NetCDF ({first_line(error)}); export parquet.") from error
