"""The versions a result was computed with.

`dualview` reads its own version from its source, because it may run from a folder on PYTHONPATH without being
installed.
"""

from __future__ import annotations

import importlib
import platform
from importlib.metadata import PackageNotFoundError, version

import dualview

UNKNOWN = "unknown (no package metadata)"
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "scipy", "safetensors")


def version_of(package: str) -> str:
    """A package's version: from its metadata, or else from the module itself, or else `UNKNOWN`."""
    if package == "dualview":
        return dualview.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        pass
    try:
        stated = getattr(importlib.import_module(package), "__version__", None)
    except ImportError:
        stated = None
    return UNKNOWN if stated is None else str(stated)


def versions() -> dict[str, str]:
    """Of Python, dualview and the libraries that decide numbers."""
    own = {"python": platform.python_version(), "dualview": dualview.__version__}
    return {**own, **{name: version_of(name) for name in _PACKAGES}}
