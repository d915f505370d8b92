"""`dualview verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dualview.cli.options import DTYPES, json_option, show
from dualview.io import terminal


def verify(
    model: Annotated[str, typer.Option(help="also on this model's tensors; none: on random data alone")] = "embedded",
    seed: Annotated[int, typer.Option(help="draws the data")] = 0,
    wrong: Annotated[bool, typer.Option("--wrong", help="run the common misprints instead: each must fail")] = False,
    dtype: Annotated[str, typer.Option(help="of the model", metavar=DTYPES)] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto takes a GPU if there is one")] = "auto",
    json: Annotated[Path | None, json_option("the table")] = None,
) -> None:
    """Check every identity on random data and on a model.

    The exit code is 1 if one fails.
    """
    from dualview import verbs
    from dualview.duality.verify.run import render

    checks = verbs.verify(model, seed=seed, wrong=wrong, dtype=dtype, device=device, json=json)
    # The paper of a misprint is the one it misquotes, which need not be the one that printed it.
    show(json, render(checks, "misprints: every one must fail", "statement of") if wrong else render(checks))
    unexpected = [check for check in checks if check.status == ("passed" if wrong else "failed")]
    if unexpected:
        what = "misprints passed" if wrong else "identities failed"
        terminal.say(f"{len(unexpected)} of {len(checks)} {what}")
        raise typer.Exit(1)
