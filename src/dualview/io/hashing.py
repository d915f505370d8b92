"""Hashes of files: to find damage, and to recognise a file or a folder by its content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class FileNote(BaseModel):
    """What a file must be."""

    model_config = ConfigDict(frozen=True)

    size: int
    sha256: str

    def problem(self, path: Path, *, rehash: bool = True) -> str | None:
        """Why a file is not the one that was noted, or None; without `rehash` only its size is compared."""
        try:
            size = path.stat().st_size
            if size != self.size:
                return f"{path.name} has {size} bytes instead of {self.size}"
            if rehash and sha256_of(path) != self.sha256:
                return f"{path.name} is not what was written (its sha256 differs)"
        except FileNotFoundError:
            return f"{path.name} is missing"
        except OSError as error:
            return f"{path.name} cannot be read ({error.strerror or error})"
        return None


def sha256_of(path: Path) -> str:
    """The file's sha256, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def notes_of(folder: Path) -> dict[str, FileNote]:
    """Every file below a folder by its relative name, sorted."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): FileNote(size=path.stat().st_size, sha256=sha256_of(path))
        for path in files
    }


def file_stamp(path: Path) -> str:
    """Changes whenever a file does: no program can set the change time back."""
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


def digest(*parts: str) -> str:
    """The sha256 of some texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
