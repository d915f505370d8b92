"""`dualview calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dualview.cli.options import given, json_option, show, with_options
from dualview.io.progress import for_stream
from dualview.options import COMPARISON_ONLY, RunOptions

DECIDED_HERE = ("demos", "queries", "n_queries", "shots", "seed", "lr", "ft_rule", "protocol", "weights")


@with_options(RunOptions, without=(*COMPARISON_ONLY, *DECIDED_HERE))
def calibrate(
    *,
    full: Annotated[bool, typer.Option("--full", help="more of everything: about ten times as long")] = False,
    seed: Annotated[int, typer.Option(help="of every random draw: another seed is another certificate")] = 0,
    out: Annotated[Path | None, typer.Option(help="write the certificate, its page and its figure here")] = None,
    json: Annotated[Path | None, json_option("every number")] = None,
    **options: Any,
) -> None:
    """Put known nulls and known positives under the verdict.

    How often is it right, and how much similarity does it need to see it? Exit code 1 if the certificate is not passed.
    """
    from dualview.report.terminal import certificate_report
    from dualview.verbs import calibrate as certify

    written: list[Path] = []
    found = certify(
        full=full, seed=seed, out=out, json=json, progress=for_stream(), on_written=written.append, **given(options)
    )
    show(json, certificate_report(found), *(f"wrote {path}" for path in written))
    if not found.passed:
        raise typer.Exit(1)
