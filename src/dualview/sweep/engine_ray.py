"""Cells on a machine with several GPUs, or on a cluster, by Ray.

Each worker is an actor that holds one model, with the processors and GPUs that a cell may use. Ray restarts a lost
worker, on another node if necessary. Workers only compute: this process writes their results, so the cluster needs a
shared disk only for the models and data that the cells name by path.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualview.io import hub
from dualview.io.errors import UserError
from dualview.io.hub import HubName, Kind
from dualview.options import RunOptions
from dualview.records import Records, save_records
from dualview.store.cell_key import CellIdentity, code_version
from dualview.sweep.engine import PAUSE_SECONDS, Deliver, Failed, Finished, IsKnown, Jobs, Known, Outcome, failed
from dualview.sweep.spec import MODEL_OPTIONS

CPUS, RETRIES = 1.0, 3
"""By default: what a cell may use, and how often it may lose its worker."""
_END = object()
_ROUNDING = 1e-9


@dataclass(eq=False)
class _Actor:
    """A worker, and the model it holds."""

    handle: Any
    holds: tuple[Any, ...] = ()


class _Pool:
    """The workers, as many as fit, started when they are first needed."""

    def __init__(self, ray: Any, room: int, start: Callable[[], _Actor]) -> None:
        self._ray, self._room, self._start = ray, room, start
        self._all: list[_Actor] = []
        self._idle: list[_Actor] = []

    @property
    def has_room(self) -> bool:
        return bool(self._idle) or len(self._all) < self._room

    def take(self, options: RunOptions) -> _Actor:
        """A worker that holds the cell's model if there is one, else a new one if it fits, else any."""
        holds = tuple(getattr(options, name) for name in MODEL_OPTIONS)
        actor = next((actor for actor in self._idle if actor.holds == holds), None)
        if actor is None and len(self._all) < self._room:
            actor = self._start()
            self._all.append(actor)
        elif actor is None:
            actor = self._idle[0]
        if actor in self._idle:
            self._idle.remove(actor)
        actor.holds = holds
        return actor

    def give_back(self, actor: _Actor) -> None:
        if actor in self._all:
            self._idle.append(actor)

    def drop(self, actor: _Actor) -> None:
        self._all.remove(actor)
        self._ray.kill(actor.handle)

    def close(self) -> None:
        for actor in list(self._all):
            self.drop(actor)


