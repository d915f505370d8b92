"""Sweeps in processes of their own, to be killed. They are forked from a server that has imported all it needs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["dualview.sweep.runner", "dualview.sweep.worker", "pandas", "duckdb", "transformers.models.llama.modeling_llama"]
)


def run_apart(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = _CONTEXT.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def start(spec: dict[str, Any], store: Path, answer: Path | None = None) -> BaseProcess:
    """A sweep that runs by itself; what it did is written to `answer` as it ends."""
    return run_apart(_sweep, spec, store, answer)


def _sweep(spec: dict[str, Any], store: Path, answer: Path | None) -> None:
    from dualview.sweep.runner import sweep

    summary = sweep(spec, store)
    if answer is not None:
        told = {name: getattr(summary, name) for name in ("cells", "done_before", "computed", "elsewhere")}
        told |= {"failed": [cell.reason for cell in summary.failed], "problems": len(summary.problems)}
        answer.write_text(json.dumps(told))


def kill(process: BaseProcess) -> None:
    """kill −9."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def wait_for(something: Any, seconds: float = 60.0) -> None:
    """Until it is true, or a failure."""
    end = time.monotonic() + seconds
    while not something():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)
