"""LoRA adapters out of PEFT's two files, without PEFT.

The files say everything, reading them needs no unpickling, and a run does not depend on PEFT's version. What is not
plain LoRA, or of another model, is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dualview.io.errors import UserError
from dualview.learning.adapters import CONFIG, PREFIX, TWIN, WEIGHTS, Adapter, LinearChange, Replacement
from dualview.models.language_model import LanguageModel

_UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "changes of parameters that are not linear maps",
    "trainable_token_indices": "trained tokens",
}
"""Fields of a configuration that make an adapter something else than B A, and what they are."""
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", None)
"""How B and A were drawn; the other ways (PiSSA, OLoRA, CorDA, LoftQ …) also change the base weights."""
_KEY = re.compile(
    r"(?:base_model\.model\.)?(.+?)\.(?:base_layer\.)?(lora_[AB]\.(?:weight|bias)|lora_embedding_[AB]|weight|bias)"
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def adapter_names(folders: tuple[Path, ...]) -> dict[str, Path]:
    """The name of each adapter's setting: `adapter`, or `adapter:FOLDER` where there are several."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("The same adapter is given twice; give every --adapter once.")
    if len(folders) == 1:
        return {"adapter": folders[0]}
    found: dict[str, Path] = {}
    for folder in folders:
        # Names are parts of dotted keys and of tensors' names.
        name = plain = f"adapter:{re.sub(r'[^A-Za-z0-9_-]+', '-', folder.resolve().name) or 'adapter'}"
        number = 1
        while name in found:
            number += 1
            name = f"{plain}-{number}"
        found[name] = folder
    return found


def twin_folder(folder: Path) -> Path | None:
    """Where an adapter's twin is, which learnt from flipped labels; None where it has none."""
    return folder / TWIN if (folder / TWIN).exists() else None


def read_config(folder: Path) -> dict[str, Any]:
    """An adapter's configuration; what is not a plain LoRA is refused, without reading a weight."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"There is no LoRA adapter in {folder}: it has no {CONFIG}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); save the adapter again.") from None
    if not isinstance(config, dict) or "peft_type" not in config:
        raise UserError(f"{path} is not the configuration of a PEFT adapter.")
    config = cast("dict[str, Any]", config)
    if config["peft_type"] != "LORA":
        raise UserError(f"The adapter {folder} is of the type {config['peft_type']}; dualview reads LoRA only.")
    for field, what in _UNSUPPORTED.items():
        if config.get(field):
            raise UserError(f"The adapter {folder} uses {what} ({field}); dualview reads plain LoRA only.")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise UserError(
            f"The adapter {folder} was begun by {start}, which also changes the base weights; save it as plain LoRA "
            "(PEFT: path_initial_model_for_weight_conversion)."
        )
    ranks, alphas = (_values(folder, config, name) for name in ("rank_pattern", "alpha_pattern"))
    for rank in (config.get("r"), *ranks):
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise UserError(f"The adapter {folder} has rank {rank!r}; a rank is a whole number of at least 1.")
    for alpha in (config.get("lora_alpha", 8), *alphas):
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise UserError(f"The adapter {folder} has lora_alpha {alpha!r}, which is no number; correct its {CONFIG}.")
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"The adapter {folder} has no {WEIGHTS}; dualview reads safetensors only, never pickled files.")
    return config


def _values(folder: Path, config: Mapping[str, Any], name: str) -> list[Any]:
    """The values that a pattern gives to some modules."""
    pattern: Any = config.get(name) or {}
    try:
        for key in pattern:
            re.compile(key)
        return list(pattern.values())
    except (TypeError, AttributeError, re.error):
        raise UserError(
            f"The adapter {folder} has no mapping of patterns to numbers as its {name}; correct its {CONFIG}."
        ) from None


def load_adapter(folder: Path, lm: LanguageModel) -> Adapter:
    """A LoRA adapter of this model, ready to apply; one of another model is refused."""
    config = read_config(folder)
    _same_base(folder, config, lm)
    tensors, metadata = _tensors(folder / WEIGHTS)
    if metadata.get("dtype") == str(lm.dtype) and metadata.get("weights_hash") != lm.weights_hash:
        raise UserError(f"The adapter {folder} was made for other weights than {lm.name} has here; make it again.")
    parts: dict[str, dict[str, Tensor]] = {}
    modules = dict(lm.model.named_modules())
    for key, tensor in tensors.items():
        if _is_base_weight(key, tensor, modules):
            continue
        match = _KEY.fullmatch(key)
        if match is None:
            raise UserError(f"The adapter {folder} holds {key}, which is not part of a plain LoRA of linear maps.")
        parts.setdefault(match[1], {})[
            match[2].replace("embedding_A", "A.weight").replace("embedding_B", "B.weight")
        ] = tensor
    found = [each for name, own in parts.items() for each in _changes(folder, config, name, own, modules.get(name), lm)]
    if not found:
        raise UserError(f"The adapter {folder} changes nothing: it holds no weights.")
    _same_weights(folder, config, found[0], lm)
    return Adapter(
        tuple(each for each in found if isinstance(each, LinearChange)),
        tuple(each for each in found if isinstance(each, Replacement)),
    )


def _is_base_weight(key: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> bool:
    """Whether it is a weight of the model itself: PEFT saves embeddings whole next to their adapter."""
    name = key.removeprefix(PREFIX).removesuffix(".weight").removesuffix(".base_layer")
    own = getattr(modules.get(name), "weight", None) if key.endswith(".weight") else None
    return (
        isinstance(own, Tensor) and own.shape == tensor.shape and torch.equal(own.detach().cpu(), tensor.to(own.dtype))
    )


def _tensors(path: Path, among: set[str] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with cast("Any", safe_open(path, framework="pt")) as file:
            names = set(file.keys()) if among is None else among.intersection(file.keys())
            tensors = {name: cast("Tensor", file.get_tensor(name)) for name in sorted(names)}
            return tensors, cast("dict[str, str]", file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); save the adapter again.") from None


def _same_base(folder: Path, config: Mapping[str, Any], lm: LanguageModel) -> None:
    """Refuse another model by name, where both names are hub ids (owners may differ: mirrors have the same weights)."""
    given, own = str(config.get("base_model_name_or_path") or ""), lm.name.partition("@")[0]
    if any(Path(name).exists() or not _HUB_ID.fullmatch(name) for name in (given, own)):
        return
    if given.rpartition("/")[2].lower() != own.rpartition("/")[2].lower():
        raise UserError(
            f"The adapter {folder} is of the model {given}, not of {own}; if these are the same weights, correct "
            f"base_model_name_or_path in its {CONFIG}."
        )


def _same_weights(
    folder: Path, config: Mapping[str, Any], change: LinearChange | Replacement, lm: LanguageModel
) -> None:
    """Refuse a model that has other weights than the adapter's own, where that is a folder here; one tensor tells."""
    base, own = Path(str(config.get("base_model_name_or_path") or "")), getattr(change.module, "weight", None)
    if not isinstance(own, Tensor) or not base.name or not base.is_dir():
        return
    for path in sorted(base.glob("*.safetensors")):
        saved = _tensors(path, {f"{change.name}.weight"})[0]
        for tensor in saved.values():
            # A shape of its own is that of packed numbers: such files cannot be compared.
            if tensor.shape == own.shape and not torch.equal(tensor.to(own.dtype), own.detach().cpu()):
                raise UserError(
                    f"The adapter {folder} is of the model {base}, whose {change.name} has other weights than "
                    f"{lm.name}; give that model, or correct base_model_name_or_path in its {CONFIG}."
                )


