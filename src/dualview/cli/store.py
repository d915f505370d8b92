"""The verbs of many runs: sweep, ls, show, diff, export, query."""

from __future__ import annotations

import json as jsonlib
import shlex
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dualview.io.terminal import say as _say
from dualview.io.terminal import show as show_table

StoreOption = Annotated[Path, typer.Option(help="the store's folder")]
JsonFlag = Annotated[bool, typer.Option("--json", help="print JSON, for machines")]
CellArgument = Annotated[str, typer.Argument(help="a cell: its key, or the beginning of it")]

INTERRUPTED, SOME_FAILED, DIFFERENT = 130, 1, 1


class Stopped(SystemExit):
    """A sweep that was interrupted, has kept what was finished, and has said so."""

    def __init__(self) -> None:
        super().__init__(INTERRUPTED)


def add(app: typer.Typer) -> None:
    """Register the verbs."""
    for verb in (sweep, ls, show, diff, export, query):
        app.command()(verb)


def sweep(
    spec: Annotated[Path, typer.Argument(help="YAML: the options of `dualview run`, each a value or a list")],
    store: Annotated[Path, typer.Option(help="the folder results go to; made if it is not there")],
    engine: Annotated[str, typer.Option(help="where cells are computed", metavar="local|ray")] = "local",
    address: Annotated[str | None, typer.Option(help="of a Ray cluster; none: Ray on this machine")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="<int>", help="Ray: at most so many cells at once")
    ] = None,
    cpus: Annotated[
        float | None, typer.Option(min=0, metavar="<float>", help="Ray: processors a cell [default: 1]")
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(min=0, metavar="<float>", help="Ray: GPUs a cell [default: 1 if the cluster has any]"),
    ] = None,
    retries: Annotated[
        int | None, typer.Option(min=0, metavar="<int>", help="Ray: how often a cell may lose its worker [default: 3]")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="<int>", help="processor threads a cell; they decide rounding")
    ] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: compute only the i-th of n parts", metavar="I/N")] = None,
    track: Annotated[
        list[str] | None, typer.Option(help="also log to it; repeat for more", metavar="tensorboard|trackio|wandb")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what is done and what is left, no more")] = False,
    json: JsonFlag = False,
) -> None:
    """Run a grid of comparisons into a store.

    What is in the store already is skipped.
    """
    from dualview.io.progress import Bars, Silent
    from dualview.sweep import runner

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
                say=_say,
                progress=Bars() if sys.stderr.isatty() else Silent(),
            )
    except KeyboardInterrupt:  # before the first cell, or twice
        _say(f"stopped; every finished cell is kept. Continue with: {again}")
        raise Stopped from None
    if json:
        _print_json(_summary_json(summary))
    elif not dry_run:
        print(summary)
        for given_up in _grouped(summary.failed):
            print(f"  failed: {given_up}")
    if summary.stopped:
        _say(f"stopped; every finished cell is kept. Continue with: {again}")
        raise Stopped
    if summary.failed:
        raise typer.Exit(SOME_FAILED)


def _command(spec: Path, store: Path, given: Mapping[str, Any], track: Sequence[str]) -> str:
    """The command that goes on with a sweep, for a shell."""
    words = ["dualview", "sweep", str(spec), "--store", str(store)]
    for name, value in (*given.items(), *(("track", name) for name in track)):
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)


def ls(
    store: StoreOption,
    all: Annotated[bool, typer.Option("--all", help="also cells that were computed again since")] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="<int>", help="show at most so many")] = 100,
    json: JsonFlag = False,
) -> None:
    """List the cells of a store, and what failed."""
    from dualview.store import api as reading

    found = reading.ls(store, all=all)
    for problem in found.problems:
        _say(problem)
    if json:
        failures = [{**vars(failure), "options": jsonlib.loads(failure.options)} for failure in found.failures]
        _print_json({"cells": found.cells, "failures": failures})
        return
    from dualview.cli.store_tables import cells_table, failure_lines

    _show(cells_table(found.cells[:limit]))
    if len(found.cells) > limit:
        print(f"… and {len(found.cells) - limit} more (--limit)")
    for line in failure_lines(found.failures):
        print(line)


def show(cell: CellArgument, store: StoreOption, json: JsonFlag = False) -> None:
    """Show one cell's result."""
    from dualview.store import api as reading

    found = reading.show(cell, store)
    if json:
        _print_json({"key": found.key, **found.result.to_json()})
        return
    from dualview.report.terminal import result_table

    print(found.key)
    _show(result_table(found.result))


def diff(
    left: Annotated[str, typer.Argument(help="a cell's key (its beginning), or without --store a store's folder")],
    right: Annotated[str, typer.Argument(help="another")],
    store: Annotated[Path | None, typer.Option(help="the store both cells are in")] = None,
    json: JsonFlag = False,
) -> None:
    """Say where two cells, or two stores, differ.

    The exit code is 1 if they do.
    """
    from dualview.cli import store_tables as rendering
    from dualview.store import api as reading

    found = reading.diff(left, right, store, say=_say)
    if json:
        _print_json(rendering.diff_json(found))
    else:
        _show(rendering.diff_table(found, left, right))
    if found if isinstance(found, list) else not found.equal:
        raise typer.Exit(DIFFERENT)


def export(
    out: Annotated[Path, typer.Argument(help="the file to write: .csv, .parquet or .json")],
    store: StoreOption,
    table: Annotated[str, typer.Option(help="cells, layers, queries, controls, runs or failures")] = "cells",
    all: Annotated[bool, typer.Option("--all", help="also cells that were computed again since")] = False,
) -> None:
    """Write a table of a store to a file."""
    from dualview.store import api as reading

    print(f"wrote {reading.export(out, store, table=table, all=all, say=_say)}")


def query(
    sql: Annotated[str, typer.Argument(help="SELECT … FROM cells, layers, queries, controls, runs or failures")],
    store: StoreOption,
    json: JsonFlag = False,
) -> None:
    """Ask a store in SQL (DuckDB)."""
    from dualview.store import api as reading

    rows = reading.query(sql, store, say=_say)
    if json:
        _print_json(rows.to_pylist())
        return
    from dualview.cli.store_tables import rows_table

    _show(rows_table(rows))


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
    reasons: dict[str, int] = {}
    for given_up in failed:
        reasons[given_up.reason] = reasons.get(given_up.reason, 0) + 1
    return [reason if count == 1 else f"{count} cells: {reason}" for reason, count in reasons.items()]


def _summary_json(summary: Any) -> dict[str, Any]:
    from dualview.cli.store_tables import plain

    return {
        **{
            name: getattr(summary, name)
            for name in ("cells", "done_before", "computed", "elsewhere", "left", "stopped")
        },
        "failed": [{"options": plain(f.options.changed), "reason": f.reason} for f in summary.failed],
        "problems": [str(problem) for problem in summary.problems],
        "seconds": round(summary.seconds, 3),
    }


def _print_json(content: Any) -> None:
    from dualview.cli.store_tables import plain

    print(jsonlib.dumps(plain(content), indent=1, ensure_ascii=False, allow_nan=False))


def _show(content: Any) -> None:
    show_table(content, width=160)
