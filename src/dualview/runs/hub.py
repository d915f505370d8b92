"""What a hub name stands for just now: the commit of its main branch."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Literal

Kind = Literal["model", "dataset"]
_SECONDS = 10.0


def commit_of(name: str, kind: Kind) -> str | None:
    """The commit that loading `name` would read: the hub's, or offline the cached one; None where neither is known."""
    hub: Any = importlib.import_module("huggingface_hub")
    constants: Any = importlib.import_module("huggingface_hub.constants")  # the package itself does not load it
    if not constants.HF_HUB_OFFLINE:
        try:
            return str(hub.HfApi().repo_info(name, repo_type=kind, timeout=_SECONDS).sha)
        except Exception:  # no network, no such name, no right to read it: loading will say which
            pass
    return _cached(Path(os.fspath(constants.HF_HUB_CACHE)), name, kind)


def _cached(cache: Path, name: str, kind: Kind) -> str | None:
    reference = cache / f"{kind}s--{name.replace('/', '--')}" / "refs" / "main"
    try:
        return reference.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
