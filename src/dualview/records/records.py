"""What a run leaves behind for the metrics: one `Setting` each for zsl, icl and ft, over the same queries.

Everything here is plain numpy: metrics never see a model, and a planted test can make records up
(`Records.from_arrays`, or `as_records` on a plain mapping). `save_records` and `load_records` keep them in one
safetensors file, so that every number can be recomputed without the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import Float, Int

from dualview.io.atomic import whole
from dualview.io.errors import UserError

MAIN_SETTINGS = ("zsl", "icl", "ft")
SCHEMA = "dualview.records/1"


@dataclass(frozen=True)
class Setting:
    """One way of asking the model every query (zsl, icl, ft, or a control), recorded at one token of each query."""

    log_probs: Float[np.ndarray, "query candidate"]
    """Mean log-probability of each candidate's tokens; -inf where a query has fewer candidates."""
    h: Float[np.ndarray, "query layer d_model"] | None = None
    """Attention output after the output projection, before the residual."""
    m: Float[np.ndarray, "query layer head column"] | None = None
    """Scaled pre-softmax logits against the query's own tokens, zero beyond `Records.columns[query]`."""
    demo_mass: Float[np.ndarray, "query layer head"] | None = None
    """λ: the softmax mass on the demonstration tokens."""


@dataclass(frozen=True)
class Records:
    """All settings of one run; `settings` always holds zsl, icl and ft, controls beside them under their own names.

    A record with unequal shapes cannot be made: every array of one kind has the shape of zsl's.
    """

    gold: Int[np.ndarray, " query"]
    settings: Mapping[str, Setting]
    columns: Int[np.ndarray, " query"] | None = None
    meta: Mapping[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        _check(self)

    def __getitem__(self, name: str) -> Setting:
        return self.settings[name]

    @property
    def n_queries(self) -> int:
        return int(self.gold.shape[0])

    @property
    def controls(self) -> Mapping[str, Setting]:
        """The settings beside zsl, icl and ft."""
        return {name: setting for name, setting in self.settings.items() if name not in MAIN_SETTINGS}

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
        from dualview.records.parsing import records_from_mapping

        source: dict[str, object] = {"gold": gold, "columns": columns, "meta": meta}
        source["settings"] = {"zsl": zsl, "icl": icl, "ft": ft, **(controls or {})}
        source |= {"h": h, "m": m, "demo_mass": demo_mass}
        return records_from_mapping(source)


# ---------------------------------------------------------------------------------------------------------- checks


def _shape_error(name: str, what: str, got: object, wanted: object) -> UserError:
    return UserError(f"records: {name}.{what} has shape {got}, expected {wanted}; record every setting alike.")


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
    for what, dimensions in (("log_probs", 2), ("h", 3), ("m", 4), ("demo_mass", 3)):
        _check_alike(records, what, dimensions)
    _check_columns(records)


def _check_alike(records: Records, what: str, dimensions: int) -> None:
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


def as_records(source: object) -> Records:
    """Records from whatever holds them: `Records`, a result with `.records`, a records file, or a plain mapping.

    A mapping gives `gold` and, for each of zsl, icl and ft (and any control), `log_probs` and where wanted `h`, `m` and
    `demo_mass`. These may be grouped by setting (`{"zsl": {"log_probs": …, "h": …}}`, also under `"settings"`), by
    array (`{"h": {"zsl": …}}`), be flat (`"h_zsl"`, `"zsl_h"`, `"zsl.h"`), or be a result's own `queries` list. A bare
    array under a setting's name is its log-probs, or its predicted labels when integers in one dimension.
    """
    from dualview.records.parsing import records_from_mapping

    if isinstance(source, Records):
        return source
    if isinstance(source, str | os.PathLike):
        return load_records(cast("str | os.PathLike[str]", source))
    if isinstance(source, Mapping):
        return records_from_mapping(cast("Mapping[str, object]", source))
    inner = getattr(source, "records", None)
    if isinstance(inner, Records):
        return inner
    raise UserError(f"records: cannot read a {type(source).__name__}; give Records, a records file or a mapping.")


# ------------------------------------------------------------------------------------------------------------- files


def save_records(records: Records, path: str | os.PathLike[str]) -> Path:
    """Write records to one safetensors file, atomically: the file is whole or absent.

    Tensors are named `gold`, `columns` and `<setting>/<array>`; the metadata holds the schema and `meta` as JSON.
    """
    from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

    path = Path(path)
    tensors: dict[str, np.ndarray] = {"gold": np.ascontiguousarray(records.gold)}
    if records.columns is not None:
        tensors["columns"] = np.ascontiguousarray(records.columns)
    for name, setting in records.settings.items():
        for what in ("log_probs", "h", "m", "demo_mass"):
            if (array := getattr(setting, what)) is not None:
                tensors[f"{name}/{what}"] = np.ascontiguousarray(array)
    try:
        header = json.dumps({"schema": SCHEMA, "settings": list(records.settings), "meta": dict(records.meta)})
    except TypeError as error:
        raise UserError(f"records: meta cannot be written as JSON ({error}); keep it to plain values.") from None
    with whole(path) as temporary:
        save_file(tensors, temporary, {"dualview": header})
    return path


def load_records(path: str | os.PathLike[str]) -> Records:
    """Read what `save_records` wrote, bit for bit."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such records file; `dualview run --save-records` writes one.")
    try:
        with cast("Any", safe_open(path, framework="numpy")) as file:
            metadata = cast("dict[str, str]", file.metadata() or {})
            header = json.loads(metadata.get("dualview", "{}"))
            tensors = {name: cast("np.ndarray", file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable records file ({error}); write it again.") from None
    if header.get("schema") != SCHEMA or "gold" not in tensors:
        raise UserError(f"{path}: not a records file of schema {SCHEMA}; write it with `dualview run --save-records`.")
    settings: dict[str, Setting] = {}
    for name in header["settings"]:
        arrays = {what: tensors.get(f"{name}/{what}") for what in ("log_probs", "h", "m", "demo_mass")}
        if arrays["log_probs"] is None:
            raise UserError(f"{path}: {name}/log_probs is missing; write the records again.")
        settings[name] = Setting(arrays["log_probs"], arrays["h"], arrays["m"], arrays["demo_mass"])
    return Records(tensors["gold"], settings, tensors.get("columns"), header["meta"])
