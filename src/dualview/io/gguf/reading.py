"""Reading a GGUF file as an ordinary model: tokenizer, configuration and dequantised weights.

Recent versions of transformers mark a model read from a GGUF file as quantised and keep the blocks packed where they
have a kernel for them. So the weights are copied into a plain model of the same configuration; the copy is strict,
which also proves that nothing stayed packed. The cache keeps the result.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualview.io.atomic import share
from dualview.io.errors import UserError


@dataclass(frozen=True)
class GgufModel:
    tokenizer: Any
    model: Any


def read_gguf(path: Path, dtype: Any) -> GgufModel:
    """The file's model with its weights in `dtype`. Takes tens of seconds, fewer on more cores."""
    _must_have_packages(path)
    from dualview.io.gguf.quick import Undrawn, quick_gguf, take_weights

    transformers: Any = importlib.import_module("transformers")
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    unpack = {}
    if hasattr(transformers, "GgufConfig"):
        unpack = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    with contextlib.redirect_stderr(io.StringIO()):  # hides its progress bars
        with quick_gguf():
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
            config = transformers.AutoConfig.from_pretrained(**where)
            packed = transformers.AutoModelForCausalLM.from_pretrained(**where, **unpack, dtype=dtype)
        with Undrawn():
            dense = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        take_weights(dense, packed.state_dict())
    dense.config.architectures = [type(dense).__name__]  # as saving sets it, so that both configurations are equal
    return GgufModel(tokenizer, dense)


def save_gguf(read: GgufModel, folder: Path) -> None:
    """Write the tokenizer, configuration and dequantised weights (as safetensors) to `folder`."""
    with contextlib.redirect_stderr(io.StringIO()):  # hides its progress bars
        read.model.save_pretrained(str(folder))
        read.tokenizer.save_pretrained(str(folder))
    share(*folder.glob("*.safetensors"))


def count_weights(path: Path) -> int:
    """How many numbers the file's tensors hold, from its header."""
    _must_have_packages(path)
    from dualview.io.gguf.quick import Reader

    return sum(int(tensor.n_elements) for tensor in Reader(path).tensors)


def _must_have_packages(path: Path) -> None:
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise UserError(f"Reading {path.name} needs the {needed} package; run `pip install {needed}`.")
