"""Hashes of a loaded model's tokenizer and of the Python files that come with it.

The prompts' token ids are in a cell's key already; the tokenizer's hash covers every text that is tokenized later
(selection rows, content-free texts, the controls' demonstrations).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dualview.io.hashing import digest, sha256_of

if TYPE_CHECKING:
    from dualview.models.language_model import LanguageModel

_REMOTE = "transformers_modules."
"""transformers imports the Python files that come with a model under this name."""
_SETTINGS = ("bos_token_id", "eos_token_id", "unk_token_id", "add_bos_token", "add_eos_token", "split_special_tokens")
_PER_CALL = ("padding", "truncation")
"""Parts of a fast tokenizer that each call sets again; dualview uses neither."""


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of everything that decides how a tokenizer turns text into ids; the chat template does not."""
    settings = {name: getattr(tokenizer, name, None) for name in _SETTINGS}
    settings["special"] = sorted(tokenizer.all_special_ids)
    settings["length"] = len(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content = _slow(tokenizer)
    else:
        content = {name: value for name, value in json.loads(backend.to_str()).items() if name not in _PER_CALL}
    return digest(json.dumps([settings, content], sort_keys=True, default=str))


def _slow(tokenizer: Any) -> dict[str, Any]:
    """A tokenizer written in Python: its class, words, merges and arguments, without paths."""
    made = cast("dict[str, Any]", getattr(tokenizer, "init_kwargs", {}))
    pieces = getattr(tokenizer, "sp_model", None)
    merges = cast("dict[Any, int]", getattr(tokenizer, "bpe_ranks", {}))
    return {
        "class": type(tokenizer).__name__,
        "words": sorted(tokenizer.get_vocab().items()),
        "merges": sorted((rank, str(pair)) for pair, rank in merges.items()),
        "pieces": None if pieces is None else hashlib.sha256(pieces.serialized_model_proto()).hexdigest(),
        "made with": {name: str(value) for name, value in made.items() if not _is_a_place(name)},
    }


def _is_a_place(name: str) -> bool:
    return name.endswith(("_file", "_path")) or name in ("chat_template", "tokenizer_object", "_commit_hash")


def remote_code_hash(lm: LanguageModel) -> str | None:
    """sha256 of the Python files that came with the model; None where there are none."""
    # Two repositories may have files of the same name, so the content counts too.
    parts = {f"{name} {sha256_of(file)}" for name, file in _remote_files(lm)}
    return digest(*sorted(parts)) if parts else None


def _remote_files(lm: LanguageModel) -> Iterator[tuple[Path, Path]]:
    """The files of the model's own classes and the neighbours they import: relative name and path of each."""
    things = (lm.model.config, lm.tokenizer, *lm.model.modules())
    kinds = {kind for thing in things for kind in type(thing).__mro__ if kind.__module__.startswith(_REMOTE)}
    if not kinds:
        return
    from transformers.dynamic_module_utils import get_relative_import_files

    for module in {kind.__module__ for kind in kinds}:
        file = sys.modules[module].__file__
        assert file is not None
        folder = Path(file).parent
        for each in (file, *get_relative_import_files(file)):
            yield Path(each).relative_to(folder), Path(each)
