"""The verbs that read a store: ls, show, diff, export, query."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dualview.cli.options import json_option
from dualview.cli.options import show as show_table
from dualview.io.json_files import is_stdout
from dualview.io.terminal import say

StoreOption = Annotated[Path, typer.Option(help="the store's folder")]
AllOption = Annotated[bool, typer.Option("--all", help="also cells that were computed again since")]

DIFFERENT = 1
WIDTH = 160


def ls(
    store: StoreOption,
    all: AllOption = False,
    limit: Annotated[int, typer.Option(min=1, metavar="<int>", help="show at most this many")] = 100,
    json: Annotated[Path | None, json_option("all cells and failures")] = None,
) -> None:
    """List the cells of a store, and what failed."""
    from dualview.cli.store_tables import cells_table, failure_lines
    from dualview.store import api

    found = api.ls(store, all=all, json=json)
    for problem in found.problems:
        say(problem)
    if is_stdout(json):
        return
    show_table(json, cells_table(found.cells[:limit]), width=WIDTH)
    if len(found.cells) > limit:
        print(f"… and {len(found.cells) - limit} more (--limit)")
    for line in failure_lines(found.failures):
        print(line)


def show(
    cell: Annotated[str, typer.Argument(help="a cell: its key, or the beginning of it")],
    store: StoreOption,
    json: Annotated[Path | None, json_option("the result")] = None,
) -> None:
    """Show one cell's result."""
    from dualview.report.terminal import result_table
    from dualview.store import api

    found = api.show(cell, store, json=json)
    if not is_stdout(json):
        print(found.key)
        show_table(json, result_table(found.result), width=WIDTH)


def diff(
    left: Annotated[str, typer.Argument(help="a cell's key (its beginning), or without --store a store's folder")],
    right: Annotated[str, typer.Argument(help="another")],
    store: Annotated[Path | None, typer.Option(help="the store both cells are in")] = None,
    json: Annotated[Path | None, json_option("the differences")] = None,
) -> None:
    """Show where two cells, or two stores, differ.

    The exit code is 1 if they do.
    """
    from dualview.cli.store_tables import diff_table
    from dualview.store import api

    found = api.diff(left, right, store, json=json, say=say)
    show_table(json, diff_table(found, left, right), width=WIDTH)
    if found if isinstance(found, list) else not found.equal:
        raise typer.Exit(DIFFERENT)


def export(
    out: Annotated[Path, typer.Argument(help="the file to write: .csv, .parquet, .json or .nc (NetCDF)")],
    store: Annotated[Path | None, typer.Option(help="the store's folder")] = None,
    run: Annotated[
        Path | None, typer.Option(help="a folder of `run --out`: its numbers, or as NetCDF its saved records")
    ] = None,
    table: Annotated[str, typer.Option(help="cells, layers, queries, controls, runs or failures")] = "cells",
    format: Annotated[
        str | None, typer.Option(help="csv, parquet, json or netcdf (default: by the file's name)", show_default=False)
    ] = None,
    all: AllOption = False,
    json: Annotated[Path | None, json_option("the number of rows and the file's name")] = None,
) -> None:
    """Write a table of a store, or the numbers of a run, to a file."""
    from dualview.store import api

    path = api.export(out, store, run=run, table=table, format=format, all=all, json=json, say=say)
    if not is_stdout(json):
        print(f"wrote {path}")


def query(
    sql: Annotated[str, typer.Argument(help="SELECT … FROM cells, layers, queries, controls, runs or failures")],
    store: StoreOption,
    json: Annotated[Path | None, json_option("the rows")] = None,
) -> None:
    """Ask a store in SQL (DuckDB)."""
    from dualview.cli.store_tables import rows_table
    from dualview.store import api

    rows: Any = api.query(sql, store, json=json, say=say)
    show_table(json, rows_table(rows), width=WIDTH)
