"""`dualview report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dualview.cli.options import json_option
from dualview.io.json_files import is_stdout


def report(
    source: Annotated[Path, typer.Argument(help="a result's JSON file, the folder a run wrote, or a store")],
    out: Annotated[Path | None, typer.Option(help="the HTML file; by default report.html next to the source")] = None,
    figures: Annotated[Path | None, typer.Option(help="also write every figure (pdf, svg, png) here")] = None,
    json: Annotated[Path | None, json_option("the names of the files")] = None,
) -> None:
    """Write one HTML file about a run, or about a store of runs."""
    from dualview.report.build import report as build

    written = build(source, out, figures, json=json)
    if not is_stdout(json):
        for path in written:
            print(f"wrote {path}")
