"""Records: everything the metrics need of a run, in plain numpy.

A new array: a field of `Setting`, its axes in `AXES`, their names in `as_xarray.DIMS`. Files then hold it by its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import cast

from dualview.io.errors import UserError
from dualview.records.files import load_records, save_records
from dualview.records.records import Records
from dualview.records.setting import MAIN_SETTINGS, Setting, TokenScores

__all__ = ["MAIN_SETTINGS", "Records", "Setting", "TokenScores", "as_records", "load_records", "save_records"]


def as_records(source: object) -> Records:
    """Records from whatever holds them: `Records`, a result with `.records`, a records file, or a plain mapping.

    A mapping gives `gold` and, for each of zsl, icl and ft (and any control), `log_probs` and, optionally, `h`, `m`,
    `demo_mass`, `top_ids` and `top_probs`. These may be grouped by setting (`{"zsl": {"log_probs": …, "h": …}}`, also
    under `"settings"`), by array (`{"h": {"zsl": …}}`), be flat (`"h_zsl"`, `"zsl_h"`, `"zsl.h"`), or be a result's own
    `queries` list. A bare array under a setting's name is its log-probs, or its predicted labels when integers in one
    dimension.
    """
    if isinstance(source, Records):
        return source
    if isinstance(source, str | os.PathLike):
        return load_records(cast("str | os.PathLike[str]", source))
    if isinstance(source, Mapping):
        return Records.from_mapping(cast("Mapping[str, object]", source))
    inner = getattr(source, "records", None)
    if isinstance(inner, Records):
        return inner
    raise UserError(f"records: cannot read a {type(source).__name__}; give Records, a records file or a mapping.")
