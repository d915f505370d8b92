"""A context as one patch for every query: the rank-1 patches of `context_patch`, fitted by least squares on many.

With queries i = 1 … n, their last tokens are fitted together, block by block, each reading the patched states of the
block before it (`block_patches` has the formulas, with the ridge μ).

For n = 1 and μ → 0 these are the patches of one query, exactly; for n up to the width and μ → 0 the patched zero-shot
model still gives every fitted query its in-context logits (but for Gemma's norms, which have too few numbers). What it
does for queries it has not seen is an empirical question, which `compile` answers. Token-independent patches by least
squares are Mazzawi et al.'s idea (2025, arXiv 2510.08734, "thought matrices"); the one here is a change of weights that
all tokens of a prompt meet, fitted at the prompts' last tokens only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from dualview.anatomy.layers import Projection
from dualview.duality.on_model.block_patches import (
    Aims,
    BlockPatch,
    BlockPatches,
    LowRank,
    fitted,
    is_linear,
    recorded_aims,
)
from dualview.duality.on_model.feed_forward import FeedForward, feed_forwards
from dualview.duality.on_model.query_packing import query_pack
from dualview.io.atomic import whole
from dualview.io.errors import UserError
from dualview.learning.adapter_writing import Exported, truncated
from dualview.learning.adapters import TWIN, Adapter, LinearChange
from dualview.models.language_model import LanguageModel
from dualview.models.prefix import Prefix
from dualview.tasks.prompts import Query


def in_context_aims(
    lm: LanguageModel, places: Sequence[FeedForward], queries: Sequence[Query], demos: Prefix
) -> tuple[Aims, ...]:
    """Run the queries behind the demonstrations and keep every block's states at their last tokens."""
    pack = query_pack(lm, queries, demos)
    return recorded_aims(places, pack.last, lambda: pack.run(lm))


def fit_patch(
    lm: LanguageModel,
    places: Sequence[FeedForward],
    queries: Sequence[Query],
    bare: Sequence[int],
    aims: Sequence[Aims],
    ridge: float,
) -> BlockPatches:
    """Fit every block in one pass over the queries without demonstrations, each block on patched states.

    `ridge` is μ in units of the mean squared length of what a map reads; `bare` is what comes before a query without
    demonstrations (BOS, or nothing).
    """
    if not ridge >= 0:
        raise UserError(f"A ridge is a number of at least 0, not {ridge}.")
    if not queries:
        raise UserError("A reusable patch is fitted on queries: give at least one.")
    # BOS is put into the queries, since its own states change with every block that is patched.
    pack = query_pack(lm, [replace(q, ids=(*bare, *q.ids)) for q in queries], Prefix(0))
    return fitted(places, aims, pack.last, lambda: pack.run(lm), ridge=ridge)


def patch_as_adapter(patch: BlockPatches, lm: LanguageModel, rank: int | None) -> Exported:
    """A patch as a LoRA adapter: the readers' W D and the carriers' ΔW, of at most as many ranks as fitted rows."""
    must_be_linear([block.place for block in patch.blocks], lm)
    names = {module: name for name, module in lm.model.named_modules()}
    changes: list[LinearChange] = []
    for block in patch.blocks:
        place = block.place
        if block.readers is not None:
            for reader in place.readers:
                weight = Projection("", reader, None).weight().to(block.readers.left)
                made = (block.readers.right, weight @ block.readers.left.T)
                changes.append(LinearChange(names[reader], reader, *made))
        carrier = block.carrier
        assert isinstance(carrier, LowRank)
        changes.append(LinearChange(names[place.carrier], place.carrier, carrier.right, carrier.left.T.contiguous()))
    return truncated(Adapter(tuple(changes)), rank)


def must_be_linear(places: Sequence[FeedForward], lm: LanguageModel) -> None:
    """Refuse places whose patch is no change of linear maps: LoRA cannot hold it."""
    if not all(is_linear(module) for place in places for module in (place.carrier, *place.readers)):
        raise UserError(f"A patch of {lm.name} also changes norms, which LoRA cannot hold; use --format patch.")


