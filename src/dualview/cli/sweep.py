"""`dualview sweep`."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dualview.cli.options import json_option
from dualview.io.json_files import check_place, is_stdout, plain, save_json
from dualview.io.terminal import say

INTERRUPTED, SOME_FAILED = 130, 1


class Stopped(SystemExit):
    """A sweep was interrupted, kept the finished cells and reported it."""

    def __init__(self) -> None:
        super().__init__(INTERRUPTED)


def sweep(
    spec: Annotated[Path, typer.Argument(help="YAML: the options of `dualview run`, each a value or a list")],
    store: Annotated[Path, typer.Option(help="the folder for the results; created if missing")],
    engine: Annotated[str, typer.Option(help="where cells are computed", metavar="local|ray")] = "local",
    address: Annotated[str | None, typer.Option(help="of a Ray cluster; none: Ray on this machine")] = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="<int>", help="Ray: most cells at once")] = None,
    cpus: Annotated[
        float | None, typer.Option(min=0, metavar="<float>", help="Ray: processors for each cell [default: 1]")
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(min=0, metavar="<float>", help="Ray: GPUs for each cell [default: 1 if the cluster has any]"),
    ] = None,
    retries: Annotated[
        int | None, typer.Option(min=0, metavar="<int>", help="Ray: how often a cell may lose its worker [default: 3]")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="<int>", help="processor threads for each cell; they decide rounding")
    ] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: compute only the i-th of n parts", metavar="I/N")] = None,
    track: Annotated[
        list[str] | None, typer.Option(help="also log to it; repeat for more", metavar="tensorboard|trackio|wandb")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print what is done and what is left")] = False,
    json: Annotated[Path | None, json_option("the summary")] = None,
) -> None:
    """Run a grid of comparisons into a store.

    What is in the store already is skipped.
    """
    from dualview.io.progress import Bars, Silent
    from dualview.sweep import runner

    check_place(json)
    ray = {"address": address, "workers": workers, "cpus": cpus, "gpus": gpus, "retries": retries}
    given = {"engine": None if engine == "local" else engine, **ray, "threads": threads, "shard": shard}
    again = _command(spec, store, given, track or ())
    try:
        with _terminated_as_interrupted():
            summary = runner.sweep(
                spec,
                store,
                engine=engine,  # pyright: ignore[reportArgumentType]
                **ray,  # pyright: ignore[reportArgumentType]
                threads=threads,
                shard=shard,
                track=track or (),
                dry_run=dry_run,
                say=say,
                progress=Bars() if sys.stderr.isatty() else Silent(),
            )
    except KeyboardInterrupt:  # before the first cell, or twice
        say(f"stopped; every finished cell is kept. Continue with: {again}")
        raise Stopped from None
    save_json(json, None if json is None else _summary_json(summary))
    if not dry_run and not is_stdout(json):
        print(summary)
        for reason in _grouped(summary.failed):
            print(f"  failed: {reason}")
    if summary.stopped:
        say(f"stopped; every finished cell is kept. Continue with: {again}")
        raise Stopped
    if summary.failed:
        raise typer.Exit(SOME_FAILED)


def _command(spec: Path, store: Path, given: Mapping[str, Any], track: Sequence[str]) -> str:
    """The shell command that continues a sweep."""
    words = ["dualview", "sweep", str(spec), "--store", str(store)]
    for name, value in (*given.items(), *(("track", name) for name in track)):
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)


@contextmanager
def _terminated_as_interrupted() -> Generator[None]:
    """Schedulers end a job with SIGTERM: stop as cleanly as on Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _grouped(failed: Sequence[Any]) -> list[str]:
    """Each reason once, with how many cells it ended."""
    reasons = Counter(cell.reason for cell in failed)
    return [reason if count == 1 else f"{count} cells: {reason}" for reason, count in reasons.items()]


def _summary_json(summary: Any) -> dict[str, Any]:
    counts = ("cells", "done_before", "computed", "elsewhere", "left", "stopped")
    return {
        **{name: getattr(summary, name) for name in counts},
        "failed": [{"options": plain(f.options.changed), "reason": f.reason} for f in summary.failed],
        "problems": [str(problem) for problem in summary.problems],
        "seconds": round(summary.seconds, 3),
    }
