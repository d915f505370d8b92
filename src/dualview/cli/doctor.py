"""`dualview doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dualview.cli.options import json_option, show
from dualview.io.display import TextTable

if TYPE_CHECKING:
    from dualview.io.doctor import Diagnosis

UNHEALTHY = 1


def doctor(json: Annotated[Path | None, json_option("what was found")] = None) -> None:
    """Print what is installed, what works, and what is missing.

    Versions, device, cache, what works offline, and the command that installs what is not there.

    The exit code is 1 if something that dualview requires is missing.
    """
    from dualview.io.doctor import doctor as diagnose

    found = diagnose(json=json)
    show(json, doctor_table(found).rich())
    if not found.healthy:
        raise typer.Exit(UNHEALTHY)


def doctor_table(found: Diagnosis) -> TextTable:
    """What was found; here, and not among the other tables, since those need packages that may be missing."""
    device, cache = found.device, found.cache
    gpus = ", ".join(device["gpus"]) or "no GPU"
    state = ", ".join(f"{name} {state}" for name, state in cache["assets"].items())
    writable = "" if cache["writable"] else "NOT WRITABLE, "
    rows = [
        ("versions", ", ".join(f"{name} {number}" for name, number in found.versions.items())),
        ("device", f"{device['auto']} ({gpus}; {device['cpu']}, {device['cores']} cores)"),
        ("cache", f"{cache['folder']} ({writable}{cache['free_bytes'] / 1e9:.0f} GB free; {state})"),
        *(("works offline" if works else "needs a network", what) for what, works in found.offline.items()),
    ]
    for each in found.missing:
        what = "MISSING" if each.required else "not installed"
        rows.append((what, f"{each.what}, for {each.needed_for}: {each.command}"))
    return TextTable("Doctor", ("what", "found"), rows)