SCHEMA = "dualview.patch/1"


def save_patch(
    path: Path,
    patch: BlockPatches,
    lm: LanguageModel,
    metadata: Mapping[str, Any],
    twin: BlockPatches | None = None,
) -> Path:
    """Write a patch as safetensors, whole or not at all; the metadata records what it was made from.

    twin   the patch of the same demonstrations with flipped labels: in the same file, under `flipped_labels/`
    """
    from safetensors.torch import save_file

    names = {module: name for name, module in lm.model.named_modules()}
    tensors = _tensors(patch, "") | ({} if twin is None else _tensors(twin, f"{TWIN}/"))
    carriers = [names[block.place.carrier] for block in patch.blocks]
    header = {"schema": SCHEMA, "carriers": carriers, "twin": twin is not None, **metadata}
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with whole(path) as temporary:
        save_file(kept, temporary, {"dualview": json.dumps(header)})
    return path


def _tensors(patch: BlockPatches, prefix: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, block in enumerate(patch.blocks):
        parts: dict[str, LowRank | Tensor | None] = {"readers": block.readers, "carrier": block.carrier}
        for part, delta in parts.items():
            name = f"{prefix}{index}.{part}"
            if isinstance(delta, LowRank):
                tensors[f"{name}.left"], tensors[f"{name}.right"] = delta.left, delta.right
            elif delta is not None:
                tensors[f"{name}.vector"] = delta
    return tensors


def read_metadata(path: Path | str) -> dict[str, Any]:
    """The metadata of a patch file, without its tensors."""
    return _open(Path(path), None)[0]


def _open(path: Path, prefix: str | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata, and the tensors whose names are this prefix and a name without a `/`; none without a prefix."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"There is no patch file {path}; `dualview compile` writes one.")
    try:
        with cast("Any", safe_open(path, framework="pt")) as file:
            header = json.loads((cast("dict[str, str]", file.metadata() or {})).get("dualview", "{}"))
            names = [name for name in file.keys() if name[: name.rfind("/") + 1] == prefix]  # noqa: SIM118
            tensors = {name: cast("Tensor", file.get_tensor(name)) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable patch file ({error}); compile it again.") from None
    if not isinstance(header, dict) or cast("dict[str, Any]", header).get("schema") != SCHEMA:
        raise UserError(f"{path} is not a patch of schema {SCHEMA}; `dualview compile` writes one.")
    return cast("dict[str, Any]", header), tensors


def load_patch(path: Path | str, lm: LanguageModel) -> BlockPatches:
    """A compiled patch, ready for the model it was made for; any other model is refused."""
    return _load(Path(path), lm, "")


def load_twin(path: Path | str, lm: LanguageModel) -> BlockPatches | None:
    """The patch's twin, which replaces the demonstrations with flipped labels; None where the file holds none."""
    return _load(Path(path), lm, f"{TWIN}/") if read_metadata(path).get("twin") else None


def _load(path: Path, lm: LanguageModel, prefix: str) -> BlockPatches:
    header, tensors = _open(path, prefix)
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
    blocks: list[BlockPatch] = []
    for index, place in enumerate(places):
        readers, carrier = (_part(tensors, f"{prefix}{index}.{part}", lm) for part in ("readers", "carrier"))
        if carrier is None or isinstance(readers, Tensor) or (readers is None) != (not place.readers):
            of_twin = " of its twin" if prefix else ""
            raise UserError(f"The patch {path} lacks a part of block {index}{of_twin}; compile it again.")
        blocks.append(BlockPatch(place, readers, carrier))
    return BlockPatches(tuple(blocks))


def _part(tensors: Mapping[str, Tensor], name: str, lm: LanguageModel) -> LowRank | Tensor | None:
    if f"{name}.vector" in tensors:
        return tensors[f"{name}.vector"].to(lm.device)
    left, right = tensors.get(f"{name}.left"), tensors.get(f"{name}.right")
    return None if left is None or right is None else LowRank(left.to(lm.device), right.to(lm.device))
