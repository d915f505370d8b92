"""`dualview heads`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dualview.cli.options import QueryOption, given, json_option, show, with_options
from dualview.io.progress import for_stream
from dualview.options import COMPARISON_ONLY, QUERIES_ONLY, RunOptions


@with_options(RunOptions, without=(*QUERIES_ONLY, *COMPARISON_ONLY))
def heads(
    *,
    query: QueryOption,
    rank: Annotated[int, typer.Option(help="leading singular directions whose spaces are compared")] = 8,
    shuffles: Annotated[int, typer.Option(help="random orders of the tokens behind every floor")] = 5,
    json: Annotated[Path | None, json_option("every layer's numbers")] = None,
    **options: Any,
) -> None:
    """Compare demonstrations and fine-tuning as updates of heads.

    Layer by layer, each similarity next to its floor.
    """
    from dualview.analyses.heads import heads as compare

    found = compare(query=query, rank=rank, shuffles=shuffles, json=json, progress=for_stream(), **given(options))
    show(json, found.table())
