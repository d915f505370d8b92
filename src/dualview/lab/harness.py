"""What every lab is built from: its result, its tables and figures, and trainings that survive being killed.

A lab is a module `dualview.lab.<name>` with

    Settings                      a frozen dataclass on top of `LabSettings`
    <name>(*, out, json, progress, **settings) -> LabResult
    tables(result)  -> list[Table]                     from the JSON alone, so that documents can be made from files
    figures(result) -> dict[str, matplotlib Figure]    by file name, without ending

and the function goes like this:

    settings, clock = begin(Settings, given, out, json, "name")
    units = [Unit.of(out, "name", settings, device, seed) for seed in …]     one for each training
    results = [unit.finished() or unit.finish(train(unit, …)) for unit in units]
    result = LabResult(lab="name", settings=settings.to_json(), seeds=…, results=…,
                       provenance=provenance("name", settings, clock, device))
    return finish(result, out=out, json=json, tables=tables, figures=figures, units=units)

A training keeps its state with `unit.save(lambda: capture(…))` after each step (it is written every so many seconds)
and begins with `unit.load()` and `restore(…)`. Killed and resumed, it ends in the same numbers: bit for bit on a CPU.
"""

from __future__ import annotations

import hashlib
import json as json_
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from dualview.io import terminal
from dualview.io.atomic import must_be_writable, whole, write_json, write_text
from dualview.io.clock import Clock
from dualview.io.errors import UserError
from dualview.io.saving import extra, save_somewhere
from dualview.io.versions import version_of, versions
from dualview.lab.settings import LabSettings

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import Tensor

SettingsT = TypeVar("SettingsT", bound=LabSettings)


# ------------------------------------------------------------------------------------------------------------ result


class LabResult(BaseModel):
    """What a lab found, as it stands in its JSON file."""

    model_config = ConfigDict(frozen=True)

    lab: str
    settings: dict[str, Any]
    seeds: list[int]
    results: dict[str, Any]
    provenance: dict[str, Any]
    """`provenance.run` holds dates, host and timing: all that two equal runs may differ in."""

    _written: list[Path] = PrivateAttr(default_factory=list[Path])

    @property
    def written(self) -> list[Path]:
        """The files `finish` wrote."""
        return self._written

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"The result {path} cannot be read ({error.strerror}).") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the whole file"
            raise UserError(f"{path} is not a lab's result: {where}: {first['msg']}.") from error


@dataclass(frozen=True)
class Found:
    """What a lab's trainings gave, and the units whose states it came from."""

    results: dict[str, Any]
    units: list[Unit]


class Begun(NamedTuple, Generic[SettingsT]):
    """Checked settings, and a clock that runs from here."""

    settings: SettingsT
    clock: Clock


def begin(
    kind: type[SettingsT], given: Mapping[str, Any], out: Path | str | None, json: Path | str | None, lab: str
) -> Begun[SettingsT]:
    """Check the settings and the places to write to, before any work."""
    settings = kind.make(**given)
    for place in (json, None if out is None else Path(out) / f"{lab}.json"):
        if place is not None:
            must_be_writable(Path(place))
    return Begun(settings, Clock())


def provenance(lab: str, settings: LabSettings, clock: Clock, device: object, **more: Any) -> dict[str, Any]:
    """Where the numbers come from; `more` adds a lab's own facts (the hash of a text, of weights)."""
    import torch

    return {
        "command": command_line(lab, settings),
        "versions": versions(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        **more,
        "run": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "seconds": {name: round(seconds, 3) for name, seconds in clock.laps.items()},
        },
    }


def command_line(lab: str, settings: LabSettings) -> str:
    """The command that repeats the run: the seed, and what differs from the defaults."""
    words = ["dualview", "lab", lab, "--seed", str(settings.seed)]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value == field.default or field.name in ("seed", *settings.WITHOUT_EFFECT):
            continue
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, tuple):
            parts = [str(part) for part in cast("tuple[object, ...]", value)]
            words += [word for part in parts for word in (flag, part)]
        else:
            words += [flag, str(value)]
    return shlex.join(words)


