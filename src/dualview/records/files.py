"""Records in one safetensors file, so that every number can be recomputed without the model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np

from dualview.io.atomic import whole
from dualview.io.errors import UserError
from dualview.records.records import Records
from dualview.records.setting import AXES, Setting, TokenScores

SCHEMA = "dualview.records/1"


def save_records(records: Records, path: str | os.PathLike[str]) -> Path:
    """Write records to one safetensors file, atomically: the file is whole or absent.

    Tensors are named `gold`, `columns`, `<setting>/<array>`, `token_demo` and `token_scores/<rule>`; the metadata holds
    the schema, the names in order and `meta` as JSON.
    """
    from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

    path, records = Path(path), records.on_host()
    tensors: dict[str, np.ndarray] = {"gold": np.ascontiguousarray(records.gold)}
    if records.columns is not None:
        tensors["columns"] = np.ascontiguousarray(records.columns)
    for name, setting in records.settings.items():
        for what in AXES:
            if (array := getattr(setting, what)) is not None:
                tensors[f"{name}/{what}"] = np.ascontiguousarray(array)
    header: dict[str, object] = {"schema": SCHEMA, "settings": list(records.settings), "meta": dict(records.meta)}
    if records.token_scores is not None:
        header["token_scores"] = list(records.token_scores.by_rule)
        tensors["token_demo"] = np.ascontiguousarray(records.token_scores.demo)
        for rule, scores in records.token_scores.by_rule.items():
            tensors[f"token_scores/{rule}"] = np.ascontiguousarray(scores)
    try:
        text = json.dumps(header)
    except TypeError as error:
        raise UserError(f"records: meta cannot be written as JSON ({error}); keep it to plain values.") from None
    with whole(path) as temporary:
        save_file(tensors, temporary, {"dualview": text})
    return path


def load_records(path: str | os.PathLike[str]) -> Records:
    """Read what `save_records` wrote, bit for bit; files of earlier versions lack the arrays added since."""
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
        arrays = {what: tensors[f"{name}/{what}"] for what in AXES if f"{name}/{what}" in tensors}
        if "log_probs" not in arrays:
            raise UserError(f"{path}: {name}/log_probs is missing; write the records again.")
        settings[name] = Setting(**arrays)
    tokens = None
    if "token_scores" in header:
        rules = {rule: tensors[f"token_scores/{rule}"] for rule in header["token_scores"]}
        tokens = TokenScores(tensors["token_demo"], rules)
    return Records(tensors["gold"], settings, tensors.get("columns"), header["meta"], tokens)
