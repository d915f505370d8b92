"""`dualview report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    source: Annotated[Path, typer.Argument(help="a result's JSON file, the folder a run wrote, or a store")],
    out: Annotated[Path | None, typer.Option(help="the HTML file; by default report.html next to the source")] = None,
    figures: Annotated[Path | None, typer.Option(help="also write every figure (pdf, svg, png) here")] = None,
) -> None:
    """Write one HTML file about a run, or about a store of runs."""
    from dualview.report.build import report as build

    for path in build(source, out, figures):
        print(f"wrote {path}")


def add(app: typer.Typer) -> None:
    app.command()(report)
