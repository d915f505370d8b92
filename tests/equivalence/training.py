"""Fine-tuning once more: autograd and a handwritten SGD on a copy of the model, attending by `reference`.

Which rows of which matrices are trained is written down here by architecture, not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dualview.tasks.prompts import TrainingSequence
from equivalence import reference


@dataclass(frozen=True)
class Place:
    """Where an architecture keeps its blocks, an attention in a block, and (fused) the matrix and its layout."""

    blocks: str
    attention: str
    fused: str | None = None
    layout: str = ""
    kv_heads: int = 4
    q_rows: tuple[int, ...] | None = None
    """The rows of q_proj that make q, where others make something else."""


_MODERN = Place("model.layers", "self_attn")
_H = "transformer.h"
# Qwen3-Next's q_proj makes, head by head, 8 rows of q and 8 of the output's gate.
_GATED = tuple(16 * head + i for head in range(4) for i in range(8))
PLACES: dict[str, Place] = {
    "gpt2": Place(_H, "attn", "c_attn", "thirds"),
    "gpt_neox": Place("gpt_neox.layers", "attention", "query_key_value", "by_head"),
    "gpt_bigcode-mqa": Place(_H, "attn", "c_attn", "thirds", kv_heads=1),
    "opt": Place("model.decoder.layers", "self_attn"),
    "phi3-fused": Place("model.layers", "self_attn", "qkv_proj", "thirds", kv_heads=2),
    "gpt_neo-local": Place(_H, "attn.attention"),
    "gptj": Place(_H, "attn"),
    "codegen": Place(_H, "attn", "qkv_proj", "codegen"),
    "bloom": Place(_H, "self_attention", "query_key_value", "by_head"),
    "falcon-mqa": Place(_H, "self_attention", "query_key_value", "thirds", kv_heads=1),
    "falcon-alibi": Place(_H, "self_attention", "query_key_value", "by_head"),
    "falcon-groups": Place(_H, "self_attention", "query_key_value", "groups", kv_heads=2),
    "mpt": Place("transformer.blocks", "attn", "Wqkv", "thirds"),
    "qwen3_next-hybrid": Place("model.layers", "self_attn", q_rows=_GATED),
    "dbrx-clip-fused": Place("transformer.blocks", "norm_attn_norm.attn", "Wqkv", "thirds", kv_heads=2),
    "mpt-clip": Place("transformer.blocks", "attn", "Wqkv", "thirds"),
    "gpt_bigcode-by-head": Place(_H, "attn", "c_attn", "by_head"),
    "gpt2-scaled-by-layer": Place(_H, "attn", "c_attn", "thirds"),
    "persimmon-fused-norm": Place("model.layers", "self_attn", "query_key_value", "by_head"),
    "opt-post-norm": Place("model.decoder.layers", "self_attn"),
    "falcon-serial": Place(_H, "self_attention", "query_key_value", "by_head"),
}
ROLES = {"kv": "kv", "qkv": "qkv", "v": "v"}


def place_of(name: str) -> Place:
    return PLACES.get(name, _MODERN)


def expected_rows(name: str, model: PreTrainedModel, params: str) -> dict[str, list[int]]:
    """Every module that is trained, by its full name, with its trained rows in order."""
    place, found = place_of(name), {}
    for index, block in enumerate(model.get_submodule(place.blocks).children()):
        prefix = f"{place.blocks}.{index}.{place.attention}"
        if place.attention not in {child for child, _ in block.named_modules()}:
            continue  # a block of a hybrid that has no attention
        if place.fused is not None:
            rows = reference.split_rows(place.layout, 4, place.kv_heads, 8)
            chosen = [row for role in ROLES[params] for head in rows[role] for row in head]
            found[f"{prefix}.{place.fused}"] = sorted(chosen)
            continue
        for role in ROLES[params]:
            module = model.get_submodule(f"{prefix}.{role}_proj")
            rows = place.q_rows if role == "q" and place.q_rows is not None else range(_matrix(module).shape[0])
            found[f"{prefix}.{role}_proj"] = list(rows)
    return found


def _matrix(module: nn.Module) -> Tensor:
    """[row, d_in], whichever way the module keeps it."""
    weight: Any = module.weight
    return weight.T if isinstance(module, Conv1D) else weight


@dataclass(frozen=True)
class Trained:
    model: PreTrainedModel
    losses: list[float]


def train(
    model: PreTrainedModel,
    name: str,
    sequences: Sequence[TrainingSequence],
    rate: float,
    *,
    params: str = "kv",
    loss: str = "all",
    epochs: int = 1,
    layer_causal: bool = False,
) -> Trained:
    """A copy of the model after SGD, one sequence a step, and the loss before each step."""
    twin = reference.copy_of(model).requires_grad_(True)
    rows = {} if params == "all" else expected_rows(name, twin, params)
    losses: list[float] = []
    for sequence in [sequence for _ in range(epochs) for sequence in sequences]:
        value = _layer_causal_loss(twin, name, sequence, loss) if layer_causal else _loss(twin, sequence, loss)
        losses.append(float(value.detach()))
        parameters = dict(twin.named_parameters())
        gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        with torch.no_grad():
            for (key, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                if gradient is None:
                    continue
                if params == "all":
                    parameter -= rate * gradient
                    continue
                module, kind = key.rsplit(".", 1)
                if module in rows:
                    mine = torch.zeros(_matrix(twin.get_submodule(module)).shape[0], dtype=parameter.dtype)
                    mine[rows[module]] = rate
                    across = isinstance(twin.get_submodule(module), Conv1D) or kind == "bias"
                    parameter -= gradient * (mine if across else mine[:, None])
    return Trained(twin.requires_grad_(False), losses)


def _loss(twin: PreTrainedModel, sequence: TrainingSequence, kind: str) -> Tensor:
    log_probs = reference.run(twin, sequence.ids).log_probs
    first = sequence.label_start if kind == "label" else 1
    terms = [-log_probs[at - 1, sequence.ids[at]] for at in range(first, len(sequence.ids))]
    return sum(terms[1:], terms[0]) / len(terms)


def _layer_causal_loss(twin: PreTrainedModel, name: str, sequence: TrainingSequence, kind: str) -> Tensor:
    """Σ over depths of the loss of the model cut off after that many blocks, its last block's input detached.

    A model that ends after block l reads block l's output through the final norm and the unembedding: that is the
    definition, with nothing hooked into the norm.
    """
    path = place_of(name).blocks
    holder, attribute = twin.get_submodule(path.rsplit(".", 1)[0]), path.rsplit(".", 1)[1]
    blocks = getattr(holder, attribute)

    def cut(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loose = [a.detach() if isinstance(a, Tensor) else a for a in args]
        return tuple(loose), {k: v.detach() if isinstance(v, Tensor) else v for k, v in kwargs.items()}

    total = torch.zeros((), dtype=torch.float64)
    try:
        for depth in range(1, len(blocks) + 1):
            setattr(holder, attribute, nn.ModuleList(blocks[:depth]))
            hook = blocks[depth - 1].register_forward_pre_hook(cut, with_kwargs=True)
            try:
                total = total + _loss(twin, sequence, kind)
            finally:
                hook.remove()
    finally:
        setattr(holder, attribute, blocks)
    return total


def change_of(before: PreTrainedModel, after: PreTrainedModel, module: str, rows: Sequence[int]) -> tuple[Tensor, Any]:
    """What training did to the given rows of a module: of its weight [row, d_in], and of its bias or None."""
    old, new = before.get_submodule(module), after.get_submodule(module)
    weight = (_matrix(new) - _matrix(old))[list(rows)]
    bias = getattr(old, "bias", None)
    return weight, None if bias is None else (new.bias - bias)[list(rows)]  # pyright: ignore
