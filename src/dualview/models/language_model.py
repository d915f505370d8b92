"""A causal language model with its tokenizer, and what dualview found out about it."""

# The name of a model's attention is in a private attribute.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from dualview.anatomy.layers import Anatomy
from dualview.models.reader import Reader
from dualview.models.weights_hash import WeightsHash
from dualview.variants.registry import VARIANTS, implementation


@dataclass(frozen=True, repr=False)
class LanguageModel:
    """A causal LM with its tokenizer, and what dualview found out about it."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    """A Hugging Face tokenizer; `tasks.prompts.Tokenizer` lists what dualview uses."""
    anatomy: Anatomy
    slow_because: str | None = None
    """Why this architecture cannot share a prefix between packed queries, found on loading; None where it can."""
    commit: str | None = None
    """The hub's commit that it was read from; None if it did not come from the hub."""
    code_commits: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other repositories of the hub that its Python code was taken from, each with its commit."""
    _hash: WeightsHash = field(default_factory=WeightsHash, repr=False, compare=False)

    @property
    def whole_because(self) -> str | None:
        """Why prompts are run whole now: the architecture, or an attached attention variant."""
        variant = replaced_attention(self.model)
        return self.slow_because if variant is None else f"its attention is the variant {variant}"

    @property
    def fast(self) -> bool:
        return self.whole_because is None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def reader(self) -> Reader:
        return Reader(self.tokenizer, self.model.config)

    @property
    def context(self) -> int | None:
        """How many positions the model has, if its configuration states it."""
        return self.reader.context

    def room(self, at_most: int | None = None) -> int | None:
        """How many positions a prompt may use: the model's context, or `at_most` if that is less."""
        return self.reader.room(at_most)

    def shares_prefix(self, prefix: int, longest: int, shift: int = 0) -> bool:
        """Whether queries of up to `longest` tokens, shifted by `shift` positions, may share a prefix of that length.

        Not where rotary positions are scaled by the length of what is read and the scaling differs between the prefix
        by itself and a whole prompt: with longrope, if the prompt goes past the length at which it changes and the
        prefix does not; with dynamic scaling, if the prompt goes past it at all.
        """
        rope = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        # Architectures with several kinds of layers have one set of rotary parameters for each kind.
        for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):
            kind = each.get("rope_type")
            turn = each.get("original_max_position_embeddings") or self.context or 0
            if kind in ("longrope", "dynamic") and prefix + shift + longest > turn:
                return self.fast and kind == "longrope" and prefix > turn
        return self.fast

    @property
    def weights_hash(self) -> str:
        """sha256 over every weight's name, shape, dtype and bytes; computed once."""
        return self._hash.value(self.model.state_dict())

    def __repr__(self) -> str:
        kind, size = type(self.model).__name__, sum(p.numel() for p in self.model.parameters())
        return f"LanguageModel({self.name!r}, {kind}, {size:,} parameters, {self.dtype}, {self.device})"

    def hash_weights_soon(self) -> None:
        """Begin to compute `weights_hash` while other work goes on."""
        self._hash.start(self.model.state_dict())


def replaced_attention(model: PreTrainedModel) -> str | None:
    """The attached variant that replaces the model's softmax, if any (`augmented` does not)."""
    # `augmented` adds to softmax attention and leaves it as it is, so packed queries still work.
    names = {implementation(kind): name for name, kind in VARIANTS.items()}
    variant = names.get(model.config._attn_implementation or "")
    return None if variant == "augmented" else variant
