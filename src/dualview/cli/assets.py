"""`dualview assets`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dualview.cli.options import json_option
from dualview.io import terminal
from dualview.io.errors import UserError
from dualview.io.json_files import is_stdout


def assets(
    action: Annotated[Literal["list", "fetch", "verify", "clear"], typer.Argument(help="what to do")] = "list",
    names: Annotated[list[str] | None, typer.Argument(help="fetch: which; none: the embedded model and data")] = None,
    *,
    json: Annotated[Path | None, json_option("the assets and conversions (after `clear`: those removed)")] = None,
) -> None:
    """List, fetch or verify models and data.

    Also list or clear the cached conversions of GGUF files.
    """
    from dualview import verbs
    from dualview.report.terminal import asset_table, conversion_table

    found = verbs.assets(action, names or (), json=json, say=terminal.say)
    if action == "clear" and not is_stdout(json):
        size = sum(each.size for each in found.conversions) / 1e6
        print(f"removed {len(found.conversions)} cached conversions of GGUF files ({size:.0f} MB)")
    elif not is_stdout(json):
        terminal.show(asset_table(found.assets))
        if found.conversions:
            terminal.show(conversion_table(found.conversions))
    if action == "verify" and not found.ready:
        raise UserError("Some assets are missing or damaged; run `dualview assets fetch`.")
