"""Getting a causal language model: embedded, from a folder, from a GGUF file, or from the hub.

Weights are read from safetensors or GGUF only, never from a pickle, and a model's own code is run only when asked for.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dualview.anatomy.dispatch import Unsupported
from dualview.anatomy.layers import dissect
from dualview.io import assets, gguf_cache
from dualview.io.errors import UserError, first_line
from dualview.io.gguf import read_gguf
from dualview.io.hub import HubName
from dualview.models import packing_memory
from dualview.models.amx_workaround import mind_amx
from dualview.models.hub import Snapshot, fetch_code, fetch_model
from dualview.models.language_model import LanguageModel
from dualview.models.packing_check import slow_because
from dualview.models.weights_hash import WeightsHash

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
BALANCED = "balanced"
"""The `device` that spreads a model's layers over all GPUs."""
_WEIGHTS_SHARE = 0.8  # of a GPU's free memory; the rest is for the passes
_log = logging.getLogger("dualview.models")
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
    _quiet()
    if where is not None and where.type == "cpu" and dtype in ("bfloat16", "float16"):
        mind_amx()
    source = _source(name)
    hub = Snapshot(Path(name))
    conversion = None
    try:
        if isinstance(source, Path):
            if where is None:
                raise UserError(f"--device {BALANCED} takes a folder or a hub id, not a GGUF file: convert it first.")
            tokenizer, model, conversion = _from_gguf(source, dtype)
        else:
            hub = _snapshot(source, trust_remote_code)
            source = source if isinstance(source, str) else f"{hub.folder}/"
            options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
            spread = {} if where is not None else {"device_map": "balanced", "max_memory": _room_on_gpus()}
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            model = _with_variant(name, source, DTYPES[dtype], where)
            if model is None:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    source, **options, **spread, dtype=DTYPES[dtype], use_safetensors=True, output_loading_info=True
                )
                model, info = loaded
                _must_be_on_gpus(name, model)
                _must_be_whole(name, info)
                if hasattr(model.config, "dualview"):
                    raise UserError(f"{name} was saved with an attention variant: download it and give its folder.")
            _must_speak(name, tokenizer)
    except UserError:
        raise
    except Exception as error:
        raise UserError(_why(name, error)) from error
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


def _snapshot(source: str | HubName, trust_remote_code: bool) -> Snapshot:
    """The files of a model, and of the code it takes from elsewhere, on this machine."""
    if isinstance(source, HubName):
        return fetch_model(source, trust_remote_code=trust_remote_code)
    folder = Path(source)
    return Snapshot(folder, code=fetch_code(folder) if trust_remote_code else {})


def _from_gguf(path: Path, dtype: str) -> tuple[Any, Any, Path | None]:
    """Tokenizer and model of a GGUF file, and the folder of its cached conversion if they came from there."""
    folder = gguf_cache.converted(path, dtype)
    if folder is not None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), local_files_only=True, dtype=DTYPES[dtype], use_safetensors=True, output_loading_info=True
            )
            _must_be_whole(path.name, loaded[1])
        except Exception as error:
            _log.warning(
                "The cached conversion of %s could not be loaded and is removed (%s).", path.name, first_line(error)
            )
            gguf_cache.discard(folder)
        else:
            return tokenizer, loaded[0], folder
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
    except Unsupported as error:
        raise UserError(f"dualview cannot follow the attention of {name}: {error}.") from error
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


def _must_speak(name: str, tokenizer: Any) -> None:
    if not tokenizer("a b", add_special_tokens=False)["input_ids"]:
        raise UserError(f"The tokenizer of {name} turns words into no tokens: its files are missing or empty.")


def _room_on_gpus() -> dict[int, int]:
    """What each GPU has free, so that nothing is left to the processor's memory, where a model's layers cannot run."""
    if not torch.cuda.is_available():
        raise UserError(f"--device {BALANCED} spreads a model over GPUs and there is none here; try cpu or auto.")
    return {gpu: int(torch.cuda.mem_get_info(gpu)[0] * _WEIGHTS_SHARE) for gpu in range(torch.cuda.device_count())}


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"Device {device!r} cannot be used here ({first_line(error)}); try cpu or auto.") from error
    return found


def _source(name: str) -> str | Path | HubName:
    """Where a model is read from: a GGUF file's path, a folder in full, or else a name of the hub."""
    if name == "embedded":
        return str(assets.embedded_model())
    if not name.strip():
        raise UserError("--model is empty; give embedded, a folder, a .gguf file or a hub id.")
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"There is no GGUF file {name}.")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"{name} is not a GGUF file: it does not begin with the GGUF mark.")
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"The folder {name} holds no model: it has no config.json.")
        return str(path.absolute()) + "/"
    hub = HubName.parse(name)
    if path.exists() or name.startswith((".", "/", "~")) or hub is None:
        raise UserError(f"There is no model folder {name}; --model takes embedded, a folder, a .gguf file or a hub id.")
    return hub


def _why(name: str, error: Exception) -> str:
    if name.endswith(".gguf"):
        return f"The GGUF file {name} could not be read ({first_line(error)}); it may be cut short: fetch it again."
    if "trust_remote_code=True" in str(error):
        return (
            f"The model {name} needs Python code that comes with it or from another repository, which is not run "
            "unasked; read that code, then add --trust-remote-code (trust_remote_code=True)."
        )
    no_tokenizer = "instantiate the backend tokenizer" in str(error)
    why = "there is no tokenizer beside it: save it to the same folder" if no_tokenizer else first_line(error)
    return (
        f"The model {name} could not be loaded ({why}); --model takes embedded, a folder with "
        "config.json and safetensors weights, a .gguf file, or the id of a causal LM on a reachable hub."
    )


def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
