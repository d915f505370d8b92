"""A cache of converted GGUF files: a folder of safetensors for each, found by the file's content.

An entry is named by the sha256 of the GGUF file, the dtype of its weights, and a tag for the converter: this module's
`CONVERTER` and the versions of transformers and gguf. Models in float32 and float64 share an entry in float32; each
half precision has its own. The weights are bit by bit what the GGUF gives when it is read in that dtype.

An entry is made in a temporary folder and renamed into place under a lock, so that a reader sees all of it or nothing
and two processes convert once. All entries together stay within a limit; the least recently used are removed first.
Where the cache cannot be used, a warning says why and the file is read directly.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dualview.io.assets import cache_dir
from dualview.io.atomic import exclusive, write_text
from dualview.io.errors import UserError, first_line
from dualview.io.gguf.reading import count_weights, read_gguf, save_gguf
from dualview.io.hashing import FileNote, digest, file_stamp, notes_of, sha256_of
from dualview.io.json_files import read_if_valid

CONVERTER = 1
"""Raise it when the same file can give other weights."""
LIMIT_VARIABLE = "DUALVIEW_GGUF_CACHE_GB"
_DEFAULT_LIMIT = 50.0
_MANIFEST = "manifest.json"
_STAMPS = "stamps.json"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SPACE_MARGIN = 100_000_000  # bytes: for the tokenizer, and so that the disk is not left full
_SETTLED = 3.0  # seconds
_log = logging.getLogger("dualview.io.gguf")


class _Manifest(BaseModel):
    """What an entry was made from, and what its files must be; its modification time is the entry's last use."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str
    """The GGUF file's name, for messages."""
    source_sha256: str
    dtype: str
    files: dict[str, FileNote]


class _Seen(BaseModel):
    """A GGUF file's hash, and the file as it was then."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    stamp: str
    sha256: str


class _Stamps(BaseModel):
    """The files as they were when they were last seen to match the manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    files: dict[str, str]


@dataclass(frozen=True)
class Conversion:
    """One entry of the cache."""

    source: str
    dtype: str
    path: Path
    size: int
    used: float
    """When it was last used, in seconds since the epoch; 0 for one that cannot be read."""


def converted(path: Path, dtype: str) -> Path | None:
    """The folder to load the GGUF file from, converted first if necessary; None where it must be read directly."""
    limit = _limit()
    if limit == 0:
        return None
    sha256 = _content(path)
    found = _find(sha256, dtype)
    if found is not None:
        return found
    folder = _root() / _name(sha256, _stored(dtype))
    try:
        _root().mkdir(parents=True, exist_ok=True)
        with _locked():
            if _problem(folder) is None:  # another process made it while this one waited
                return folder
            return _make(path, sha256, _stored(dtype), folder, limit)
    except _Unreadable as error:
        raise error.why from error
    except Exception as error:  # a full disk is a bare exception from the Rust writers, not an OSError
        _log.warning("%s is used without caching its conversion in %s (%s).", path.name, _root(), first_line(error))
        return None


class _Unreadable(Exception):
    """The GGUF file cannot be read: not a problem of the cache."""

    def __init__(self, why: Exception):
        super().__init__(str(why))
        self.why = why


def lookup(path: Path) -> Path | None:
    """The folder of a GGUF file that was converted before, in any dtype; it converts nothing."""
    if not _root().is_dir():
        return None
    sha256 = _content(path)
    return next((found for dtype in _BYTES if (found := _find(sha256, dtype)) is not None), None)


def conversions() -> list[Conversion]:
    """Every entry, the least recently used first."""
    folders = [path for path in _root().glob("*") if path.is_dir() and not path.name.startswith(".")]
    return sorted((_describe(folder) for folder in folders), key=lambda entry: (entry.used, entry.path.name))


def clear() -> list[Conversion]:
    """Remove every entry; returns what was removed."""
    found = conversions()
    if found or any(_leftovers()):
        try:
            with _locked():
                for entry in found:
                    _remove(entry.path)
                _remove_leftovers()
        except OSError as error:
            raise UserError(f"{_root()} cannot be cleared ({error}); check who may write there.") from error
    return found


def discard(folder: Path) -> None:
    """Remove an entry that did not load."""
    with suppress(OSError), _locked():
        _remove(folder)


def _root() -> Path:
    return cache_dir() / "gguf"


def _stored(dtype: str) -> str:
    return dtype if dtype in _BYTES else "float32"


def _name(sha256: str, dtype: str) -> str:
    return f"{sha256}-{dtype}-{_tag()}"


def _tag() -> str:
    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    return digest(f"{CONVERTER} {of('transformers')} {of('gguf')}")[:12]


def _limit() -> int:
    """The limit in bytes; 0 keeps nothing."""
    stated = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        limit = float(stated) if stated else _DEFAULT_LIMIT
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise UserError(f"{LIMIT_VARIABLE} is {stated!r}; give a number of gigabytes, 0 to keep no conversions.")
    return int(limit * 1e9)


def _find(sha256: str, dtype: str) -> Path | None:
    """An entry that gives the file in `dtype`: in that dtype, or in float32, which converts to any."""
    for stored in dict.fromkeys((_stored(dtype), "float32")):
        folder = _root() / _name(sha256, stored)
        if folder.is_dir() and _problem(folder) is None:
            with suppress(OSError):  # a read-only cache
                os.utime(folder / _MANIFEST)
            return folder
    return None


