"""`dualview tasks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dualview.cli.options import json_option, show


def tasks(
    names: Annotated[list[str] | None, typer.Argument(help="tasks or YAML files to check; none: list all")] = None,
    data: Annotated[Path | None, typer.Option(help="check them against this folder of <task>/*.jsonl")] = None,
    json: Annotated[Path | None, json_option("the tasks or what the check found")] = None,
) -> None:
    """List the tasks, or check some: read every row and count labels."""
    from dualview.report.terminal import task_check_table, task_table
    from dualview.tasks.task import tasks as list_or_check

    found: Any = list_or_check(names, data, json=json)
    show(json, task_check_table(found) if names else task_table(found))