def _changes(
    folder: Path,
    config: Mapping[str, Any],
    name: str,
    parts: Mapping[str, Tensor],
    module: nn.Module | None,
    lm: LanguageModel,
) -> Iterator[LinearChange | Replacement]:
    """What an adapter changes of one module: B A, and parameters that it holds whole."""
    if module is None:
        raise UserError(f"The adapter {folder} is of another model: {lm.name} has no module {name}.")
    if any(not torch.isfinite(tensor).all() for tensor in parts.values()):
        raise UserError(f"The adapter {folder} holds numbers that are not finite, in {name}; train it again.")
    for part in ("weight", "bias"):
        if part in parts:
            own = getattr(module, part, None)
            if not isinstance(own, nn.Parameter) or own.shape != parts[part].shape:
                raise UserError(f"The adapter {folder} is of another model: the {part} of {name} has another shape.")
            yield Replacement(name, module, part, own, parts[part].to(own))
    if any(part.startswith("lora_") for part in parts):
        if not isinstance(module, nn.Linear | Conv1D | nn.Embedding):
            raise UserError(f"The adapter {folder} changes {name}, which is no linear map ({type(module).__name__}).")
        weight = cast("Tensor", module.weight)
        kept = torch.promote_types(lm.dtype, torch.float32)
        given = {part: tensor.to(device=weight.device, dtype=kept) for part, tensor in parts.items()}
        yield _low_rank(folder, config, name, given, module)


def _low_rank(
    folder: Path,
    config: Mapping[str, Any],
    name: str,
    given: Mapping[str, Tensor],
    module: nn.Linear | Conv1D | nn.Embedding,
) -> LinearChange:
    rows = cast("Tensor", module.weight).shape
    shape = (rows[0], rows[1]) if isinstance(module, nn.Linear) else (rows[1], rows[0])
    a, b = given.get("lora_A.weight"), given.get("lora_B.weight")
    if a is None or b is None:
        raise UserError(f"The adapter {folder} lacks one of the two factors of {name}; save it again.")
    if a.dim() != 2 or b.dim() != 2 or (b.shape[0], a.shape[1]) != shape or a.shape[0] != b.shape[1]:
        found = f"{tuple(b.shape)} · {tuple(a.shape)}"
        raise UserError(f"The adapter {folder} is of another model: {name} has shape {shape}, its change {found}.")
    if a.shape[0] == 0:
        raise UserError(f"The adapter {folder} has rank 0 in {name}; a rank is at least 1.")
    alpha = _of_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    scale = alpha / (math.sqrt(a.shape[0]) if config.get("use_rslora") else a.shape[0])
    added = given.get("lora_B.bias")
    return LinearChange(name, module, a, scale * b, None if added is None else scale * added)


def _of_pattern(pattern: Mapping[str, float] | None, name: str, otherwise: float) -> float:
    """A value that some modules have of their own: patterns match the end of a module's name."""
    matching = (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", name))
    return next(matching, otherwise)
