"""Writes a file whole or not at all, and runs code in one process at a time."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dualview.io.errors import UserError


@contextmanager
def whole(path: Path) -> Generator[Path]:
    """A temporary file to write to; it becomes `path` once all is written, and is removed if anything fails."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # some writers create files that only their owner can read
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}); choose another place.") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def must_be_writable(path: Path) -> None:
    """Refuse a file that cannot be written before the work, not after it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file.")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    try:
        probe = folder / f".{secrets.token_hex(8)}.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}); choose another place.") from error


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
