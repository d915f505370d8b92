"""Standard output and standard error: tables, sentences, and streams that are closed or accept only ASCII."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dualview.io.saving import ExtraFailed

WIDTH = 140
"""Of tables that go to a file."""


def open_streams() -> None:
    """Replace a closed stream, and let a stream print a question mark for a character it cannot encode."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the end
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


def forget_output() -> None:
    """After standard output failed: flush nothing to it at exit, which would raise another error."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