@contextmanager
def one_thread() -> Generator[None]:
    """For models so small that threads only wait for each other; bits then do not depend on the number of cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------------ output


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers, for a terminal and for Markdown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        ruler = "|" + "|".join([" --- ", *(" ---: " for _ in self.columns[1:])]) + "|"
        parts = [f"**{self.title}**", "\n".join([line(self.columns), ruler, *map(line, self.rows)]), self.note]
        return "\n\n".join(part for part in parts if part)


def markdown(result: LabResult, tables: Sequence[Table]) -> str:
    """The command and the tables it gave."""
    shown = "\n\n".join(table.markdown() for table in tables)
    return f"```\n{result.provenance['command']}\n```\n\n{shown}\n"


def show(tables: Sequence[Table]) -> None:
    """Print the tables, as wide as the terminal, or as wide as they need to be in a file."""
    from rich.table import Table as RichTable
    from rich.text import Text

    for table in tables:
        grid = RichTable(box=None, pad_edge=False, header_style="bold")
        for number, column in enumerate(table.columns):
            grid.add_column(Text(column), justify="right" if number else "left", overflow="fold")
        for row in table.rows:
            grid.add_row(*map(Text, row))
        terminal.show(Text(table.title, "bold"), grid, *([Text(table.note, "dim")] if table.note else []), Text(""))


def finish(
    result: LabResult,
    *,
    out: Path | str | None,
    json: Path | str | None,
    tables: Callable[[LabResult], Sequence[Table]],
    figures: Callable[[LabResult], Mapping[str, Figure]],
    units: Sequence[Unit] = (),
) -> LabResult:
    """Write OUT/<lab>.json, and the same to `json`; then the extras, OUT/<lab>.md and the figures.

    An extra that fails is a warning. The units' states are forgotten once the JSON is written.
    """
    folder = None if out is None else Path(out)
    places = [None if json is None else Path(json), None if folder is None else folder / f"{result.lab}.json"]
    wanted = [place for place in places if place is not None]
    result.written.extend(save_somewhere(wanted, lambda place: write_json(place, result.to_json())))
    for unit in units:
        unit.remove()
    if folder is not None:
        kept, page = result.written[0], folder / f"{result.lab}.md"
        told = extra(f"Writing {page}", lambda: _write_page(result, tables(result), page), kept)
        drawn = extra("Drawing the figures", lambda: _write_figures(figures(result), folder), kept)
        result.written.extend([*(told or []), *(drawn or [])])
    return result


def _write_page(result: LabResult, tables: Sequence[Table], page: Path) -> list[Path]:
    write_text(page, markdown(result, tables))
    return [page]


def _write_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    from dualview.report.figures.style import save

    return [path for name, figure in figures.items() for path in save(figure, folder / name)]


# ------------------------------------------------------------------------------------------------------------- state


@dataclass(frozen=True)
class State:
    """A training, stopped: tensors by name, and what JSON can hold (steps done, curves)."""

    tensors: dict[str, Tensor]
    info: dict[str, Any]


def decides(lab: str, settings: LabSettings, device: torch.device, **more: Any) -> dict[str, Any]:
    """All that decides a training's numbers but its seed; `more` is the lab's own (the hash of a text).

    The kind of device that was picked, not what was asked for: no state made on a GPU is taken up on a CPU.
    """
    return {**settings.of_one_training(), "lab": lab, "device": device.type, **more}


class Unit:
    """One training of a lab: taken up where it was killed, and not done twice.

    It lives in OUT/.state-<key>/, the key a hash of all that decides its numbers (settings, seed, versions),
    so that no other training resumes from it. Without `out` nothing is kept.
    """

    def __init__(self, out: Path | str | None, decides: Mapping[str, Any], every: float = 10.0) -> None:
        everything = {**decides, "versions": [version_of("dualview"), version_of("torch")]}
        key = hashlib.sha256(json_.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = None if out is None else Path(out) / f".state-{key}"
        self.every = every
        self.resumed = False
        self._saved = time.monotonic()

    @classmethod
    def of(
        cls, out: Path | str | None, lab: str, settings: LabSettings, device: torch.device, seed: int, **more: Any
    ) -> Self:
        """The unit of one seed; `more` tells apart several trainings of a seed."""
        return cls(out, {**decides(lab, settings, device), "seed": seed, **more}, settings.save_every)

    def finished(self) -> dict[str, Any] | None:
        """What this training found, if it was done before."""
        path = None if self.folder is None else self.folder / "finished.json"
        return json_.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else None

    def finish(self, found: dict[str, Any]) -> dict[str, Any]:
        """Keep what the training found, in place of its state."""
        if self.folder is not None:
            write_json(self.folder / "finished.json", found)
            (self.folder / "state.safetensors").unlink(missing_ok=True)
        return found

    def save(self, state: Callable[[], State], *, now: bool = False) -> None:
        """Write the state if the last time is long enough ago (or `now`), whole or not at all."""
        if self.folder is None or not (now or time.monotonic() - self._saved >= self.every):
            return
        from safetensors.torch import save_file

        made = state()
        # One file, tensors and JSON together: there is no moment at which they disagree.
        with whole(self.folder / "state.safetensors") as temporary:
            save_file(made.tensors, temporary, {"dualview": json_.dumps(made.info, allow_nan=False)})
        self._saved = time.monotonic()

    def load(self) -> State | None:
        """The last state that was written; None if there is none, or if it cannot be read: then one begins again."""
        from safetensors import SafetensorError, safe_open

        path = None if self.folder is None else self.folder / "state.safetensors"
        if path is None or not path.is_file():
            return None
        try:
            with cast("Any", safe_open(path, framework="pt")) as file:
                info = json_.loads(file.metadata()["dualview"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            return None
        self.resumed = True
        return State(tensors, info)

    def remove(self) -> None:
        """Forget it; its numbers stand in the result."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.resumed = False


def capture(
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer,
    generators: Mapping[str, torch.Generator],
    **info: Any,
) -> State:
    """All that decides how a training goes on; `info` is the lab's own (the step, the curves so far)."""
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
    return State(copies, {"groups": groups, "numbers": numbers, "info": info})


def restore(
    state: State,
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer,
    generators: Mapping[str, torch.Generator],
) -> dict[str, Any]:
    """Put a captured state back into freshly made parts; what comes back is `capture`'s `info`."""
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
