"""`dualview run`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dualview.cli.options import given, json_option, with_options
from dualview.io import terminal
from dualview.io.json_files import is_stdout
from dualview.io.progress import for_stream
from dualview.io.saving import cause_of, rescued
from dualview.options import RunOptions


@with_options(RunOptions)
def run(
    *,
    out: Annotated[
        Path | None, typer.Option(help="write result.json, report.html and the saved records to this folder")
    ] = None,
    json: Annotated[Path | None, json_option("the result")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="repeat over several draws: 1:5, or 1,3,7", metavar="<int>:<int>|<int>,…")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="count tokens and estimate the time, no more")] = False,
    **options: Any,
) -> None:
    """Compare zero-shot, in-context and fine-tuned on one task."""
    from dualview import verbs

    written: list[Path] = []
    places: dict[str, Any] = {"out": out, "json": json, "on_written": written.append}
    found: Any = verbs.run(seeds=seeds, dry_run=dry_run, progress=for_stream(), **places, **given(options))
    if dry_run:
        terminal.show(found.table())
    elif not is_stdout(json):
        from dualview.report.terminal import result_table, seeds_table

        name = "result.json" if seeds is None else "seeds.json"
        table = result_table if seeds is None else seeds_table
        _present(lambda: table(found), written, name, found.save)


def _present(table: Callable[[], Any], written: Sequence[Path], name: str, save: Callable[[Path], None]) -> None:
    """Print a result's table and its files. A table that cannot be printed must not cost a result of minutes."""
    try:
        terminal.show(table())
        for path in written:
            print(f"wrote {path}")
        sys.stdout.flush()
    except Exception as error:
        terminal.forget_output()
        kept = f"the result is in {written[0]}" if written else rescued(name, save)
        terminal.say(f"dualview: warning: The table could not be printed ({cause_of(error)}); {kept}.")


def add(app: typer.Typer) -> None:
    app.command()(run)
