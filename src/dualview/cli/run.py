"""`dualview run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dualview.cli.options import given, json_option, with_options
from dualview.io import terminal
from dualview.io.errors import cause_of
from dualview.io.json_files import Place, is_stdout, save_json
from dualview.io.progress import for_stream
from dualview.io.saving import save_to_temporary
from dualview.options import RunOptions

NOT_PRINTED = 2


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only count tokens and estimate the time")] = False,
    **options: Any,
) -> None:
    """Compare zero-shot, in-context and fine-tuned on one task."""
    from dualview import verbs

    written: list[Path] = []
    # JSON for standard output is printed here, where a failure does not lose the result.
    places: dict[str, Any] = {"out": out, "json": None if is_stdout(json) else json, "on_written": written.append}
    found: Any = verbs.run(seeds=seeds, dry_run=dry_run, progress=for_stream(), **places, **given(options))
    if dry_run:
        terminal.show(found.table())
        return
    name = "result.json" if seeds is None else "seeds.json"
    try:
        _print(found, written, json, several=seeds is not None)
        sys.stdout.flush()
    except Exception as error:
        terminal.forget_output()
        kept = f"the result is in {written[0]}" if written else save_to_temporary(name, found.save)
        what = "result" if is_stdout(json) else "table"
        terminal.say(f"dualview: warning: The {what} could not be printed ({cause_of(error)}); {kept}.")
        if is_stdout(json) or not written:  # it is not where it was asked for
            raise typer.Exit(NOT_PRINTED) from error


def _print(found: Any, written: Sequence[Path], json: Place, *, several: bool) -> None:
    """A result as JSON, or its table and its files."""
    if is_stdout(json):
        save_json(json, found.to_json())
        return
    from dualview.report.terminal import result_table, seeds_table

    terminal.show(seeds_table(found) if several else result_table(found))
    for path in written:
        print(f"wrote {path}")
