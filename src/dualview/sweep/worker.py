"""Computes cells one after another, with one model in memory and the last passes cached for the next cell.

The same worker runs in process and in a Ray actor. A cell's numbers do not depend on the cells before it.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from dualview.comparison.cache import LastOfEach
from dualview.comparison.prepare import Prepared, load, prepare
from dualview.comparison.result import Result
from dualview.comparison.run import measure
from dualview.io.errors import UserError
from dualview.io.hashing import sha256_of
from dualview.io.progress import Silent
from dualview.models.language_model import LanguageModel
from dualview.options import RunOptions
from dualview.records import Records
from dualview.store.cell_key import CellIdentity, HashFile, identify
from dualview.sweep.spec import MODEL_OPTIONS

FIRST_BATCH = 64
"""Where halving starts if no batch size was given."""
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED", re.I)


class OutOfMemory(UserError):
    """A cell that does not fit in memory, however small its batches."""


class Worker:
    """Holds one model at a time."""

    def __init__(self, *, threads: int | None = None, hash_file: HashFile = sha256_of) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._hash_file = hash_file
        self._named: tuple[Any, ...] | None = None
        self._model: LanguageModel | UserError | None = None
        self._cache = LastOfEach()
        self._ready: Prepared | None = None

    def identify(self, options: RunOptions) -> CellIdentity:
        """What the cell's numbers depend on; loads the model and makes the prompts if necessary."""
        identity, _ = self._with_memory(options, self._prepared)
        return replace(identity, settings={**identity.settings, "batch_size": options.batch_size})

    def compute(self, options: RunOptions) -> tuple[CellIdentity, Mapping[str, Any], Records | None]:
        """The cell's identity, result and tensors (if kept); the batch is halved as often as memory requires."""
        identity = self.identify(options)
        result, batch = self._with_memory(options, self._measured)
        content = result.to_json()
        if batch != options.batch_size:
            content["warnings"] = [
                *content["warnings"],
                f"out of memory: the batch was halved until it fitted, down to {batch} queries a pass.",
            ]
        return identity, content, result.records if options.save_records else None

    def _prepared(self, options: RunOptions) -> CellIdentity:
        if self._ready is None or self._ready.options != options:
            self._ready = None
            self._ready = prepare(options, self._loaded(options), cache=self._cache)
        return identify(self._ready, self._hash_file)

    def _measured(self, options: RunOptions) -> Result:
        self._prepared(options)
        assert self._ready is not None
        result = measure(self._ready)
        skipped = result.controls_skipped or {}
        for reason in skipped.values():
            if _NO_MEMORY.search(reason):
                raise MemoryError(reason)
        return result

    def _with_memory(self, options: RunOptions, work: Any) -> tuple[Any, int | None]:
        """What `work` returns for the options, and the batch size it needed."""
        self._loaded(options)
        batch = options.batch_size
        while True:
            try:
                return work(replace(options, batch_size=batch)), batch
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._free()
            batch = (batch or min(FIRST_BATCH, options.n_queries)) // 2
            if batch < 1:
                raise OutOfMemory(f"Out of memory even with one query a pass ({reason}).")

    def _free(self) -> None:
        """Free what is only kept to save time."""
        self._ready = None
        self._cache = LastOfEach()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _loaded(self, options: RunOptions) -> LanguageModel:
        """The cell's model; one that failed to load is not tried again for the next cell."""
        named = tuple(getattr(options, name) for name in MODEL_OPTIONS)
        if named != self._named:
            if self._model is not None:  # free the old one before loading
                self._named, self._model = None, None
                self._free()
            self._named, self._model = named, _load(options)
        if isinstance(self._model, UserError):
            raise self._model
        assert self._model is not None
        return self._model


def _load(options: RunOptions) -> LanguageModel | UserError:
    try:
        return load(options, Silent())
    except UserError as error:
        return error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return OutOfMemory(f"The model {options.model} does not fit in memory ({error}).")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, in this error or in its cause."""
    if error is None:
        return False
    stated = isinstance(error, RuntimeError | UserError) and _NO_MEMORY.search(str(error)) is not None
    return stated or isinstance(error, MemoryError | torch.OutOfMemoryError) or is_out_of_memory(error.__cause__)
