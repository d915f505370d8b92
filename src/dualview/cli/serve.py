"""`dualview serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dualview.cli.options import DTYPES


def serve(
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 8765,
    host: Annotated[str, typer.Option(help="any address but 127.0.0.1 needs --token")] = "127.0.0.1",
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="a model the page may choose; repeat for more [default: embedded]"),
    ] = None,
    store: Annotated[Path | None, typer.Option(help="browse the results of this store as well")] = None,
    data: Annotated[
        Path | None, typer.Option(help="read the library's tasks from <task>/*.jsonl here, not from the hub")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="a secret asked for on every call, at least 16 characters", envvar="DUALVIEW_TOKEN"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="another Host header it is reached by, as in box.example:8765"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="of the models", metavar=DTYPES)] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto takes a GPU if there is one")] = "auto",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="do not open a browser")] = False,
) -> None:
    """Explore in the browser.

    Type demonstrations and a query, and watch the three settings.
    """
    from dualview.web.serve import serve as run

    run(
        port=port,
        host=host,
        model=model or ["embedded"],
        store=store,
        data=data,
        token=token,
        allow_host=allow_host or [],
        dtype=dtype,
        device=device,
        no_browser=no_browser,
    )


def add(app: typer.Typer) -> None:
    app.command()(serve)
