"""Trainings that survive being killed: their state on disk, and what each of them found.

A training saves its state with `unit.save(lambda: capture(…))` after each step (written every `save_every` seconds) and
starts with `unit.load()` and `restore(…)`. A training that was killed and resumed ends in the same numbers: bit for
bit on a CPU.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from dualview.io.atomic import whole, write_json
from dualview.io.versions import version_of
from dualview.lab.settings import LabSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class TrainingState:
    """A stopped training: tensors by name, and what JSON can hold (steps done, curves)."""

    tensors: dict[str, Tensor]
    info: dict[str, Any]


def decides(lab: str, settings: LabSettings, device: torch.device, **more: Any) -> dict[str, Any]:
    """Everything but the seed that decides a training's numbers; `more` is the lab's own (the hash of a text).

    It holds the kind of device that was picked, not the one asked for: a CPU does not resume a GPU's state.
    """
    return {**settings.of_one_training(), "lab": lab, "device": device.type, **more}


class Unit:
    """One training of a lab: resumed where it was killed, and not done twice.

    It is stored in OUT/.state-<key>/. The key is a hash of all that decides its numbers (settings, seed, versions), so
    that no other training resumes from it. Without `out` nothing is stored.
    """

    def __init__(self, out: Path | str | None, decides: Mapping[str, Any], every: float = 10.0) -> None:
        everything = {**decides, "versions": [version_of("dualview"), version_of("torch")]}
        key = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = None if out is None else Path(out) / f".state-{key}"
        self.every = every
        self.resumed = False
        self._saved = time.monotonic()

    @classmethod
    def of(
        cls, out: Path | str | None, lab: str, settings: LabSettings, device: torch.device, seed: int, **more: Any
    ) -> Self:
        """The unit of one seed; `more` distinguishes several trainings of a seed."""
        return cls(out, {**decides(lab, settings, device), "seed": seed, **more}, settings.save_every)

    def once(self, train: Callable[[Unit], dict[str, Any]]) -> dict[str, Any]:
        """What the training found: from before, or by training now."""
        done = self.finished()
        return self.finish(train(self)) if done is None else done

    def finished(self) -> dict[str, Any] | None:
        """What this training found, if it was finished before."""
        path = None if self.folder is None else self.folder / "finished.json"
        return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else None

    def finish(self, found: dict[str, Any]) -> dict[str, Any]:
        """Store what the training found, in place of its state."""
        if self.folder is not None:
            write_json(self.folder / "finished.json", found)
            (self.folder / "state.safetensors").unlink(missing_ok=True)
        return found

    def save(self, state: Callable[[], TrainingState], *, now: bool = False) -> None:
        """Write the state if the last write is long enough ago (or `now`), completely or not at all."""
        if self.folder is None or not (now or time.monotonic() - self._saved >= self.every):
            return
        from safetensors.torch import save_file

        made = state()
        # One file for tensors and JSON: a kill between two writes could leave them at different steps.
        with whole(self.folder / "state.safetensors") as temporary:
            save_file(made.tensors, temporary, {"dualview": json.dumps(made.info, allow_nan=False)})
        self._saved = time.monotonic()

    def load(self) -> TrainingState | None:
        """The last saved state; None if there is none or it cannot be read: then the training starts again."""
        from safetensors import SafetensorError, safe_open

        path = None if self.folder is None else self.folder / "state.safetensors"
        if path is None or not path.is_file():
            return None
        try:
            with cast("Any", safe_open(path, framework="pt")) as file:
                info = json.loads(file.metadata()["dualview"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            return None
        self.resumed = True
        return TrainingState(tensors, info)

    def remove(self) -> None:
        """Remove what is stored; the result has the numbers."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.resumed = False


def capture(
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer,
    generators: Mapping[str, torch.Generator],
    **info: Any,
) -> TrainingState:
    """All that decides how a training continues; `info` is the lab's own (the step, the curves so far)."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    kept: dict[str, Any] = optimiser.state_dict()
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in kept["state"].items():
        for name, value in entries.items():
            if hasattr(value, "detach"):
                tensors[f"optimiser/{index}/{name}"] = value
            else:
                numbers.setdefault(str(index), {})[name] = value
    groups = [{k: v for k, v in group.items() if k != "params"} for group in kept["param_groups"]]
    tensors |= {f"generator/{name}": generator.get_state() for name, generator in generators.items()}
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return TrainingState(copies, {"groups": groups, "numbers": numbers, "info": info})


def restore(
    state: TrainingState,
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer,
    generators: Mapping[str, torch.Generator],
) -> dict[str, Any]:
    """Put a captured state back into newly made parts; returns `capture`'s `info`."""
    model.load_state_dict({k[6:]: v for k, v in state.tensors.items() if k.startswith("model/")})
    fresh: dict[str, Any] = optimiser.state_dict()
    entries: dict[int, dict[str, Any]] = {int(k): dict(v) for k, v in state.info["numbers"].items()}
    for name, tensor in state.tensors.items():
        if name.startswith("optimiser/"):
            _, index, key = name.split("/", 2)
            entries.setdefault(int(index), {})[key] = tensor
    groups = [
        {**old, **{k: tuple(v) if isinstance(v, list) else v for k, v in new.items()}}
        for old, new in zip(fresh["param_groups"], state.info["groups"], strict=True)
    ]
    optimiser.load_state_dict({"state": entries, "param_groups": groups})
    for name, generator in generators.items():
        generator.set_state(state.tensors[f"generator/{name}"])
    return state.info["info"]
