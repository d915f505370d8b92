"""A tiny Llama with a tokenizer of words, on disk, and a task of made-up rows to ask it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

GOOD = ["fine", "bright", "lovely", "warm", "clever", "moving"]
BAD = ["dull", "cold", "awful", "slow", "clumsy", "empty"]
FILL = ["the", "film", "was", "a", "story", "and", "plot", "of", "it", "actors", "scene", "very"]
LABELS = ["Negative", "Positive", "Mixed feelings"]
ABSTRACT = ["scene", "it", "of"]
"""Words that this tokenizer knows."""
_MORE = ["Review:", "Sentiment:", "N/A", "[MASK]", "\n", "Mixed", "feelings", "Negative", "Positive"]


def save_model(
    folder: Path, *, bos: bool = True, context: int = 256, seed: int = 0, learnt_positions: bool = False
) -> Path:
    """A random Llama (or GPT-2) and its tokenizer; with `bos`, the tokenizer begins every text with its BOS token."""
    words = ["<unk>", "<s>", "</s>", *_MORE, *FILL, *GOOD, *BAD]
    vocabulary = {word: index for index, word in enumerate(words)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # Words with no space to either side, newlines as tokens of their own.
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_prefix_space=False
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    shape = {"vocab_size": len(words), "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"max_position_embeddings": context, "bos_token_id": 1, "eos_token_id": 2}
    if learnt_positions:
        model = GPT2LMHeadModel(GPT2Config(**shape)).double()
    else:
        config = LlamaConfig(**shape, num_key_value_heads=2, intermediate_size=48, attention_bias=True)
        model = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float64)
            parameter.copy_(parameter + 0.1 * noise if parameter.dim() == 1 else 0.3 * noise)
    model.save_pretrained(folder)
    return folder


def rows(n: int, seed: int, *, longest: int = 7) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    made: list[dict[str, Any]] = []
    for _ in range(n):
        label = draw.randrange(3)
        pool = [BAD, GOOD, GOOD + BAD][label]
        words = [draw.choice(draw.choice([FILL, pool])) for _ in range(draw.randint(2, longest))]
        made.append({"text": " ".join(words), "label": label})
    return made


def write_rows(path: Path, made: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return path


def save_task(folder: Path, *, train: int = 24, selection: int | None = 10, validation: int = 12, **more: Any) -> Path:
    """A task file and its rows; without `selection` rows the task must hold some of its train rows out."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", rows(train, seed=1))
    write_rows(folder / "validation.jsonl", rows(validation, seed=2))
    document: dict[str, Any] = {
        "name": "tiny",
        "template": "Review: {text} Sentiment:",
        "labels": LABELS,
        "train": "train.jsonl",
        "validation": "validation.jsonl",
    }
    if "labels" not in more:
        document["abstract_labels"] = ABSTRACT
    if selection is not None:
        write_rows(folder / "selection.jsonl", rows(selection, seed=3))
        document["selection"] = "selection.jsonl"
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**document, **more}), encoding="utf-8")
    return path
