"""What every lab is built from: its job, its result, its tables and figures.

A lab is a package `dualview.lab.<name>`. Its module `run` holds the lab, a decorated function that does only the work:

    @lab(NameSettings, tables, figures)
    def name(job: Job[NameSettings]) -> Findings:
        by_seed = job.each("training", job.settings.all_seeds, train_one, lambda seed: {"seed": seed})
        return Findings({"by_seed": by_seed})

It is called as `name(out=…, json=…, progress=…, **settings)` and returns a `LabResult`. Its settings are a frozen
dataclass derived from `LabSettings`; `tables` and `figures` (by file name) are made from the result alone, so that
pages can be made from files. The decorator checks settings and output places before any work, adds the provenance, and
writes what was found.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, PrivateAttr

from dualview.io import terminal
from dualview.io.atomic import must_be_writable, write_json, write_text
from dualview.io.clock import Clock
from dualview.io.json_files import read_model
from dualview.io.progress import Progress, Silent
from dualview.io.saving import extra, save_somewhere
from dualview.io.versions import versions
from dualview.lab.settings import LabSettings
from dualview.lab.units import Unit
from dualview.report.figures.style import save

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from dualview.models.language_model import LanguageModel

SettingsT = TypeVar("SettingsT", bound=LabSettings)
Item = TypeVar("Item")


# ------------------------------------------------------------------------------------------------------------ result


class LabResult(BaseModel):
    """What a lab found, as its JSON file holds it."""

    model_config = ConfigDict(frozen=True)

    lab: str
    settings: dict[str, Any]
    seeds: list[int]
    results: dict[str, Any]
    provenance: dict[str, Any]
    """`provenance.run` holds date, host and timing: the only things in which two equal runs may differ."""

    _written: list[Path] = PrivateAttr(default_factory=list[Path])

    @property
    def written(self) -> list[Path]:
        """The files `finish` wrote."""
        return self._written

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        return read_model(cls, Path(path), "a lab's result")


MakeTables = Callable[[LabResult], Sequence["Table"]]
MakeFigures = Callable[[LabResult], Mapping[str, "Figure"]]


@dataclass(frozen=True)
class Findings:
    """What a lab's work returns."""

    results: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the lab adds to the provenance: the hash of a text or of weights."""
    run_facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """The same for `provenance.run`: what two equal runs may differ in."""
    device: object = None
    """None: that of the job's language model, or the job's."""
    settings: LabSettings | None = None
    """Where the results hold more trainings than this job's, the settings of all of them; None: the job's."""
    seeds: list[int] | None = None
    """None: the settings'."""