class RayEngine:
    """Computes cells on the cluster at `address` (None: Ray on this machine); `cpus` and `gpus` are for one cell."""

    def __init__(
        self,
        *,
        address: str | None = None,
        workers: int | None = None,
        cpus: float = CPUS,
        gpus: float | None = None,
        retries: int = RETRIES,
        threads: int | None = None,
    ) -> None:
        self._ray = _import_ray()
        self._address, self._at_most = address, workers
        self._cpus, self._gpus, self._retries = cpus, gpus, retries
        self._threads = threads or max(1, int(cpus))

    def run(self, jobs: Jobs, deliver: Deliver, is_known: IsKnown) -> None:
        ours = not self._ray.is_initialized()
        if ours:
            self._connect()
        try:
            with contextlib.closing(_Pool(self._ray, self._room(), self._start)) as pool:
                self._run(jobs, deliver, is_known, pool)
        finally:
            if ours:
                self._ray.shutdown()

    def _connect(self) -> None:
        try:
            self._ray.init(
                address=self._address,
                include_dashboard=None if self._address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"No Ray cluster can be reached at {self._address or 'this machine'} ({_root_cause(error)}); "
                "start one with `ray start --head`."
            ) from error

    def _run(self, jobs: Jobs, deliver: Deliver, is_known: IsKnown, pool: _Pool) -> None:
        busy: dict[Any, tuple[_Actor, Any]] = {}  # each worker and its job, by what it will answer
        more = True
        while more or busy:
            waiting = False
            while more and not waiting and pool.has_room:
                job: Any = next(jobs, _END)
                more, waiting = job is not _END, job is None
                if more and not waiting:
                    actor = pool.take(job.options)
                    busy[actor.handle.identify.remote(vars(job.options))] = actor, job
            if not busy:
                time.sleep(PAUSE_SECONDS)
                continue
            ready, _ = self._ray.wait(list(busy), num_returns=1, timeout=PAUSE_SECONDS if waiting else None)
            for reference in ready:
                actor, job = busy.pop(reference)
                outcome = _settled(job.options, self._got(reference, actor, pool), is_known)
                if isinstance(outcome, CellIdentity):
                    busy[actor.handle.compute.remote(vars(job.options))] = actor, job
                    continue
                pool.give_back(actor)
                deliver(job, outcome)

    def _room(self) -> int:
        """How many cells fit the cluster's nodes at once; a cell is never split over two."""
        nodes: list[Mapping[str, float]] = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if self._gpus is None:
            self._gpus = 1.0 if any(node.get("GPU", 0) >= 1 for node in nodes) else 0.0
        wanted = {name: amount for name, amount in (("CPU", self._cpus), ("GPU", self._gpus)) if amount > 0}
        if not wanted:
            return self._at_most or 1
        room = sum(min(int(node.get(what, 0) / need + _ROUNDING) for what, need in wanted.items()) for node in nodes)
        if room < 1:
            held = "; ".join(sorted({f"{node.get('CPU', 0):g} and {node.get('GPU', 0):g}" for node in nodes}))
            raise UserError(
                f"No node of the cluster holds one cell of {self._cpus:g} processors and {self._gpus:g} GPUs "
                f"(they have {held or 'nothing'}); lower --cpus or --gpus."
            )
        return min(room, self._at_most or room)

    def _start(self) -> _Actor:
        remote = self._ray.remote(
            num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=-1, max_task_retries=self._retries
        )(RemoteWorker)
        return _Actor(remote.remote(self._threads, os.fspath(Path.cwd()), dict(hub.pins())))

    def _got(self, reference: Any, actor: _Actor, pool: _Pool) -> CellIdentity | Outcome:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except (errors.RayActorError, errors.WorkerCrashedError, errors.ObjectLostError) as error:
            pool.drop(actor)
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return Failed(f"Its worker was lost {self._retries + 1} times ({why}).")
        except errors.RayError as error:
            return failed(error)


class RemoteWorker:
    """A `Worker` in a Ray actor; arguments and answers are plain values."""

    def __init__(self, threads: int, folder: str, pins: Mapping[tuple[Kind, HubName], str] | None = None) -> None:
        from dualview.sweep.worker import Worker

        hub.pin(pins or {})  # the commits of the plan
        if Path(folder).is_dir():
            os.chdir(folder)  # relative paths start where the sweep was started
        self._worker = Worker(threads=threads)

    def identify(self, options: dict[str, Any]) -> CellIdentity | Failed:
        try:
            return self._worker.identify(RunOptions(**options))
        except Exception as error:
            return failed(error)

    def compute(self, options: dict[str, Any]) -> Finished | Failed:
        try:
            identity, result, records = self._worker.compute(RunOptions(**options))
            return Finished(identity, result, None if records is None else _as_bytes(records))
        except Exception as error:
            return failed(error)


def _as_bytes(records: Records) -> bytes:
    """The tensors as a file's content, to send to another process."""
    with tempfile.TemporaryDirectory() as folder:
        return save_records(records, Path(folder) / "records").read_bytes()


def _settled(options: RunOptions, found: CellIdentity | Outcome, is_known: IsKnown) -> CellIdentity | Outcome:
    """The outcome of a worker's answer: a cell it identified may be in the store, or have other versions."""
    if not isinstance(found, CellIdentity):
        return found
    if found.code != code_version():
        return Failed(
            f"Its worker has other versions than this process ({found.code}; here {code_version()}); install the same "
            "dualview, torch, transformers, numpy and scipy on every node."
        )
    try:
        return Known(found) if is_known(options, found) else found
    except Exception as error:  # one bad cell does not stop the sweep
        return failed(error)


def _root_cause(error: BaseException) -> str:
    """The first line of the innermost error: Ray wraps a refused token in several layers."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _import_ray() -> Any:
    # By default Ray reports its use, and rewrites CUDA_VISIBLE_DEVICES of cells without a GPU.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UserError(f"--engine ray needs Ray ({error}); run `pip install 'dualview[ray]'`.") from error
