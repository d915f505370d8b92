"""`dualview compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dualview.cli.options import given, json_option, show, with_options
from dualview.io.progress import for_stream
from dualview.options import COMPARISON_ONLY, RunOptions


@with_options(RunOptions, without=COMPARISON_ONLY)
def compile_(
    *,
    out: Annotated[Path, typer.Option(help="where to write the patch: a safetensors file, or a folder for peft")],
    format: Annotated[Literal["patch", "peft"], typer.Option(help="dualview's own, or a LoRA adapter")] = "patch",
    rank: Annotated[int | None, typer.Option(help="of the adapter; exact if not given", metavar="<int>")] = None,
    json: Annotated[Path | None, json_option("its scores")] = None,
    **options: Any,
) -> None:
    """Turn demonstrations into a patch of the weights.

    It is scored on queries that it has not seen. Its twin, with flipped labels, is written with it.
    """
    from dualview.analyses.compile import compile_patch

    found = compile_patch(out=out, format=format, rank=rank, json=json, progress=for_stream(), **given(options))
    show(json, found.table())
