"""One thread computes for all pages; the event loop only passes its events on.

A model cannot run two passes at once (patches are applied as hooks), and two would not be faster on the same cores.
So work waits in a short queue; when that is full, more is refused at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from dualview.io.errors import UserError
from dualview.io.progress import Advance

Event = dict[str, Any]
Emit = Callable[[Event], None]
Work = Callable[[Emit], None]

_log = logging.getLogger("dualview.web")


class Busy(Exception):
    """The queue is full."""


class Cancelled(Exception):
    """The client has disconnected; raised in the work itself at its next event."""


@dataclass(frozen=True)
class Job:
    """One piece of work and the queue of its events."""

    work: Work
    ahead: int
    """Jobs before it when it was accepted."""
    _loop: asyncio.AbstractEventLoop
    _line: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue[bytes | None])
    _gone: threading.Event = field(default_factory=threading.Event)

    async def lines(self) -> AsyncGenerator[bytes]:
        """Every event as a line of JSON, its place in the queue first."""
        yield _line({"event": "queued", "ahead": self.ahead})
        while (line := await self._line.get()) is not None:
            yield line

    async def result(self) -> Event:
        """The last event, for work that sends only one."""
        last: Event = {}
        async for line in self.lines():
            last = json.loads(line)
        return last

    def cancel(self) -> None:
        self._gone.set()

    @property
    def cancelled(self) -> bool:
        return self._gone.is_set()

    def emit(self, event: Event) -> None:
        """Send an event (called by the work, in its thread)."""
        if self.cancelled:
            raise Cancelled
        self._send(_line(event))

    def run(self) -> None:
        """Do the work; a `UserError` is sent as it is, any other error is logged and sent without its details."""
        try:
            if not self.cancelled:
                self.work(self.emit)
        except Cancelled:
            pass
        except UserError as error:
            self._send_error(str(error), 400)
        except MemoryError:
            self._send_error("This machine does not have enough memory for this; shorten the demonstrations.", 500)
        except Exception:
            _log.exception("the work failed")
            self._send_error("Something went wrong on the server; its log says what.", 500)
        finally:
            self._send(None)

    def _send_error(self, sentence: str, status: int) -> None:
        with suppress(Cancelled):
            self.emit({"event": "error", "error": sentence, "status": status})

    def _send(self, line: bytes | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: no client is left
            self._loop.call_soon_threadsafe(self._line.put_nowait, line)


def _line(event: Event) -> bytes:
    return json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


class Worker:
    """The thread, and the short queue before it."""

    def __init__(self, waiting: int = 8) -> None:
        self._most = waiting
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="dualview-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Cancel what runs and what waits."""
        with self._changed:
            self._stopping = True
            for job in (*self._jobs, *([] if self._running is None else [self._running])):
                job.cancel()
            waiting, self._jobs = self._jobs, deque()
            self._changed.notify_all()
        for job in waiting:
            job.run()  # cancelled: it only ends its queue
        self._thread.join(seconds)

    def submit(self, work: Work) -> Job:
        """Accept work, or raise `Busy`. Call it in the event loop."""
        with self._changed:
            # Clients that left while they waited free their places.
            self._jobs = deque(job for job in self._jobs if not job.cancelled)
            if len(self._jobs) >= self._most:
                raise Busy
            running = self._running is not None and not self._running.cancelled  # else it ends at its next event
            job = Job(work, len(self._jobs) + running, asyncio.get_running_loop())
            self._jobs.append(job)
            self._changed.notify_all()
        return job

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                self._running = None

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._jobs)
            self._running = None if self._stopping else self._jobs.popleft()
            return self._running


class JobProgress:
    """`dualview.io.progress.Progress` as events."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    @contextmanager
    def part(self, description: str, total: int) -> Generator[Advance]:
        done = 0

        def advance(steps: int) -> None:
            nonlocal done
            done += steps
            self._emit({"event": "part", "part": description, "done": done, "total": total})

        advance(0)
        yield advance