def _problem(folder: Path) -> str | None:
    """Why an entry cannot be used, or None. A file is hashed only if it changed since it was last found intact."""
    manifest, seen = read_if_valid(_Manifest, folder / _MANIFEST), read_if_valid(_Stamps, folder / _STAMPS)
    if manifest is None:
        return f"{_MANIFEST} is missing or unreadable"
    try:
        stamps = {name: file_stamp(folder / name) for name in manifest.files}
    except OSError as error:
        return first_line(error)
    known = {} if seen is None else seen.files
    for name, note in manifest.files.items():
        if (problem := note.problem(folder / name, rehash=stamps[name] != known.get(name))) is not None:
            return problem
    if stamps != known:
        with suppress(UserError):
            write_text(folder / _STAMPS, _Stamps(files=stamps).model_dump_json())
    return None


def _content(path: Path) -> str:
    """The sha256 of a GGUF file; remembered while nothing about the file changes."""
    note = _root() / f".seen-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
    stamp = file_stamp(path)
    seen = read_if_valid(_Seen, note)
    if seen is not None and seen.stamp == stamp:
        return seen.sha256
    sha256 = sha256_of(path)
    # A file written to moments ago may be written to again within the same tick of the file system's clock.
    settled = time.time() - path.stat().st_ctime > _SETTLED
    if settled and file_stamp(path) == stamp and _root().is_dir():
        with suppress(UserError):
            write_text(note, _Seen(stamp=stamp, sha256=sha256).model_dump_json())
    return sha256


def _make(path: Path, sha256: str, dtype: str, folder: Path, limit: int) -> Path | None:
    """Convert the file into `folder`, with the lock held; None, with a warning, where there is no space for it."""
    _remove_leftovers()
    if folder.exists():
        _log.warning("The cached conversion of %s is damaged (%s); it is made again.", path.name, _problem(folder))
        _remove(folder)
    try:
        need = count_weights(path) * _BYTES[dtype] + _SPACE_MARGIN
    except Exception as error:
        raise _Unreadable(error) from error
    if not _has_space(path, need, limit):
        return None
    torch: Any = importlib.import_module("torch")
    _log.info("converting %s once into %s", path.name, folder)
    with tempfile.TemporaryDirectory(dir=_root(), prefix=".making-", ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        try:
            read = read_gguf(path, getattr(torch, dtype))
        except Exception as error:
            raise _Unreadable(error) from error
        save_gguf(read, made)
        files = notes_of(made)
        manifest = _Manifest(source=path.name, source_sha256=sha256, dtype=dtype, files=files)
        write_text(made / _STAMPS, _Stamps(files={name: file_stamp(made / name) for name in files}).model_dump_json())
        write_text(made / _MANIFEST, manifest.model_dump_json(indent=1) + "\n")
        made.replace(folder)
    return folder


def _has_space(path: Path, need: int, limit: int) -> bool:
    """Whether `need` more bytes fit the limit, once older entries are removed, and the disk."""
    if need > limit:
        _log.warning(
            "%s is used without caching its conversion, which takes %s, more than the %s that %s allows.",
            *(path.name, _size(need), _size(limit), LIMIT_VARIABLE),
        )
        return False
    entries = conversions()
    total = sum(entry.size for entry in entries)
    for entry in entries:
        if total + need <= limit:
            break
        _remove(entry.path)
        total -= entry.size
        _log.warning(
            "Removed the cached conversion of %s (%s), the least recently used, to stay within the %s of %s.",
            *(entry.source, _size(entry.size), _size(limit), LIMIT_VARIABLE),
        )
    free = shutil.disk_usage(_root()).free
    if need > free:
        _log.warning(
            "%s is used without caching its conversion, which takes %s, since only %s are free in %s.",
            *(path.name, _size(need), _size(free), _root()),
        )
    return need <= free


def _describe(folder: Path) -> Conversion:
    size = sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())
    manifest = read_if_valid(_Manifest, folder / _MANIFEST)
    if manifest is None:
        return Conversion("(unreadable)", "", folder, size, 0.0)
    return Conversion(manifest.source, manifest.dtype, folder, size, (folder / _MANIFEST).stat().st_mtime)


def _remove(folder: Path) -> None:
    """Move the entry away in one step, so that no process finds half of it, then delete it."""
    aside = tempfile.TemporaryDirectory(dir=folder.parent, prefix=".removing-", ignore_cleanup_errors=True)
    with aside, suppress(FileNotFoundError):
        folder.replace(Path(aside.name) / "entry")


def _leftovers() -> Iterator[Path]:
    """What a killed process was making or removing, if the lock is held."""
    yield from _root().glob(".making-*")
    yield from _root().glob(".removing-*")


def _remove_leftovers() -> None:
    for leftover in _leftovers():
        shutil.rmtree(leftover, ignore_errors=True)


def _locked() -> AbstractContextManager[None]:
    """One lock for the whole cache: the limit is on all entries together."""
    waiting = "waiting for another process that is converting a GGUF file"
    return exclusive(_root() / ".lock", lambda: _log.info(waiting))


def _size(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"
