"""`dualview prompt`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dualview.cli.options import given, json_option, with_options
from dualview.io import terminal
from dualview.io.json_files import is_stdout
from dualview.io.progress import for_stream
from dualview.options import RunOptions


@with_options(RunOptions)
def prompt(
    *,
    query: Annotated[
        int,
        typer.Option(
            min=0, help="which query to show, counted from 0 [default: 0]", metavar="<int>", show_default=False
        ),
    ] = 0,
    json: Annotated[Path | None, json_option("the tokens and spans")] = None,
    **options: Any,
) -> None:
    """Show one prompt as the model sees it, token by token.

    Each token comes with its span; the candidates follow. Queries, demonstrations and candidates count from 0.
    """
    from dualview import verbs

    shown = verbs.prompt(query=query, json=json, progress=for_stream(), **given(options))
    if is_stdout(json):
        return
    if sys.stdout.isatty():
        terminal.show(shown.table())
        return
    for token in shown.tokens:  # colours are lost in a file, so each token gets a line
        number = "" if token["number"] is None else token["number"]
        print(token["index"], token["id"], token["span"], number, repr(token["text"]), sep="\t")


def add(app: typer.Typer) -> None:
    app.command()(prompt)
