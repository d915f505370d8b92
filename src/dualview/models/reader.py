"""How a model reads text: where its files are, its tokenizer, and the number of its positions.

Prompts need no weights, and importing what transformers needs for weights takes as long as importing torch. So nothing
here imports a model class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from dualview.io import assets
from dualview.io.collector import collector_paused
from dualview.io.errors import UserError, first_line
from dualview.io.gguf import cache as gguf_cache
from dualview.io.gguf.reading import read_gguf
from dualview.io.hub import HubName
from dualview.models.hub import Snapshot, fetch_code, fetch_model

T = TypeVar("T")
_log = logging.getLogger("dualview.models")


@dataclass(frozen=True)
class Reader:
    """What a model's prompts depend on."""

    tokenizer: Any
    """A Hugging Face tokenizer; `tasks.prompts.Tokenizer` lists what dualview uses."""
    config: Any

    @property
    def context(self) -> int | None:
        """How many positions the model has, if its configuration states it."""
        config = self.config.get_text_config()
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            found = getattr(config, key, None)
            if isinstance(found, int) and found > 0:
                return found
        return None

    def room(self, at_most: int | None = None) -> int | None:
        """How many positions a prompt may use: the model's context, or `at_most` if that is less."""
        return min((limit for limit in (self.context, at_most) if limit is not None), default=None)


def load_reader(name: str, *, dtype: str = "float32", trust_remote_code: bool = False) -> Reader:
    """The tokenizer and configuration of a model, without its weights. A GGUF file is converted (to `dtype`) and cached
    as for a run, so that the next start is fast."""
    quiet()
    source = locate(name)
    with collector_paused(), explained(name):
        if isinstance(source, Path):
            found = from_conversion(source, dtype, lambda folder: _read(str(folder)))
            if found is not None:
                return found[0]
            read = read_gguf(source, torch.float32)
            return Reader(read.tokenizer, read.model.config)
        folder = snapshot(source, trust_remote_code, weights=False).folder
        reader = _read(f"{folder}/", trust_remote_code=trust_remote_code)
        must_speak(name, reader.tokenizer)
        return reader


def _read(folder: str, **options: Any) -> Reader:
    options |= {"local_files_only": True}
    return Reader(
        AutoTokenizer.from_pretrained(folder, **options),
        AutoConfig.from_pretrained(folder, **options),
    )


def from_conversion(path: Path, dtype: str, read: Callable[[Path], T]) -> tuple[T, Path] | None:
    """What `read` finds in the cached conversion of a GGUF file, and its folder; None where there is none to read.

    The file is converted first if necessary. A conversion that cannot be read is removed.
    """
    folder = gguf_cache.converted(path, dtype)
    if folder is None:
        return None
    try:
        return read(folder), folder
    except Exception as error:
        why = first_line(error)
        _log.warning("The cached conversion of %s could not be loaded and is removed (%s).", path.name, why)
        gguf_cache.discard(folder)
        return None


def snapshot(source: str | HubName, trust_remote_code: bool, *, weights: bool = True) -> Snapshot:
    """The files of a model, and of the code it takes from elsewhere, on this machine."""
    if isinstance(source, HubName):
        return fetch_model(source, trust_remote_code=trust_remote_code, weights=weights)
    folder = Path(source)
    return Snapshot(folder, code=fetch_code(folder) if trust_remote_code else {})


def must_speak(name: str, tokenizer: Any) -> None:
    if not tokenizer("a b", add_special_tokens=False)["input_ids"]:
        raise UserError(f"The tokenizer of {name} turns words into no tokens: its files are missing or empty.")


def locate(name: str) -> str | Path | HubName:
    """Where a model is read from: a GGUF file's path, a folder in full, or else a name of the hub."""
    if name == "embedded":
        return str(assets.embedded_model())
    if (known := assets.named_model(name)) is not None:
        return known
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


@contextmanager
def explained(name: str) -> Generator[None]:
    """Whatever transformers raises becomes one sentence about the model."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(_why(name, error)) from error


def _why(name: str, error: Exception) -> str:
    if name.endswith(".gguf"):
        return f"The GGUF file {name} could not be read ({first_line(error)}); it may be cut short: fetch it again."
    if "trust_remote_code=True" in str(error):
        return (
            f"The model {name} needs Python code that comes with it or from another repository, which is not run "
            "unasked; read that code, then add --trust-remote-code (trust_remote_code=True)."
        )
    no_tokenizer = "instantiate the backend tokenizer" in str(error)
    why = "its folder has no tokenizer: save one there" if no_tokenizer else first_line(error)
    return (
        f"The model {name} could not be loaded ({why}); --model takes embedded, a folder with "
        "config.json and safetensors weights, a .gguf file, or the id of a causal LM on a reachable hub."
    )


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
