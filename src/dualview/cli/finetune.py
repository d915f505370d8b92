"""`dualview finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dualview.cli.options import given, json_option, show, with_options
from dualview.io.progress import for_stream
from dualview.options import COMPARISON_ONLY, RunOptions


@with_options(RunOptions, without=COMPARISON_ONLY)
def finetune(
    *,
    out: Annotated[Path, typer.Option(help="a folder for the LoRA adapter")],
    rank: Annotated[int | None, typer.Option(help="of the adapter; exact if not given", metavar="<int>")] = None,
    json: Annotated[Path | None, json_option("its scores")] = None,
    **options: Any,
) -> None:
    """Fine-tune on demonstrations and write a LoRA adapter.

    It is exact at full rank; PEFT and `dualview run --adapter` read it. Its twin, with flipped labels, is written with
    it.
    """
    from dualview.analyses.finetune import finetune_adapter

    found = finetune_adapter(out=out, rank=rank, json=json, progress=for_stream(), **given(options))
    show(json, found.table())
