"""Standard output and standard error: tables, sentences, and streams that are closed, full or accept only ASCII."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dualview.io.errors import UserError, cause_of
from dualview.io.saving import ExtraFailed

WIDTH = 140
"""Of tables that go to a file."""


def open_streams() -> None:
    """Replace a closed stream, and let a stream print a question mark for a character it cannot encode."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None and name == "stdout":  # opened to be read, so that writing fails as it does to a closed one
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
        elif stream is None:
            sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def show(*content: Any, width: int = WIDTH) -> None:
    """Print tables as wide as the terminal, or `width` in a file. An OSError if standard output cannot be written."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else width)
    with console.capture() as captured:  # rich itself would end the process at a closed pipe
        console.print(*content)
    sys.stdout.write(captured.get())
    sys.stdout.flush()


def say(line: str) -> None:
    """One line on standard error."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def warnings_as_sentences() -> Generator[None]:
    """Print each warning of a failed extra as one sentence; the exit code stays what it is."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show_warning(message: Any, category: Any, *where: Any, **more: Any) -> None:
            if issubclass(category, ExtraFailed):
                say(f"dualview: warning: {message}")
            else:
                shown(message, category, *where, **more)

        warnings.showwarning = show_warning
        warnings.simplefilter("always", ExtraFailed)
        yield


class OutputFailed(UserError):
    """Standard output cannot be written; its cause is the OSError."""


class _Output:
    """Standard output, whose failures are not mistaken for those of a file. A closed pipe stays a BrokenPipeError."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _named_failure():
            return self._stream.write(text)

    def flush(self) -> None:
        with _named_failure():
            self._stream.flush()


@contextmanager
def _named_failure() -> Generator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(f"The output could not be written: {cause_of(error)}.") from error


@contextmanager
def checked_output() -> Generator[None]:
    """What a verb prints reaches standard output before the verb ends, or is an OutputFailed.

    A pipe whose reader has left, as in `| head`, ends it quietly with exit code 1.
    """
    stream: Any = sys.stdout
    checked = _Output(stream)
    sys.stdout = checked
    try:
        yield
    except SystemExit:  # how every verb ends
        try:
            checked.flush()
        except BrokenPipeError:
            sys.exit(1)
        raise
    finally:
        sys.stdout = stream
        try:
            stream.flush()
        except OSError:
            forget_output()


def forget_output() -> None:
    """After standard output failed: flush nothing to it at exit, which would raise another error."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
