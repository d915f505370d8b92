"""Read back a model that was saved with its variant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard, cast

import safetensors
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dualview.io.errors import UserError
from dualview.variants.registry import VARIANTS, attach, variant_parameters


def load(folder: str | Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model that `save_pretrained(folder)` wrote, with its variant attached and its learnt coefficients.

    `from_pretrained` alone builds the bare architecture: it drops the variant and what was learnt with it.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json; name the folder that save_pretrained wrote.")
    files = _weight_files(folder)
    config = cast(Any, AutoConfig).from_pretrained(folder)
    settings: object = getattr(config, "dualview", None)
    kind = VARIANTS.get(str(settings.get("name"))) if _is_settings(settings) else None
    if not _is_settings(settings) or kind is None:
        raise UserError(f"{folder}/config.json names no known attention variant; load it with from_pretrained instead.")
    model: PreTrainedModel = cast(Any, AutoModelForCausalLM).from_pretrained(
        folder, config=config, dtype=dtype or "auto"
    )
    attach(model, kind.from_dict(settings))
    wanted = variant_parameters(model)
    saved = _tensors(files, set(wanted))
    if missing := sorted(wanted.keys() - saved.keys()):
        raise UserError(f"{folder} has no weights for {missing[0]}; it was saved before the variant was attached.")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(saved[name])
    return model


def _is_settings(settings: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(settings, dict)


def _weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, one or several."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    files = [folder / name for name in sorted(names)]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{folder} lacks the weights {missing[0].name}; save the model again with save_pretrained.")
    return files


def _tensors(files: list[Path], names: set[str]) -> dict[str, Tensor]:
    """These tensors from the files."""
    found: dict[str, Tensor] = {}
    for file in files:
        with cast(Any, safetensors).safe_open(file, framework="pt") as tensors:
            found.update({name: tensors.get_tensor(name) for name in names & set(tensors.keys())})
    return found
