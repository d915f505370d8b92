"""`dualview metrics`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dualview.cli.options import json_option
from dualview.io import terminal
from dualview.io.json_files import is_stdout


def metrics(
    records: Annotated[Path, typer.Argument(help="a records.safetensors file that `run --save-records` wrote")],
    json: Annotated[Path | None, json_option("the metrics")] = None,
) -> None:
    """Recompute every metric from saved records, without a model."""
    from dualview.metrics.recompute import recompute
    from dualview.report.terminal import metrics_report

    measured = recompute(records, json=json)
    if not is_stdout(json):
        terminal.show(metrics_report(measured.to_json()))


def add(app: typer.Typer) -> None:
    app.command()(metrics)