class Job(Generic[SettingsT]):
    """One call of a lab: its checked settings, where it writes, and the trainings it has begun."""

    def __init__(self, lab: str, settings: SettingsT, out: Path | str | None, progress: Progress | None) -> None:
        self.lab, self.settings = lab, settings
        self.out = None if out is None else Path(out)
        self.progress = progress or Silent()
        self.clock = Clock()
        self.units: list[Unit] = []
        self.lm: LanguageModel | None = None
        """The language model that the lab measures, if `load_model` loaded one."""
        self.until_written = ExitStack()
        """Contexts (a lock, a temporary folder) that stay open until the result is written."""

    @cached_property
    def device(self) -> torch.device:
        from dualview.models.devices import pick_device

        return pick_device(self.settings.device) if self.lm is None else self.lm.device

    def load_model(self, name: str) -> LanguageModel:
        """The language model that the lab measures: its device and weights are then part of every unit and result."""
        from dualview.models.loading import load_model

        with self.progress.part(f"loading {name}", 1) as advance:
            self.lm = load_model(name, device=self.settings.device)
            advance(1)
        return self.lm

    def unit(self, seed: int, device: torch.device | None = None, **more: Any) -> Unit:
        """The training of one seed; `more` distinguishes several trainings of a seed.

        Its saved state is removed once the result is written.
        """
        if self.lm is not None:
            more["weights_hash"] = self.lm.weights_hash
        made = Unit.of(self.out, self.lab, self.settings, device or self.device, seed, **more)
        self.units.append(made)
        return made

    def each(
        self,
        title: str,
        items: Collection[Item],
        work: Callable[[Item], dict[str, Any]],
        key: Callable[[Item], dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """What `work` finds of every item, in order; `key` has the arguments of the item's own unit."""
        found: list[dict[str, Any]] = []
        with self.progress.part(title, len(items)) as advance:
            for item in items:
                found.append(self.unit(**key(item)).once(lambda _unit, item=item: work(item)))
                advance(1)
        return found

    def keep(self, found: Findings) -> None:
        """Write OUT/<lab>.json with what was found so far, for a run that may be killed."""
        if self.out is not None:
            write_json(self.out / f"{self.lab}.json", self.result(found).to_json())

    def result(self, found: Findings) -> LabResult:
        settings, facts, lm = found.settings or self.settings, found.facts, self.lm
        if lm is not None:
            facts = {"model": lm.name, "model_commit": lm.commit, "weights_hash": lm.weights_hash, **facts}
        origin = provenance(self.lab, settings, self.clock, found.device or self.device, **facts)
        origin["run"] |= found.run_facts
        seeds = settings.all_seeds if found.seeds is None else found.seeds
        return LabResult(
            lab=self.lab, settings=settings.to_json(), seeds=seeds, results=found.results, provenance=origin
        )


class Lab(Generic[SettingsT]):
    """A lab as it is called. Made by `lab` from the function that does its work, with that function's name and text."""

    def __init__(
        self,
        work: Callable[[Job[SettingsT]], Findings],
        kind: type[SettingsT],
        tables: MakeTables,
        figures: MakeFigures,
        single_thread: bool,
    ) -> None:
        self.__name__, self.__module__, self.__doc__ = work.__name__, work.__module__, work.__doc__
        self._work, self._single_thread = work, single_thread
        self.settings, self.tables, self.figures = kind, tables, figures

    def __call__(
        self,
        *,
        out: Path | str | None = None,
        json: Path | str | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> LabResult:
        job = Job(self.__name__.replace("_", "-"), self.settings.make(**settings), out, progress)
        for place in _places(job.lab, out, json):
            must_be_writable(place)
        with job.until_written:
            with one_thread() if self._single_thread else nullcontext():
                result = job.result(self._work(job))
            return finish(result, out=out, json=json, tables=self.tables, figures=self.figures, units=job.units)


def lab(
    kind: type[SettingsT], tables: MakeTables, figures: MakeFigures, *, single_thread: bool = False
) -> Callable[[Callable[[Job[SettingsT]], Findings]], Lab[SettingsT]]:
    """Make a lab of a function that does its work."""
    return lambda work: Lab(work, kind, tables, figures, single_thread)


def provenance(lab: str, settings: LabSettings, clock: Clock, device: object, **more: Any) -> dict[str, Any]:
    """Where the numbers come from; `more` adds the lab's own facts (the hash of a text, of weights)."""
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
    """The command that repeats the run: the seed, and every setting that is not the default."""
    words = ["dualview", "lab", lab, "--seed", str(settings.seed)]
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value == each.default or each.name in ("seed", *settings.WITHOUT_EFFECT):
            continue
        flag = f"--{each.name.replace('_', '-')}"
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
    """For models so small that threads only wait for each other; results then do not depend on the number of cores."""
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
    """Rows of text and numbers, for a terminal and for Markdown."""

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


def number(value: float | None, style: str = ".3f", none: str = "none") -> str:
    """A number in a format; `none` where it is missing.

    >>> number(0.25, "+.2f"), number(None, none="–")
    ('+0.25', '–')
    """
    return none if value is None else format(value, style)


def between(ci: Sequence[float] | None, style: str, none: str = "") -> str:
    """An interval; `none` where it is missing.

    >>> between([-0.1, 0.25], "+.2f"), between(None, "+.2f")
    ('-0.10 to +0.25', '')
    """
    return none if ci is None else f"{ci[0]:{style}} to {ci[1]:{style}}"


def power(log: float) -> str:
    """A number by its decimal logarithm; a large one as a power of ten.

    >>> power(2.0), power(7.3)
    ('100', '10^7')
    """
    return f"{10**log:.0f}" if log < 4 else f"10^{log:.0f}"


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "prompt"), counted(4, "prompt")
    ('1 prompt', '4 prompts')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def markdown(result: LabResult, tables: Sequence[Table]) -> str:
    """The command and the tables it gave."""
    shown = "\n\n".join(table.markdown() for table in tables)
    return f"```\n{result.provenance['command']}\n```\n\n{shown}\n"


def show(tables: Sequence[Table]) -> None:
    """Print the tables: as wide as the terminal, or in a file as wide as they need."""
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
    tables: MakeTables,
    figures: MakeFigures,
    units: Sequence[Unit] = (),
) -> LabResult:
    """Write OUT/<lab>.json, and the same to `json`; then the extras, OUT/<lab>.md and the figures.

    An extra that fails is a warning. The units' saved states are removed once the JSON is written.
    """
    places = _places(result.lab, out, json)
    result.written.extend(save_somewhere(places, lambda place: write_json(place, result.to_json())))
    for unit in units:
        unit.remove()
    if out is not None:
        folder = Path(out)
        kept, page = result.written[0], folder / f"{result.lab}.md"
        written = extra(f"Writing {page}", lambda: _write_page(result, tables(result), page), kept)
        drawn = extra("Drawing the figures", lambda: _write_figures(figures(result), folder), kept)
        result.written.extend([*(written or []), *(drawn or [])])
    return result


def _places(lab: str, out: Path | str | None, json: Path | str | None) -> list[Path]:
    """Where the JSON goes."""
    own = [] if out is None else [Path(out) / f"{lab}.json"]
    return own if json is None else [Path(json), *own]


def _write_page(result: LabResult, tables: Sequence[Table], page: Path) -> list[Path]:
    write_text(page, markdown(result, tables))
    return [page]


def _write_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    return [path for name, figure in figures.items() for path in save(figure, folder / name)]
