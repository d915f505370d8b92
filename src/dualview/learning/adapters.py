"""LoRA adapters in PEFT's files: reading and applying them, without PEFT (`adapter_writing` writes them).

An adapter changes linear maps by ΔW = (α/r) B A, and what it adds to a map's output is (α/r) B (A x): a forward hook on
the map, whatever it makes (fused q, k and v included), and no base weight is written. PEFT is not imported: its two
files say everything, reading them needs no unpickling, and a run does not depend on its version.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dualview.anatomy.hooks import hooked
from dualview.anatomy.layers import Projection
from dualview.io.errors import UserError
from dualview.models.language_model import LanguageModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
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
    "modules_to_save": "modules replaced as a whole",
}
"""Fields of a configuration that make an adapter something else than B A, and what they are."""
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", None)
"""How B and A were drawn; the other ways (PiSSA, OLoRA, CorDA, LoftQ …) also change the base weights."""


@dataclass(frozen=True)
class LinearChange:
    """The change of one linear map: ΔW = b a and Δbias, the scale α/r included in `b` and `bias`."""

    name: str
    module: nn.Module
    a: Float[Tensor, "rank d_in"]
    b: Float[Tensor, "d_out rank"]
    bias: Float[Tensor, " d_out"] | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def norm(self) -> float:
        """‖b a‖, without the product: √Σ (bᵀb)∘(aaᵀ)."""
        a, b = self.a.double(), self.b.double()
        return math.sqrt(max(0.0, float(((b.T @ b) * (a @ a.T)).sum())))

    def changed(self, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The map's output with the change; a forward hook."""
        if self.rank:
            output = output + ((inputs[0].to(self.a.dtype) @ self.a.T) @ self.b.T).to(output.dtype)
        return output if self.bias is None else output + self.bias.to(output.dtype)


@dataclass(frozen=True)
class Adapter:
    """Low-rank changes of linear maps, active within `applied()`, like any patch."""

    changes: tuple[LinearChange, ...]

    rows = 1

    @contextmanager
    def applied(self) -> Generator[None]:
        with hooked(each.module.register_forward_hook(each.changed) for each in self.changes):
            yield

    def scaled(self, factor: float) -> Adapter:
        return Adapter(
            tuple(
                replace(each, b=factor * each.b, bias=None if each.bias is None else factor * each.bias)
                for each in self.changes
            )
        )

    def in_random_directions(self, generator: torch.Generator) -> Adapter:
        """Other changes of the same maps, with the same ranks and singular values."""

        def drawn(change: LinearChange) -> LinearChange:
            b, a = random_directions(change.b, change.a, generator) if change.rank else (change.b, change.a)
            bias = None if change.bias is None else random_vector(change.bias, generator)
            return replace(change, a=a, b=b, bias=bias)

        return Adapter(tuple(map(drawn, self.changes)))

    def summary(self) -> dict[str, Any]:
        """What the result says of an adapter: its maps, ranks and size."""
        own = math.hypot(*(each.norm for each in self.changes))
        base = math.hypot(*(float(cast("Tensor", each.module.weight).double().norm()) for each in self.changes))
        return {
            "modules": len(self.changes),
            "targets": sorted({each.name.rpartition(".")[2] for each in self.changes}),
            "rank": max(each.rank for each in self.changes),
            "norm": own,
            "relative_norm": own / base if base else None,
        }


def random_directions(
    b: Float[Tensor, "d_out rank"], a: Float[Tensor, "rank d_in"], generator: torch.Generator
) -> tuple[Float[Tensor, "d_out rank"], Float[Tensor, "rank d_in"]]:
    """Factors of a matrix with the singular values of b a, between random directions."""

    def rotated(columns: Float[Tensor, "width rank"]) -> Tensor:
        """The columns with the same lengths and angles, anywhere."""
        inner = torch.linalg.qr(columns.double().cpu()).R
        drawn = torch.randn(columns.shape[0], inner.shape[0], generator=generator, dtype=torch.float64)
        return (torch.linalg.qr(drawn).Q @ inner).to(columns)

    return rotated(b), rotated(a.T).T.contiguous()


def random_vector(x: Float[Tensor, " width"], generator: torch.Generator) -> Float[Tensor, " width"]:
    """A vector of the same length, in a random direction."""
    drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return (drawn * (float(x.double().norm()) / float(drawn.norm()))).to(x)


# --------------------------------------------------------------------------------------------------------- reading


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


