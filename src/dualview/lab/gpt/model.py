"""The language lab's models: small Llamas, plain Hugging Face models with one of the attention variants attached.

Parameter counts are matched to the plain model's by the width of the feed-forward layers: it shrinks by what a
variant adds (the adapters of `augmented`, learnable coefficients). Models of the same width and seed start from the
same weights.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dualview.io.atomic import share
from dualview.io.errors import UserError
from dualview.variants import (
    Alibi,
    Augmented,
    Linear,
    Momentum,
    Negative,
    Regularised,
    Sign,
    TokenShift,
    Variant,
    attach,
    variant_parameters,
)

MAIN = ("plain", "momentum", "token_shift", "alibi")
"""Dai et al.'s pair and the two controls they lack; these are trained with every seed."""
OTHERS = ("sign", "regularised", "augmented", "negative", "linear")
NAMES = (*MAIN, *OTHERS)


def variant_of(name: str, eta: float = 0.5, learnable: bool = False) -> Variant | None:
    """The variant a model is trained with; None for plain softmax attention.

    η is that of momentum and of the token shift, fixed or the start of learning; the others have fixed settings.
    """
    made: dict[str, Variant | None] = {
        "plain": None,
        "momentum": Momentum(eta=eta, learnable=learnable),
        "token_shift": TokenShift(eta=eta, learnable=learnable),
        "alibi": Alibi(strength=1.0),
        "sign": Sign(scale="token"),
        "regularised": Regularised(alpha=0.1, form="slides"),
        "augmented": Augmented(c=1.0, rank=8),
        "negative": Negative(beta=0.1, k=1),
        "linear": Linear(average=True),
    }
    return made[name]


@dataclass(frozen=True)
class Shape:
    """The size of a model; `d_ff` is the width of the gated feed-forward layer, three matrices of d_model × d_ff."""

    vocab: int
    d_model: int
    layers: int
    heads: int
    context: int
    d_ff: int

    @property
    def ff_unit(self) -> int:
        """Parameters that one more unit of every feed-forward layer adds."""
        return 3 * self.d_model * self.layers


def usual_width(d_model: int) -> int:
    """8/3 of d_model, up to a multiple of 8: as many parameters as a plain layer of 4 · d_model.

    >>> usual_width(96), usual_width(512)
    (256, 1368)
    """
    return -(-8 * d_model // 24) * 8


def build(shape: Shape, separator: int, variant: Variant | None, seed: int) -> LlamaForCausalLM:
    """A new model; its weights depend on the shape and the seed alone."""
    config = cast(Any, LlamaConfig)(
        vocab_size=shape.vocab,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=separator,
        eos_token_id=separator,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    if variant is not None:
        attach(model, variant)
    return model


def parameters_of(model: torch.nn.Module) -> int:
    """How many numbers are trained; embedding and unembedding are shared and count once."""
    return sum(p.numel() for p in model.parameters())


def matched(shape: Shape, separator: int, variant: Variant | None) -> Shape:
    """The shape whose model has, with the variant, as many parameters as a plain model has without.

    To the nearest unit of feed-forward width, that is within 1.5 · d_model · layers parameters.
    """
    if variant is None:
        return shape
    added = sum(p.numel() for p in variant_parameters(build(shape, separator, variant, 0)).values())
    width = shape.d_ff - round(added / shape.ff_unit)
    if width < 1:
        raise UserError(
            f"{variant.name} adds {added} parameters, more than the feed-forward layers can lose; train a wider model."
        )
    return replace(shape, d_ff=width)


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """An ordinary Hugging Face folder (config, safetensors, tokenizer), complete or absent."""
    making = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    with contextlib.redirect_stderr(io.StringIO()):  # transformers' progress bars
        cast(Any, model).save_pretrained(str(making))
        tokenizer.save_pretrained(str(making))
    share(*making.glob("*.safetensors"))
    shutil.rmtree(folder, ignore_errors=True)
    making.replace(folder)
