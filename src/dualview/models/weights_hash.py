"""The sha256 of a model's weights: computed once, while other work goes on, and kept for the next start.

Hashing 15 GB takes more than ten seconds and does not need the interpreter, so it runs on a thread
of its own from the moment a run begins; what it found is kept under the files that the weights came from, by their
paths, sizes and times of change.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread

import torch
import transformers
from jaxtyping import UInt8
from torch import Tensor

from dualview.io.assets import cache_dir
from dualview.io.atomic import write_text
from dualview.io.errors import UserError

_VERSION = 1
_SETTLED_NS = 2_000_000_000
_PART_BYTES = 64 << 20


class WeightsHash:
    """The hash of one model's weights; `files` are where they were read from, if anywhere."""

    def __init__(self, files: tuple[Path, ...] = ()) -> None:
        self._files = files
        self._found: Future[str] | None = None

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Begin, if it has not begun: other work may go on meanwhile, as long as it does not write to the weights."""
        if self._found is None:
            # The dictionary is copied: the caller's may change while the thread reads it.
            self._found = Future[str]()
            Thread(target=self._work, args=(self._found, dict(weights)), daemon=True, name="weights-hash").start()

    def value(self, weights: Mapping[str, Tensor]) -> str:
        self.start(weights)
        assert self._found is not None
        return self._found.result()

    def _work(self, found: Future[str], weights: Mapping[str, Tensor]) -> None:
        try:
            found.set_result(self._known_or_computed(weights))
        except Exception as error:
            found.set_exception(error)

    def _known_or_computed(self, weights: Mapping[str, Tensor]) -> str:
        note = _note(self._files, weights)
        if note is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                return str(json.loads(note.read_text(encoding="utf-8"))["sha256"])
        found = hash_weights(weights)
        if note is not None:
            with suppress(UserError, OSError):  # a cache that can only be read
                note.parent.mkdir(parents=True, exist_ok=True)
                write_text(note, json.dumps({"sha256": found, "files": [str(path) for path in self._files]}))
        return found


def hash_weights(weights: Mapping[str, Tensor]) -> str:
    """sha256 over every weight's name, shape, dtype and bytes."""
    digest = hashlib.sha256()
    copying: dict[torch.device, _Copying] = {}
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        if not tensor.is_cuda:
            digest.update(_raw(tensor.cpu()).numpy().data)
            continue
        if tensor.device not in copying:
            copying[tensor.device] = _Copying(tensor.device)
        for part in copying[tensor.device].parts(tensor):
            digest.update(part.numpy().data)
    return digest.hexdigest()


def _raw(tensor: Tensor) -> UInt8[Tensor, " byte"]:
    """As bytes, because numpy has no bfloat16."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


class _Copying:
    """Copies weights from a GPU, part by part, into memory that it can write to by itself.

    Into other memory a copy takes nearly as long as the hash. On a stream of its own it does not wait for the work that
    goes on there, nor hold it up.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._room = torch.empty(_PART_BYTES, dtype=torch.uint8, pin_memory=cuda)

    def parts(self, tensor: Tensor) -> Generator[UInt8[Tensor, " byte"]]:
        """The tensor's bytes in parts; each is overwritten by the next."""
        with torch.cuda.stream(self._stream):
            raw = _raw(tensor)
        for part in raw.split(len(self._room)):
            there = self._room[: len(part)]
            with torch.cuda.stream(self._stream):
                there.copy_(part, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()
            yield there


def _note(files: tuple[Path, ...], weights: Mapping[str, Tensor]) -> Path | None:
    """Where the hash of these files, read into these dtypes by this version of transformers, is kept."""
    if not files:
        return None
    try:
        seen = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    except OSError:
        return None
    if time.time_ns() - max(changed for _, _, changed in seen) < _SETTLED_NS:
        return None  # a file that is written twice in a moment may keep its size and time
    shapes = [(name, str(tensor.dtype), *tensor.shape) for name, tensor in sorted(weights.items())]
    key = json.dumps([_VERSION, transformers.__version__, seen, shapes])
    return cache_dir() / "weights" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
