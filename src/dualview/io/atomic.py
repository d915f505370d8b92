"""Writes a file whole or not at all, and runs code in one process at a time."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dualview.io.errors import UserError


@contextmanager
def whole(path: Path) -> Generator[Path]:
    """A temporary file to write to; it becomes `path` once all is written, and is removed if anything fails.

    A link stays: the file that it points to is replaced. A device or a pipe stays too: the content is written into it.
    """
    try:
        if _is_stream(path):
            with _through(path) as temporary:
                yield temporary
        else:
            with _in_place_of(_followed(path)) as temporary:
                yield temporary
    except OSError as error:
        raise _unwritable(path, error) from error


@contextmanager
def _in_place_of(path: Path) -> Generator[Path]:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        share(temporary)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def share(*files: Path) -> None:
    """Give files the permissions that new ones have: some writers create them for their owner alone."""
    for file in files:
        file.chmod(0o666 & ~_umask())


@contextmanager
def _through(stream: Path) -> Generator[Path]:
    """Written elsewhere first: some formats seek, which a pipe cannot, and a part of a file is never sent."""
    with tempfile.TemporaryDirectory(prefix="dualview-") as folder:
        temporary = Path(folder) / stream.name
        yield temporary
        # Opened without the permission to create it, which Linux refuses for another user's pipe in /tmp.
        with temporary.open("rb") as content, os.fdopen(os.open(stream, os.O_WRONLY), "wb") as opened:
            shutil.copyfileobj(content, opened)


def must_be_writable(path: Path) -> None:
    """Refuse a file that cannot be written before the work, not after it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file.")
    if path.is_socket():
        raise UserError(f"{path} is a socket, which cannot be written like a file; name a file or a pipe.")
    try:
        if not _is_stream(path):
            _probe(_followed(path))
        elif not os.access(path, os.W_OK):  # opening a pipe would wait for its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(path, error) from error


def _probe(path: Path) -> None:
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    probe = folder / f".{secrets.token_hex(8)}.part"
    probe.touch()
    probe.unlink()


def _is_stream(path: Path) -> bool:
    """Whether a path, or what it links to, is a device or a pipe: content goes through it, and it is never replaced."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _followed(path: Path) -> Path:
    """What a link points to, which may not be there yet; any other path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written ({error.strerror or error}); choose another place.")


def write_text(path: Path, text: str) -> Path:
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


@contextmanager
def exclusive(lock: Path, on_wait: Callable[[], object]) -> Generator[None]:
    """Hold a lock file; `on_wait` is called if another process holds it."""
    from filelock import FileLock, Timeout  # here, because it imports asyncio, which `--help` should not wait for

    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        on_wait()
        held.acquire()
    try:
        yield
    finally:
        held.release()
