"""A piece of a study: what one process computes of it in a given time, and several such processes on one store.

Each process takes the first cell, in the study's order, that no other process is computing (the store locks a cell
while it is computed, and the system releases the lock when its holder dies). Nobody waits for a stage to be finished:
a cell that another process holds is passed over, and looked at again after the next cell, since arms with `learnt` or
`match` may have cells by then, and since its process may have been killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualview.io.progress import Advance
from dualview.options import RunOptions
from dualview.store import Store
from dualview.sweep.engine import Failed, Local, Outcome
from dualview.sweep.runner import Summary, sweep

SCRIPT = Path(__file__).with_name("second.py")
ALL_DONE, LEFT = 0, 3
"""How a worker ends: whether it saw every cell finished."""
_MARGIN = 1.3
"""A cell may take this many times as long as the longest one before it."""
_LOOK_AGAIN = 2.0  # seconds, where other processes compute all that is left
_TO_STOP = 5.0  # seconds that workers have to stop by themselves, after an interrupt
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Stage:
    """One arm on one model with one draw: what is swept together."""

    arm: str
    model: str
    seed: str
    grids: tuple[dict[str, Any], ...]
    """One for each group of tasks."""
    match: float | None
    """Where the rates and epochs are those at which fine-tuning is this near to in-context accuracy."""
    learnt: bool
    """Where only tasks count on which both settings are known to learn."""
    seconds: float | None = None
    """What a cell is expected to take before one of its kind was timed."""

    @property
    def kind(self) -> tuple[str, ...]:
        """What decides how long a cell takes, the task apart."""
        options = self.grids[0] if self.grids else {}
        return (self.model, *(str(options.get(name)) for name in ("controls", "ft_rule", "epochs", "protocol")))

    @property
    def depends(self) -> bool:
        """Whether earlier cells choose its own."""
        return self.learnt or self.match is not None


GridsOf = Callable[[Stage, Path], Iterator[Mapping[str, Any]]]
"""What to sweep of a stage, as far as earlier cells tell."""


@dataclass
class Pace:
    """Progress of a sweep that interrupts it, between two cells, when the next one might not finish in time."""

    deadline: float
    longest: dict[tuple[str, ...], float] = field(default_factory=dict[tuple[str, ...], float])
    """Seconds of the longest cell of each kind."""
    kind: tuple[str, ...] = ()
    expected: float | None = None
    """Of a first cell of its kind."""
    interrupted: bool = False
    """Whether it was the time that stopped a sweep, not the user."""
    since: float = 0.0

    def out_of_time(self) -> bool:
        """A first cell of its kind may take as long as the longest of any, where nothing else is known of it."""
        first = max(self.longest.values(), default=0.0) if self.expected is None else self.expected
        return time.monotonic() + _MARGIN * self.longest.get(self.kind, first) >= self.deadline

    def restart(self) -> None:
        self.since = time.monotonic()

    @contextmanager
    def part(self, description: str, total: int) -> Generator[Advance]:
        self.restart()

        def advance(_steps: int) -> None:
            self.longest[self.kind] = max(self.longest.get(self.kind, 0.0), time.monotonic() - self.since)
            self.restart()
            if self.out_of_time():
                self.interrupted = True
                raise KeyboardInterrupt

        yield advance


class Sharing(Local):
    """Computes the cells that no other process holds, without waiting for those."""

    def __init__(self, pace: Pace, threads: int | None) -> None:
        super().__init__(threads=threads)
        self._pace, self._model = pace, ""
        self._refused: dict[RunOptions, Failed] = {}
        self.once = False
        """Whether to return after one cell, since others are to be looked at first."""

    def run(self, jobs: Any, deliver: Any, is_known: Any) -> None:
        for job in jobs:
            if job is None:  # other processes hold the rest
                return
            super().run(iter([job]), deliver, is_known)
            if self.once:
                return

    def _outcome(self, worker: Any, options: RunOptions, is_known: Any) -> Outcome:
        if options in self._refused:  # it came back because its neighbours were held: not to be tried again
            return self._refused[options]
        if options.model != self._model:
            with suppress(Exception):  # which `super` explains
                worker.identify(options)
            self._model = options.model
            self._pace.restart()  # without the time that loading the model took
        found = super()._outcome(worker, options, is_known)
        if isinstance(found, Failed):
            self._refused[options] = found
        return found


class Piece:
    """What one process computes."""

    def __init__(self, store: Path, grids_of: GridsOf, deadline: float, threads: int | None) -> None:
        self._store, self._grids_of = store, grids_of
        self._pace = Pace(deadline)
        self._engine = Sharing(self._pace, threads)
        self._told: set[str] = set()
        self._failed = self._late = False

    def compute(self, stages: Sequence[Stage]) -> bool:
        """Compute until the time is over; whether everything is done."""
        left = list(stages)
        try:
            while left:
                left, computed = self._round(left)
                if left and self._late:
                    return False
                if left and not computed:
                    if time.monotonic() >= self._pace.deadline:
                        return False
                    time.sleep(_LOOK_AGAIN)
        except KeyboardInterrupt:
            return False
        return not self._failed

    def _round(self, stages: Sequence[Stage]) -> tuple[list[Stage], bool]:
        """Through the stages, until a cell is computed after some were passed over; the stages that may have cells
        left, and whether any was computed."""
        left: list[Stage] = []
        computed = self._late = False
        for number, stage in enumerate(stages):
            self._pace.kind, self._pace.expected = stage.kind, stage.seconds
            if stage.match is not None and left:  # a nearer rate may be among what is left
                left.append(stage)
                continue
            waits = stage.depends and bool(left)
            for grid in list(self._grids_of(stage, self._store)):
                if self._pace.out_of_time():  # a later stage may have shorter cells
                    self._late = waits = True
                    continue
                self._engine.once = bool(left) or waits
                summary = self._sweep(stage, grid)
                computed = computed or summary.computed > 0
                waits = waits or summary.left > 0
                if self._engine.once and summary.computed:
                    self._late = False
                    return [*left, *stages[number:]], True
            left += [stage] if waits else []
        return left, computed

    def _sweep(self, stage: Stage, grid: Mapping[str, Any]) -> Summary:
        summary = sweep(grid, self._store, engine=self._engine, say=self._say, progress=self._pace)
        self._failed = self._failed or bool(summary.failed)
        if summary.computed or summary.failed:
            print(f"{stage.arm}, {stage.model}, seed {stage.seed}: {summary}", flush=True)
        if summary.stopped and not self._pace.interrupted:
            raise KeyboardInterrupt
        self._late = self._late or summary.stopped
        self._pace.interrupted = False
        return summary

    def _say(self, line: str) -> None:
        if line.startswith("failed") and line not in self._told:
            self._told.add(line)
            print(line, file=sys.stderr, flush=True)


def together(given: Sequence[str], store: Path, workers: int, until: float, threads: int | None = None) -> bool:
    """Several processes with the same arguments, until a time of the clock; whether everything is done."""
    with Store(store, create=True):  # made once, before several processes use it
        pass
    threads = threads or max(1, (os.cpu_count() or 1) // workers)
    env = {**os.environ, **dict.fromkeys(_THREADS, str(threads))}
    own = ["--workers", "1", "--until", repr(until), "--threads", str(threads)]
    command = [sys.executable, str(SCRIPT), *given, *own]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it stops the workers too
    processes = [subprocess.Popen(command, env=env) for _ in range(workers)]
    try:
        codes = [process.wait() for process in processes]
    except KeyboardInterrupt:
        _stop(processes)
        return False
    finally:
        signal.signal(signal.SIGTERM, before)
    for number, code in enumerate(codes, 1):
        if code not in (ALL_DONE, LEFT):
            why = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            print(f"worker {number} of {workers} {why}; what it had finished is kept", file=sys.stderr)
    return ALL_DONE in codes


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ctrl-C reaches the workers as well; whoever does not stop by it is ended, which a store survives."""
    end = time.monotonic() + _TO_STOP
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        process.terminate()
        process.wait()
