"""Where cells are computed: an engine takes jobs until there are none, and delivers the outcome of each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dualview.io.errors import UserError
from dualview.io.hashing import sha256_of
from dualview.options import RunOptions
from dualview.records import Records
from dualview.store.cell_key import CellIdentity, HashFile

PAUSE_SECONDS = 0.2
"""How long to wait before checking again whether another process has finished, or died on, a cell."""


@dataclass(frozen=True)
class Known:
    """The cell is in the store already, under other file names or an older plan."""

    identity: CellIdentity


@dataclass(frozen=True)
class Finished:
    """A cell's numbers."""

    identity: CellIdentity
    result: Mapping[str, Any]
    records: bytes | Records | None


@dataclass(frozen=True)
class Failed:
    """A cell that could not be computed: the reason in a sentence and, unless it is a UserError, the traceback."""

    reason: str
    trace: str | None = None


Outcome = Known | Finished | Failed


class Job(Protocol):
    """A cell that this process has locked."""

    @property
    def options(self) -> RunOptions: ...


Jobs = Iterator[Any]
"""The next job; None while other processes hold every cell that is left."""
Deliver = Callable[[Any, Outcome], None]
IsKnown = Callable[[RunOptions, CellIdentity], bool]


class Engine(Protocol):
    def run(self, jobs: Jobs, deliver: Deliver, is_known: IsKnown) -> None:
        """Compute every job; `deliver` is called in this process, once for each."""
        ...


class Local:
    """In this process, one cell after another. Several sweeps may share one, and so its model."""

    def __init__(self, *, threads: int | None = None, hash_file: HashFile = sha256_of) -> None:
        self._threads, self._hash_file = threads, hash_file
        self._worker: Any = None

    def run(self, jobs: Jobs, deliver: Deliver, is_known: IsKnown) -> None:
        for job in jobs:
            if job is None:
                time.sleep(PAUSE_SECONDS)
                continue
            if self._worker is None:
                from dualview.sweep.worker import Worker  # imports torch, which a finished sweep does not need

                self._worker = Worker(threads=self._threads, hash_file=self._hash_file)
            deliver(job, self._outcome(self._worker, job.options, is_known))

    def _outcome(self, worker: Any, options: RunOptions, is_known: IsKnown) -> Outcome:
        try:
            identity = worker.identify(options)
            if is_known(options, identity):
                return Known(identity)
            return Finished(*worker.compute(options))
        except Exception as error:
            return failed(error)


def failed(error: Exception) -> Failed:
    """Why a cell failed, in a sentence."""
    if isinstance(error, UserError):
        return Failed(str(error))
    first = (str(error).strip().splitlines() or [""])[0]
    return Failed(f"{type(error).__name__}: {first}".rstrip(": "), "".join(traceback.format_exception(error)))
