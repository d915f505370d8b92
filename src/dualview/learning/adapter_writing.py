"""Changes of weights as LoRA adapters: exact at their rank or truncated, and written as PEFT reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dualview.anatomy.layers import Projection
from dualview.io.atomic import must_be_writable, whole, write_json
from dualview.io.errors import UserError
from dualview.learning.adapters import CONFIG, PREFIX, TWIN, WEIGHTS, Adapter, LinearChange
from dualview.learning.weight_patches import Deltas, Linearised
from dualview.models.language_model import LanguageModel

EXACT = 1e-5
"""A relative error that is rounding."""


def compressed(
    b: Float[Tensor, "d_out n"], a: Float[Tensor, "n d_in"], rank: int | None
) -> tuple[Float[Tensor, "d_out rank"], Float[Tensor, "rank d_in"], float, float]:
    """Factors of b a at its numerical rank, or truncated to `rank`; and ‖what is lost‖², ‖b a‖²."""
    left, right = torch.linalg.qr(b.double()), torch.linalg.qr(a.double().T)
    u, s, v = torch.linalg.svd(left.R @ right.R.T, full_matrices=False)
    noise = torch.finfo(b.dtype).eps * max(b.shape[0], a.shape[1]) * s[0]
    kept = max(1, min(int((s > noise).sum()), rank or len(s)))
    root = s[:kept].sqrt()  # shared evenly between the factors
    made = (left.Q @ (u[:, :kept] * root)).to(b.dtype), (root[:, None] * (v[:kept] @ right.Q.T)).to(a.dtype)
    return *made, float(s[kept:].square().sum()), float(s.square().sum())


@dataclass(frozen=True)
class Exported:
    """A change of weights as an adapter, and what truncation loses."""

    adapter: Adapter
    error: float
    """‖ΔW − b a‖ / ‖ΔW‖ over all maps together."""
    largest_error: float
    """The same of the map that loses most."""

    @property
    def line(self) -> str:
        about = self.adapter.summary()
        kept = "exact" if self.error < EXACT else f"truncated, {self.error:.2g} of the update is lost"
        return f"LoRA adapter of rank {about['rank']} on {about['modules']} linear maps ({kept})"

    def to_json(self) -> dict[str, Any]:
        return {**self.adapter.summary(), "error": self.error, "largest_error": self.largest_error}


def must_hold_adapter(folder: Path, rank: int | None) -> None:
    """Refuse, before the work, a place or a rank that no adapter and its twin can have."""
    if rank is not None and rank < 1:
        raise UserError(f"--rank is {rank}; a LoRA adapter has a rank of at least 1.")
    for place in (folder, folder / TWIN):
        if place.exists() and not place.is_dir():
            raise UserError(f"{place} is a file; an adapter is written to a folder.")
        for name in (CONFIG, WEIGHTS):
            if (place / name).exists():
                raise UserError(f"{place} holds an adapter already ({name}); choose another folder.")
            must_be_writable(place / name)


def truncated(adapter: Adapter, rank: int | None) -> Exported:
    """The same changes at their numerical ranks, or each cut to its `rank` largest singular values."""
    made: list[LinearChange] = []
    squares: list[tuple[float, float]] = []
    for change in adapter.changes:
        b, a, lost, size = compressed(change.b, change.a, rank)
        made.append(replace(change, a=a, b=b))
        squares.append((lost, size))
    shares = [math.sqrt(lost / size) if size else 0.0 for lost, size in squares]
    total = sum(size for _, size in squares)
    error = math.sqrt(sum(lost for lost, _ in squares) / total) if total else 0.0
    return Exported(Adapter(tuple(made)), error, max(shares))


def deltas_as_adapter(patch: object, rank: int | None) -> Exported:
    """Fine-tuning's update as an adapter: ΔW = Σ_t e_t x_tᵀ has at most as many ranks as there are training tokens.

    Where one map makes q, k and v, the rows that were not trained are 0.
    """
    if not isinstance(patch, Deltas) or isinstance(patch, Linearised):
        kind = "The linearised model's update" if isinstance(patch, Linearised) else "A change of every parameter"
        raise UserError(f"{kind} is no low-rank change of linear maps; LoRA cannot hold it.")

    def change(p: Projection, weight: Tensor, bias: Tensor | None) -> LinearChange:
        whole_map = Projection(p.name, p.module, None)
        if p.rows is not None:
            weight = weight.new_zeros(whole_map.d_out, p.d_in).index_copy(0, p.rows, weight)
            bias = None if bias is None else bias.new_zeros(whole_map.d_out).index_copy(0, p.rows, bias)
        one = torch.eye(min(weight.shape), dtype=weight.dtype, device=weight.device)
        b, a = (one, weight) if weight.shape[0] <= weight.shape[1] else (weight, one)
        return LinearChange(p.name, p.module, a, b, bias)

    changes = zip(patch.projections, patch.weights, patch.biases, strict=True)
    return truncated(Adapter(tuple(change(p, w[0], None if b is None else b[0]) for p, w, b in changes)), rank)


def save_adapter(folder: Path, adapter: Adapter, lm: LanguageModel, twin: Adapter | None = None) -> Path:
    """Write an adapter as PEFT reads it; its weights last, so that a folder with them is whole.

    Factors of lower rank are padded with zeros: one rank, α = r, so the scale is 1. The twin is an adapter in a folder
    of its own, `flipped_labels` in this one.
    """
    from safetensors.torch import save_file

    if twin is not None:
        save_adapter(folder / TWIN, twin, lm)
    rank = max(each.rank for each in adapter.changes)
    biased = any(each.bias is not None for each in adapter.changes)
    tensors: dict[str, Tensor] = {}
    for each in adapter.changes:
        room = rank - each.rank
        key = f"{PREFIX}{each.name}"
        tensors[f"{key}.lora_A.weight"] = nn.functional.pad(each.a, (0, 0, 0, room))
        tensors[f"{key}.lora_B.weight"] = nn.functional.pad(each.b, (0, room))
        if biased:
            bias = each.b.new_zeros(each.b.shape[0]) if each.bias is None else each.bias
            tensors[f"{key}.lora_B.bias"] = bias
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lm.name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "lora_bias": biased,
        "bias": "none",
        "fan_in_fan_out": all(isinstance(each.module, Conv1D) for each in adapter.changes),
        "target_modules": [each.name for each in adapter.changes],
        "inference_mode": True,
    }
    write_json(folder / CONFIG, config)
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with whole(folder / WEIGHTS) as temporary:
        save_file(kept, temporary, {"format": "pt", "dtype": str(lm.dtype), "weights_hash": lm.weights_hash})
    return folder
