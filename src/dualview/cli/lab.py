"""`dualview lab NAME`: each lab's command, built from its settings when it is called.

A lab's module imports torch sooner or later, so none is imported to list the labs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from dualview.cli.options import json_option, with_options
from dualview.io.json_files import is_stdout, save_json
from dualview.io.progress import for_stream
from dualview.lab import LABS


def add(app: typer.Typer) -> None:
    """Add `lab` with one command per lab."""
    labs = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
    for name, summary in LABS.items():
        everything = {"allow_extra_args": True, "ignore_unknown_options": True}
        labs.command(name, short_help=summary, add_help_option=False, context_settings=everything)(_caller(name))
    app.add_typer(labs, name="lab", help="Train the small models that show it.")


def _caller(name: str) -> Callable[[typer.Context], None]:
    """Hand everything after the lab's name to its own command."""

    def call(context: typer.Context) -> None:
        own = typer.main.get_command(lab_app(name))
        code = own.main(context.args, prog_name=context.command_path, standalone_mode=False)
        raise typer.Exit(code or 0)

    return call


def lab_app(name: str) -> typer.Typer:
    """The command of one lab, with an option for each of its settings."""
    module = import_module(f"dualview.lab.{name}.run")

    @with_options(module.Settings)
    def command(
        *,
        out: Annotated[
            Path | None, typer.Option(help="write JSON, table and figures here, and resume from here")
        ] = None,
        json: Annotated[Path | None, json_option("the numbers")] = None,
        **settings: Any,
    ) -> None:
        from dualview.lab.harness import show

        file = None if is_stdout(json) else json
        result = getattr(module, name)(out=out, json=file, progress=for_stream(), **settings)
        if is_stdout(json):
            save_json(json, result.to_json())
        else:
            show(module.tables(result))
            for path in result.written:
                print(f"wrote {path}")
        sys.stdout.flush()

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, help=inspect.getdoc(getattr(module, name)))(command)
    return app
