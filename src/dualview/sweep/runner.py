"""Runs a study: plan it, then lock, compute and store one cell after another; a failed cell does not stop the rest."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from dualview.io.errors import UserError, cause_of
from dualview.io.progress import Progress, Say, Silent, say_nothing
from dualview.options import RunOptions
from dualview.store.cell import NewCell, NoRecords
from dualview.store.cell_key import CellIdentity, Fingerprints
from dualview.store.folder import StoreProblem
from dualview.store.locks import CellLock
from dualview.store.marker import is_nothing
from dualview.store.packs.compaction import pack
from dualview.store.signals import uninterrupted
from dualview.store.store import Store
from dualview.sweep.dry_run import must_be_able_to_start
from dualview.sweep.engine import Engine, Failed, Finished, Known, Local, Outcome, failed
from dualview.sweep.plan import PlannedCell, make_plan, must_have_demonstrations, part_of
from dualview.sweep.spec import Spec
from dualview.sweep.trackers import Tracker, must_be_trackers, open_trackers

EngineName = Literal["local", "ray"]
_ESTIMATE_AFTER = (1, 3, 10, 30, 100, 300, 1000, 3000)
_PACK_EVERY = 1000


@dataclass(frozen=True)
class FailedCell:
    """A cell that failed, and why."""

    options: RunOptions
    reason: str


@dataclass(frozen=True)
class Summary:
    """What a sweep did."""

    cells: int
    done_before: int
    computed: int
    elsewhere: int
    """Already finished at their turn: by another process, or stored under other names."""
    failed: tuple[FailedCell, ...]
    problems: tuple[StoreProblem, ...]
    """What was wrong in the store, and set aside."""
    stopped: bool
    """Interrupted; the next sweep computes the rest."""
    seconds: float

    @property
    def left(self) -> int:
        return self.cells - self.done_before - self.computed - self.elsewhere - len(self.failed)

    def __str__(self) -> str:
        parts = [f"{self.done_before} done before", f"{self.computed} computed in {readable_time(self.seconds)}"]
        parts += [f"{self.elsewhere} found finished"] if self.elsewhere else []
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        parts += [f"{self.left} left"] if self.left else []
        return f"{counted(self.cells)}: {', '.join(parts)}"


def sweep(
    spec: Spec | Mapping[str, Any] | str | os.PathLike[str],
    store: str | os.PathLike[str],
    *,
    engine: EngineName | Local = "local",
    address: str | None = None,
    workers: int | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
    retries: int | None = None,
    threads: int | None = None,
    shard: str | None = None,
    track: Sequence[str] = (),
    dry_run: bool = False,
    say: Say = say_nothing,
    progress: Progress | None = None,
) -> Summary:
    """Compute every cell of a grid that is not in the store yet; the arguments are those of `dualview sweep`.

    A `Local` engine may be given to several sweeps, which then load their model once.
    """
    progress = progress or Silent()
    read = spec if isinstance(spec, Spec) else Spec.make(spec) if isinstance(spec, Mapping) else Spec.read(Path(spec))
    cells = read.cells() if shard is None else part_of(read.cells(), shard)
    must_be_trackers(track)
    ray = {"address": address, "workers": workers, "cpus": cpus, "gpus": gpus, "retries": retries}
    _must_be_an_engine(engine, ray)
    with ExitStack() as stack:
        nothing_yet = dry_run and is_nothing(Path(store))
        where = stack.enter_context(tempfile.TemporaryDirectory()) if nothing_yet else store
        opened = stack.enter_context(Store(where, create=nothing_yet or not dry_run))
        if not dry_run:
            opened.repair()
        for problem in opened.problems:
            say(str(problem))
        # Ray's workers have the GPUs that were requested, even if this machine has none.
        run = Sweep(opened, read, cells, say, auto="cuda" if gpus else None)
        must_have_demonstrations(run.plan.todo)
        run.announce()
        if dry_run:
            must_be_able_to_start(run.plan.todo)
        else:
            if run.plan.changed:  # another cell was current: another model of that name
                opened.index.set_current(run.plan.changed)
            if run.plan.todo:
                run.trackers += open_trackers(track, opened, say)
                run.run(_engine(engine, opened, threads, ray), progress)
            else:
                run.tidy()
        return run.summary()


def _must_be_an_engine(name: str | Local, ray: Mapping[str, Any]) -> None:
    if isinstance(name, Local):
        name = "local"
    if name not in get_args(EngineName):
        raise UserError(f"There is no engine {name!r}; the engines are {' and '.join(get_args(EngineName))}.")
    given = [f"--{option}" for option, value in ray.items() if value is not None]
    if name == "local" and given:
        raise UserError(f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} for Ray; give --engine ray too.")


def _engine(name: EngineName | Local, store: Store, threads: int | None, ray: Mapping[str, Any]) -> Engine:
    if isinstance(name, Local):
        return name
    if name == "local":
        return Local(threads=threads, hash_file=store.index.sha256)
    from dualview.sweep.engine_ray import RayEngine

    return RayEngine(**{name: value for name, value in ray.items() if value is not None}, threads=threads)


@dataclass(frozen=True)
class LockedCell:
    """A cell that this process has locked to compute it."""

    cell: PlannedCell
    lock: CellLock

    @property
    def options(self) -> RunOptions:
        return self.cell.options


class Sweep:
    """One sweep under way."""

    def __init__(
        self, store: Store, spec: Spec, cells: Sequence[RunOptions], say: Say, auto: str | None = None
    ) -> None:
        self.store, self.spec, self.say = store, spec, say
        self._fingerprints = Fingerprints(store.index.sha256, auto)
        self.plan = make_plan(cells, store, self._fingerprints)
        self.trackers: list[Tracker] = []
        self._started = time.monotonic()
        self._first_done = self._first_seconds = 0.0
        self._computed = self._elsewhere = 0
        self._failed: list[FailedCell] = []
        self._held: list[LockedCell] = []
        self._stopped = False
        self._unwritten = 0
        """The size in bytes of the last cell that did not fit on the disk; 0 while writing works."""

    def announce(self) -> None:
        axes = " × ".join(f"{len(self.spec.root[name])} {name}" for name in self.spec.varied)
        shape = f" ({axes})" if axes else ""
        self.say(f"{counted(self.plan.cells)}{shape}: {self.plan.done} done, {len(self.plan.todo)} to do")

    def summary(self) -> Summary:
        return Summary(
            cells=self.plan.cells,
            done_before=self.plan.done,
            computed=self._computed,
            elsewhere=self._elsewhere,
            failed=tuple(self._failed),
            problems=tuple(self.store.problems),
            stopped=self._stopped,
            seconds=time.monotonic() - self._started,
        )

    def run(self, engine: Engine, progress: Progress) -> None:
        """Compute what is left; an interrupt releases the cells in progress and stops."""
        todo = self.plan.todo
        try:
            with progress.part("cells", len(todo)) as advance:
                engine.run(
                    self._jobs(todo, advance), lambda held, outcome: self._take(held, outcome, advance), self._known
                )
            with suppress(OSError):
                pack(self.store)
        except KeyboardInterrupt:
            self._stopped = True
        finally:
            with uninterrupted():
                for held in list(self._held):
                    self._release(held)

    def tidy(self) -> None:
        """Pack the cells of a store of an earlier dualview, or of many short sweeps."""
        try:
            with suppress(OSError):
                pack(self.store, at_least=_PACK_EVERY)
        except KeyboardInterrupt:
            self._stopped = True

    # ------------------------------------------------------------------------------------------------ handing out

    def _jobs(self, todo: Sequence[PlannedCell], advance: Callable[[int], None]) -> Generator[LockedCell | None]:
        """The cells to compute, each locked; then those that other processes held, once they are released."""
        waiting = list(todo)
        announced = False
        while waiting:
            later: list[PlannedCell] = []
            for cell in waiting:
                held = self._hold(cell)
                if held is None:
                    later.append(cell)
                elif self._done_meanwhile(cell):
                    self._elsewhere += 1
                    self._release(held)
                    advance(1)
                elif not self._has_room():
                    self._take(held, Failed("The store could not be written, and still cannot."), advance)
                else:
                    yield held
            waiting = later
            if waiting:
                if not announced:
                    self.say(f"waiting for {counted(len(waiting))} that another process is computing")
                    announced = True
                yield None

    def _hold(self, cell: PlannedCell) -> LockedCell | None:
        """Take a cell's lock and note it, in one step: `run` releases what is noted, also after an interrupt."""
        with uninterrupted():
            try:
                lock = self.store.lock(cell.options)
            except OSError:  # no room even for an empty file, so no other process can write either
                lock = CellLock()
            if lock is None:
                return None
            held = LockedCell(cell, lock)
            self._held.append(held)
        return held

    def _done_meanwhile(self, cell: PlannedCell) -> bool:
        key = None if cell.plan is None else self.store.index.planned(cell.plan)
        try:
            return key is not None and self.store.has(key, records=cell.options.save_records)
        except UserError:  # written by a later dualview: storing it says so
            return False

    def _known(self, options: RunOptions, identity: CellIdentity) -> bool:
        return self.store.has(identity.key, records=options.save_records)

    def _has_room(self) -> bool:
        """Whether a cell can be written now, if the last one could not: do not compute what cannot be kept."""
        if self._unwritten:
            probe = self.store.paths.unfinished / f"probe.{os.getpid()}"
            try:
                probe.write_bytes(bytes(self._unwritten))
                self._unwritten = 0
            except OSError:
                return False
            finally:
                with suppress(OSError):
                    probe.unlink(missing_ok=True)
        return True

    # ---------------------------------------------------------------------------------------------- taking back

    def _take(self, held: LockedCell, outcome: Outcome, advance: Callable[[int], None]) -> None:
        options = held.options
        if isinstance(outcome, Known):
            plan = self._plan_of(held, outcome.identity)
            with suppress(OSError):
                self.store.index.remember(plan, held.cell.asked, outcome.identity.key)
            self._elsewhere += 1
        elif isinstance(outcome, Finished):
            outcome = self._put(held, outcome)
        if isinstance(outcome, Failed):
            self._failed.append(FailedCell(options, outcome.reason))
            run = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "host": socket.gethostname()}
            self.store.fail(options, outcome.reason, {**run, "trace": outcome.trace})
            self.say(f"failed: {self._named(options)}: {outcome.reason}")
        self._release(held)
        advance(1)
        self._estimate()

    def _put(self, held: LockedCell, found: Finished) -> Outcome:
        plan = self._plan_of(held, found.identity)
        cell = NewCell(found.identity, plan, held.options, found.result, found.records)
        try:
            self._store(cell)
        except Exception as error:
            if isinstance(error, OSError):
                self._unwritten = max(1 << 16, 2 * len(json.dumps(found.result)))
            expected = isinstance(error, OSError | UserError | NoRecords)
            why = Failed(cause_of(error)) if expected else failed(error)
            return Failed(f"It was computed but could not be written ({why.reason.rstrip('.')}).", why.trace)
        self._computed += 1
        self._first_seconds = self._first_seconds or sum(found.result["provenance"]["run"]["seconds"].values())
        for tracker in self.trackers:
            tracker.log(cell)
        if self._computed % _PACK_EVERY == 0:
            with suppress(OSError):
                pack(self.store)
        return found

    def _store(self, cell: NewCell) -> None:
        """Store a cell, without its tensors if those cannot be written."""
        try:
            self.store.put(cell)
        except NoRecords as error:
            if not self.store.put(replace(cell, records=None)):  # it was there, and lacked only these
                raise
            self.say(
                f"{self._named(cell.options)}: the records could not be written ({cause_of(error)}); the result is "
                "stored, and the next sweep computes the cell again for its records"
            )

    def _plan_of(self, held: LockedCell, identity: CellIdentity) -> str | None:
        """The plan key that finds a cell from now on; None if a file has changed since the plan was made."""
        if not self._fingerprints.unchanged():
            return None
        if held.options.device == "auto" and identity.device != self._fingerprints.auto:  # Ray's worker has another
            return self._fingerprints.plan_key(held.options, held.cell.asked, auto=identity.device)
        return held.cell.plan

    def _release(self, held: LockedCell) -> None:
        with uninterrupted():
            with suppress(OSError):
                held.lock.release()
            self._held.remove(held)

    def _estimate(self) -> None:
        """Say how long the rest will take, from the pace after the first cell, which also loaded its model."""
        now, left = time.monotonic(), self.summary().left
        self._first_done = self._first_done or now
        if self._computed not in _ESTIMATE_AFTER or not left:
            return
        if self._computed == 1:
            self.say(f"about {readable_time(self._first_seconds * left)} left for {counted(left)}, from the first")
            return
        pace = (now - self._first_done) / (self._computed - 1)
        self.say(f"about {readable_time(pace * left)} left for {counted(left)}, from the first {self._computed}")

    def _named(self, options: RunOptions) -> str:
        """The options by which a cell differs from the others."""
        return ", ".join(f"{name} {getattr(options, name)}" for name in self.spec.varied) or "the cell"


def counted(cells: int) -> str:
    return f"{cells} cell{'' if cells == 1 else 's'}"


def readable_time(seconds: float) -> str:
    """A time in a readable unit.

    >>> readable_time(0.4), readable_time(100), readable_time(7000), readable_time(100_000)
    ('0.4 s', '100 s', '117 min', '28 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
