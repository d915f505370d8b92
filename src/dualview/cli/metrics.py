"""`dualview metrics`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dualview.cli.options import json_option, show


def metrics(
    records: Annotated[Path, typer.Argument(help="a records.safetensors file that `run --save-records` wrote")],
    json: Annotated[Path | None, json_option("the metrics")] = None,
) -> None:
    """Recompute every metric from saved records, without a model."""
    from dualview.metrics.recompute import recompute
    from dualview.report.terminal import metrics_report

    measured = recompute(records, json=json)
    show(json, metrics_report(measured))
