"""`dualview explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from dualview.cli.options import QueryOption, given, json_option, show, with_options
from dualview.io.progress import for_stream
from dualview.options import COMPARISON_ONLY, QUERIES_ONLY, RunOptions


@with_options(RunOptions, without=(*QUERIES_ONLY, *COMPARISON_ONLY))
def explain(
    *,
    query: QueryOption,
    json: Annotated[Path | None, json_option("the contributions")] = None,
    **options: Any,
) -> None:
    """Show which demonstrations and tokens an answer came from.

    In context by attention, in fine-tuning by its dual form. Demonstrations are counted from 0.
    """
    from dualview.analyses.explain import explain as find

    found = find(query=query, json=json, progress=for_stream(), **given(options))
    show(json, found.table())
