"""What of dualview works on this machine, what works offline, and the command that installs what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Any

from dualview.io.assets import DATA, MODEL, cache_dir, list_assets
from dualview.io.gguf import cache as gguf_cache
from dualview.io.json_files import Place, check_place, save_json
from dualview.io.versions import versions

EXTRAS = {
    "hub": (("datasets",), "tasks with rows on the Hugging Face hub"),
    "lm-eval": (("lm_eval", "datasets"), "tasks of lm-evaluation-harness (--task lm-eval:NAME)"),
    "peft": (("peft",), "making and loading LoRA adapters with PEFT (run --adapter reads them without it)"),
    "xarray": (("xarray",), "Records.to_xarray and export --format netcdf"),
    "ray": (("ray",), "sweeps on a Ray cluster"),
    "track": (("tensorboard", "trackio", "wandb"), "sweeps logged to TensorBoard, Trackio or W&B"),
}
"""Each extra's modules, and what needs them."""


@dataclass(frozen=True)
class Missing:
    """Something that is not installed or not fetched."""

    what: str
    needed_for: str
    command: str
    required: bool
    """Nothing runs without it."""


@dataclass(frozen=True)
class Diagnosis:
    """What `dualview doctor` prints."""

    versions: dict[str, str]
    device: dict[str, Any]
    """What `--device auto` takes, the GPUs, the CPU and its threads."""
    cache: dict[str, Any]
    offline: dict[str, bool]
    """What works without a network."""
    missing: list[Missing]

    @property
    def healthy(self) -> bool:
        """Whether everything that dualview requires is there."""
        return not any(each.required for each in self.missing)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "healthy": self.healthy}


def doctor(*, json: Place = None) -> Diagnosis:
    """Look at versions, device, cache and extras, without downloading anything.

    `json` is a file, or "-" for standard output.
    """
    check_place(json)
    assets = {status.name: status.state for status in list_assets()}
    ready = all(assets[each.name] == "ready" for each in (MODEL, DATA))
    missing = _requirements() + [
        Missing(f"extra {name}", what, f"pip install 'dualview[{name}]'", required=False)
        for name, (modules, what) in EXTRAS.items()
        if any(find_spec(module) is None for module in modules)
    ]
    if not ready:
        why = "the default model and tasks; a run fetches them by itself where there is a network"
        missing.append(Missing("the embedded model and data", why, "dualview assets fetch", required=False))
    for name, state in assets.items():
        if state != "ready" and name not in (MODEL.name, DATA.name):
            what = f"a larger model, with --model {name}"
            missing.append(Missing(name, what, f"dualview assets fetch {name}", required=False))
    found = Diagnosis(
        versions=versions(),
        device=_device(),
        cache=_cache(assets),
        offline={
            "verify, lab, exact, metrics, report, a store": True,
            "models and tasks in files of your own": True,
            "the embedded model and tasks": ready,
            "models and tasks of the hub that are in its cache": find_spec("datasets") is not None,
        },
        missing=missing,
    )
    save_json(json, found.to_json())
    return found


def _requirements() -> list[Missing]:
    """The packages that dualview requires and that are absent or too old."""
    from packaging.requirements import Requirement

    try:
        listed = [Requirement(text) for text in requires("dualview") or ()]
    except PackageNotFoundError:  # run from a folder on PYTHONPATH
        return []
    found: list[Missing] = []
    for requirement in listed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = None
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            what = requirement.name if installed is None else f"{requirement.name} ({installed} is too old)"
            command = f"pip install '{requirement.name}{requirement.specifier}'"
            found.append(Missing(what, "everything", command, required=True))
    return found


def _device() -> dict[str, Any]:
    cpu: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    try:
        import torch
    except ImportError:
        return {"auto": None, "gpus": [], **cpu}
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {"auto": "cuda" if gpus else "cpu", "gpus": gpus, **cpu, "threads": torch.get_num_threads()}


def _cache(assets: dict[str, str]) -> dict[str, Any]:
    folder = cache_dir()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return {
        "folder": str(folder),
        "writable": os.access(there, os.W_OK),
        "free_bytes": shutil.disk_usage(there).free,
        "assets": assets,
        "converted_gguf_files": len(gguf_cache.conversions()),
    }
