"""A compiled patch as a file: written with what it was made of, and read back for the same weights only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from dualview.duality.on_model.feed_forward import feed_forwards
from dualview.duality.on_model.shared_patch import LowRank, ReusableBlock, ReusablePatch
from dualview.io.atomic import whole
from dualview.io.errors import UserError
from dualview.models.language_model import LanguageModel

SCHEMA = "dualview.patch/1"


def save_patch(path: Path, patch: ReusablePatch, lm: LanguageModel, metadata: Mapping[str, Any]) -> Path:
    """Write a patch as safetensors, whole or not at all; the metadata says what it was made of."""
    from safetensors.torch import save_file

    names = {module: name for name, module in lm.model.named_modules()}
    tensors: dict[str, Tensor] = {}
    for index, block in enumerate(patch.blocks):
        parts: dict[str, LowRank | Tensor | None] = {"readers": block.readers, "carrier": block.carrier}
        for part, delta in parts.items():
            if isinstance(delta, LowRank):
                tensors[f"{index}.{part}.left"], tensors[f"{index}.{part}.right"] = delta.left, delta.right
            elif delta is not None:
                tensors[f"{index}.{part}.vector"] = delta
    header = {"schema": SCHEMA, "carriers": [names[place.carrier] for place in patch.places], **metadata}
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with whole(path) as temporary:
        save_file(kept, temporary, {"dualview": json.dumps(header)})
    return path


def read_metadata(path: Path | str) -> dict[str, Any]:
    """What a patch file says of itself, without its tensors."""
    return _open(Path(path))[0]


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"There is no patch file {path}; `dualview compile` writes one.")
    try:
        with cast("Any", safe_open(path, framework="pt")) as file:
            header = json.loads((cast("dict[str, str]", file.metadata() or {})).get("dualview", "{}"))
            tensors = {name: cast("Tensor", file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable patch file ({error}); compile it again.") from None
    if not isinstance(header, dict) or cast("dict[str, Any]", header).get("schema") != SCHEMA:
        raise UserError(f"{path} is not a patch of schema {SCHEMA}; `dualview compile` writes one.")
    return cast("dict[str, Any]", header), tensors


def load_patch(path: Path | str, lm: LanguageModel) -> ReusablePatch:
    """A compiled patch, ready for the model it was made for; any other model is refused."""
    path = Path(path)
    header, tensors = _open(path)
    if header["weights_hash"] != lm.weights_hash:
        dtype = header.get("options", {}).get("dtype", "float32")
        raise UserError(
            f"The patch {path} was made for the weights of {header['model']} in {dtype}, and {lm.name} has others; "
            "compile it again for this model and dtype."
        )
    places = feed_forwards(lm)
    names = {module: name for name, module in lm.model.named_modules()}
    if [names[place.carrier] for place in places] != header["carriers"]:
        raise UserError(f"The patch {path} was made for other modules than {lm.name} has; compile it again.")
    blocks: list[ReusableBlock] = []
    for index, place in enumerate(places):
        readers, carrier = (_part(tensors, f"{index}.{part}", lm) for part in ("readers", "carrier"))
        if carrier is None or isinstance(readers, Tensor) or (readers is None) != (not place.readers):
            raise UserError(f"The patch {path} lacks a part of block {index}; compile it again.")
        blocks.append(ReusableBlock(readers, carrier))
    return ReusablePatch(places, tuple(blocks))


def _part(tensors: Mapping[str, Tensor], name: str, lm: LanguageModel) -> LowRank | Tensor | None:
    if f"{name}.vector" in tensors:
        return tensors[f"{name}.vector"].to(lm.device)
    left, right = tensors.get(f"{name}.left"), tensors.get(f"{name}.right")
    return None if left is None or right is None else LowRank(left.to(lm.device), right.to(lm.device))
