"""Progress of long work: bars on a terminal, plain lines in a log, nothing in a library call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]
Say = Callable[[str], None]
"""Reports one line."""


def say_nothing(_line: str) -> None:
    """For library calls."""


class Progress(Protocol):
    """Opens one part of the work, with a description and a number of steps; yields a call that advances it."""

    def part(self, description: str, total: int) -> AbstractContextManager[Advance]: ...


class Silent:
    """For library calls."""

    @contextmanager
    def part(self, description: str, total: int) -> Generator[Advance]:
        yield lambda _steps: None


class Lines:
    """For logs: one line when a part begins and one when it ends."""

    @contextmanager
    def part(self, description: str, total: int) -> Generator[Advance]:
        print(f"{description} ({total}) …", file=sys.stderr, flush=True)
        start = time.monotonic()
        yield lambda _steps: None
        print(f"{description}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


class Bars:
    """For terminals."""

    @contextmanager
    def part(self, description: str, total: int) -> Generator[Advance]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description:<42}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(description, total=total)
            yield lambda steps: bar.advance(task, steps)


def for_stream() -> Progress:
    """Bars if standard error is a terminal, lines if it goes to a file."""
    return Bars() if sys.stderr.isatty() else Lines()