def read_config(folder: Path) -> dict[str, Any]:
    """An adapter's configuration; what is not a plain LoRA is refused, without reading a weight."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"There is no LoRA adapter in {folder}: it has no {CONFIG}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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
    for rank in (config.get("r"), *(config.get("rank_pattern") or {}).values()):
        if not isinstance(rank, int) or rank < 1:
            raise UserError(f"The adapter {folder} has rank {rank}; a rank is a whole number of at least 1.")
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"The adapter {folder} has no {WEIGHTS}; dualview reads safetensors only, never pickled files.")
    return config


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
        match = re.fullmatch(r"(?:base_model\.model\.)?(.+?)\.(?:base_layer\.)?(lora_[AB]\.(?:weight|bias)|bias)", key)
        if match is None:
            raise UserError(f"The adapter {folder} holds {key}, which is not part of a plain LoRA of linear maps.")
        parts.setdefault(match[1], {})[match[2]] = tensor
    changes = [_change(folder, config, name, own, modules.get(name), lm) for name, own in parts.items()]
    if not changes:
        raise UserError(f"The adapter {folder} changes nothing: it holds no weights.")
    return Adapter(tuple(changes))


def _is_base_weight(key: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> bool:
    """Whether it is a weight of the model itself: PEFT saves embeddings whole next to their adapter."""
    name = key.removeprefix(PREFIX).removesuffix(".weight").removesuffix(".base_layer")
    own = getattr(modules.get(name), "weight", None) if key.endswith(".weight") else None
    return (
        isinstance(own, Tensor) and own.shape == tensor.shape and torch.equal(own.detach().cpu(), tensor.to(own.dtype))
    )


def _tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with cast("Any", safe_open(path, framework="pt")) as file:
            tensors = {name: cast("Tensor", file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
            return tensors, cast("dict[str, str]", file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); save the adapter again.") from None


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


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


def _change(
    folder: Path,
    config: Mapping[str, Any],
    name: str,
    parts: Mapping[str, Tensor],
    module: nn.Module | None,
    lm: LanguageModel,
) -> LinearChange:
    if module is None:
        raise UserError(f"The adapter {folder} is of another model: {lm.name} has no module {name}.")
    kept = torch.promote_types(lm.dtype, torch.float32)
    own = getattr(module, "weight", None)
    device = own.device if isinstance(own, Tensor) else lm.device
    given = {part: tensor.to(device=device, dtype=kept) for part, tensor in parts.items()}
    if any(not torch.isfinite(tensor).all() for tensor in given.values()):
        raise UserError(f"The adapter {folder} holds numbers that are not finite, in {name}; train it again.")
    bias, base = given.get("bias"), getattr(module, "bias", None)
    if bias is not None:
        if not isinstance(base, Tensor) or base.shape != bias.shape:
            raise UserError(f"The adapter {folder} is of another model: the bias of {name} has another shape.")
        bias = bias - base.detach().to(bias)
    if "lora_A.weight" not in given and "lora_B.weight" not in given and bias is not None:  # a bias alone
        none = bias.new_zeros
        return LinearChange(name, module, none(0, 0), none(len(bias), 0), bias)
    if not isinstance(module, nn.Linear | Conv1D):
        raise UserError(f"The adapter {folder} changes {name}, which is no linear map ({type(module).__name__}).")
    shape = (Projection(name, module, None).d_out, Projection(name, module, None).d_in)
    a, b = given.get("lora_A.weight"), given.get("lora_B.weight")
    if a is None or b is None:
        raise UserError(f"The adapter {folder} lacks one of the two factors of {name}; save it again.")
    if (b.shape[0], a.shape[1]) != shape or a.shape[0] != b.shape[1]:
        found = f"{tuple(b.shape)} · {tuple(a.shape)}"
        raise UserError(f"The adapter {folder} is of another model: {name} has shape {shape}, its change {found}.")
    if a.shape[0] == 0:
        raise UserError(f"The adapter {folder} has rank 0 in {name}; a rank is at least 1.")
    alpha = _of_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    scale = alpha / (math.sqrt(a.shape[0]) if config.get("use_rslora") else a.shape[0])
    if (added := given.get("lora_B.bias")) is not None:
        bias = scale * added if bias is None else bias + scale * added
    return LinearChange(name, module, a, scale * b, bias)


def _of_pattern(pattern: Mapping[str, float] | None, name: str, otherwise: float) -> float:
    """A value that some modules have of their own: patterns match the end of a module's name."""
    matching = (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", name))
    return next(matching, otherwise)
