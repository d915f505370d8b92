"""`dualview doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dualview.cli.options import json_option
from dualview.io import terminal
from dualview.io.json_files import is_stdout

UNHEALTHY = 1


def doctor(json: Annotated[Path | None, json_option("what was found")] = None) -> None:
    """Print what is installed, what works, and what is missing.

    Versions, device, cache, what works offline, and the command that installs what is not there.

    The exit code is 1 if something that dualview requires is missing.
    """
    from dualview.io.doctor import doctor as diagnose
    from dualview.report.terminal import doctor_table

    found = diagnose(json=json)
    if not is_stdout(json):
        terminal.show(doctor_table(found))
    if not found.healthy:
        raise typer.Exit(UNHEALTHY)
