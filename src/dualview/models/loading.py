"""Getting a causal language model: embedded, from a folder, from a GGUF file, or from the hub.

Weights are read from safetensors or GGUF only, never from a pickle, and a model's own code is run only when asked for.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dualview.anatomy.layers import dissect
from dualview.io.collector import collector_paused
from dualview.io.errors import UserError, first_line
from dualview.io.gguf.reading import read_gguf
from dualview.models.amx_workaround import mind_amx
from dualview.models.devices import BALANCED, pick_device, room_on_gpus
from dualview.models.hub import Snapshot
from dualview.models.language_model import LanguageModel
from dualview.models.packing import memory as packing_memory
from dualview.models.packing.check import CANNOT_RUN, slow_because
from dualview.models.reader import explained, from_conversion, locate, must_speak, quiet, snapshot
from dualview.models.weights_hash import WeightsHash

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_model(
    name: str = "embedded",
    *,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> LanguageModel:
    """Load a causal LM by name: `embedded`, a folder, a `.gguf` file or a hub id (`owner/name@revision`)."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"A model is named by a text (embedded, a folder, a .gguf file or a hub id), not by {name!r}.")
    if dtype not in DTYPES:
        raise UserError(f"Unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}.")
    where = None if device == BALANCED else pick_device(device)
    quiet()
    if where is not None and where.type == "cpu" and dtype in ("bfloat16", "float16"):
        mind_amx()
    source = locate(name)
    if where is None and isinstance(source, Path):
        raise UserError(f"--device {BALANCED} takes a folder or a hub id, not a GGUF file: convert it first.")
    placed: dict[str, Any] = {}
    if where is None:
        # `auto` would put what does not fit on the processor or the disk, where dualview cannot follow it.
        placed = {"device_map": "balanced", "max_memory": room_on_gpus()}
    elif where.type == "cuda":
        # From the files to the GPU, without a copy in the processor's memory.
        gpu: Any = where.index  # None for plain `cuda`
        placed = {"device_map": {"": torch.cuda.current_device() if gpu is None else gpu}}
    hub = Snapshot(Path(name))
    conversion = None
    with collector_paused(), explained(name):
        if isinstance(source, Path):
            tokenizer, model, conversion = _from_gguf(source, dtype, placed)
        else:
            hub = snapshot(source, trust_remote_code)
            source = source if isinstance(source, str) else f"{hub.folder}/"
            options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            model = _with_variant(name, source, DTYPES[dtype], where)
            if model is None:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    source, **options, **placed, dtype=DTYPES[dtype], use_safetensors=True, output_loading_info=True
                )
                model, info = loaded
                _must_be_on_gpus(name, model)
                _must_be_whole(name, info)
                # Without its variant the model would load and give wrong numbers.
                if hasattr(model.config, "dualview"):
                    raise UserError(f"{name} was saved with an attention variant: download it and give its folder.")
            must_speak(name, tokenizer)
    if where is not None:
        model.to(where)  # pyright: ignore[reportArgumentType]
    if dtype == "float64" and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product of a mixture of experts has no float64
    lm = adopt(model, tokenizer, name, conversion)
    return replace(lm, commit=hub.commit, code_commits=hub.code, _hash=WeightsHash(_weight_files(conversion or source)))


def _weight_files(source: str | Path) -> tuple[Path, ...]:
    """The files that decide a model's weights: those of its folder, or its GGUF file."""
    path = Path(source)
    return (path,) if path.is_file() else tuple(sorted([*path.glob("*.safetensors"), path / "config.json"]))


def _from_gguf(path: Path, dtype: str, placed: dict[str, Any]) -> tuple[Any, Any, Path | None]:
    """Tokenizer and model of a GGUF file, and the folder of its cached conversion if they came from there."""

    def load(folder: Path) -> tuple[Any, Any]:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            local_files_only=True,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            output_loading_info=True,
            **placed,
        )
        _must_be_whole(path.name, loaded[1])
        return tokenizer, loaded[0]

    found = from_conversion(path, dtype, load)
    if found is not None:
        return *found[0], found[1]
    read = read_gguf(path, DTYPES[dtype])
    return read.tokenizer, read.model, None


def _with_variant(name: str, source: str, dtype: torch.dtype, where: torch.device | None) -> PreTrainedModel | None:
    """The model of a folder with the attention variant it was saved with; None where it was saved with none."""
    config = Path(source) / "config.json"
    if not config.is_file() or "dualview" not in json.loads(config.read_text(encoding="utf-8")):
        return None
    if where is None:
        raise UserError(f"{name} was saved with an attention variant, which --device {BALANCED} does not take.")
    from dualview.variants.storage import load

    return load(source, dtype=dtype)


def adopt(model: PreTrainedModel, tokenizer: Any, name: str, conversion: Path | None = None) -> LanguageModel:
    """Take a model that is already in memory: find its parts and check the fast path on it.

    `conversion` is the cached folder that its weights came from, if any; the outcome of the check is kept there.
    """
    model.eval().requires_grad_(False)
    try:
        anatomy = dissect(model)
    except CANNOT_RUN as error:  # an architecture's own code may raise any of them
        raise UserError(f"dualview cannot follow the attention of {name}: {first_line(error)}.") from error
    lm = LanguageModel(name, model, tokenizer, anatomy)
    known = None if conversion is None else packing_memory.recall(conversion, lm)
    if known is not None:
        return replace(lm, slow_because=known.slow_because)
    lm = replace(lm, slow_because=slow_because(lm))
    if conversion is not None:
        packing_memory.remember(conversion, lm)
    return lm


def _must_be_whole(name: str, info: Any) -> None:
    """A weight that the files lack would be drawn at random."""
    for what in ("missing_keys", "mismatched_keys"):
        found = sorted(str(key) for key in info[what])
        if found:
            raise UserError(
                f"The weights of {name} are not whole: {len(found)} {what.replace('_', ' ')}, the first {found[0]}."
            )


def _must_be_on_gpus(name: str, model: PreTrainedModel) -> None:
    """Layers of a spread model that no GPU had room for are left without weights."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if places & {"cpu", "disk"}:
        raise UserError(f"{name} does not fit the free memory of the GPUs; free some, or use a narrower --dtype.")
