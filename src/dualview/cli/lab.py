"""`dualview lab NAME`: each lab's command, made from its `Settings` when it is called for.

A lab's module imports torch sooner or later, so none is imported to list the labs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from dualview.cli.metavars import metavar_of
from dualview.lab import LABS
from dualview.lab.settings import LabSettings, element_of


def add(app: typer.Typer) -> None:
    """Add `lab` with one command per lab."""
    labs = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
    for name, summary in LABS.items():
        everything = {"allow_extra_args": True, "ignore_unknown_options": True}
        labs.command(name, short_help=summary, add_help_option=False, context_settings=everything)(_caller(name))
    app.add_typer(labs, name="lab", help="Train the small models that show it.")


def _caller(name: str) -> Callable[[typer.Context], None]:
    """Hand all that follows the lab's name to its own command."""

    def call(context: typer.Context) -> None:
        own = typer.main.get_command(lab_app(name))
        code = own.main(context.args, prog_name=context.command_path, standalone_mode=False)
        raise typer.Exit(code or 0)

    return call


def lab_app(name: str) -> typer.Typer:
    """The command of one lab, with an option for each of its settings."""
    module = import_module(f"dualview.lab.{name}.run")
    settings: type[LabSettings] = module.Settings

    def command(
        *,
        out: Annotated[Path | None, typer.Option(help="write JSON, table and figures here, and resume from here")],
        json: Annotated[Path | None, typer.Option(help="write the numbers to this file")],
        **given: Any,
    ) -> None:
        from dualview.io.progress import for_stream
        from dualview.lab.harness import show

        result = getattr(module, name)(out=out, json=json, progress=for_stream(), **given)
        show(module.tables(result))
        for path in result.written:
            print(f"wrote {path}")
        sys.stdout.flush()

    hints = get_type_hints(settings, include_extras=True)
    own = inspect.signature(command, eval_str=True).parameters
    parameters = [_option(field, hints[field.name]) for field in fields(settings)]
    parameters += [own[place].replace(default=None) for place in ("out", "json")]
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, help=inspect.getdoc(getattr(module, name)))(command)
    return app


def _option(field: Field[Any], hint: Any) -> inspect.Parameter:
    """One setting as an option; None where it is not given. Values are taken as text and checked by `Settings.make`."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    flag = f"--{field.name.replace('_', '-')}"
    if kind is bool and field.default:
        flag = f"{flag}/--no-{flag[2:]}"
    default = field.name.replace("_", "-") if field.default is True else _shown(field.default)
    shown = "" if field.default is None or field.default is False else f" [default: {default}]"
    taken: Any = bool if kind is bool else str
    if element_of(hint) is not None:
        taken = list[str]
    values = None if kind is bool else metavar_of(hint)
    given = typer.Option(flag, help=field.metadata["help"] + shown, metavar=values, show_default=False)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[taken | None, given]
    )


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(_shown, default)) or "none"  # pyright: ignore[reportUnknownArgumentType]
    return f"{default:g}" if isinstance(default, float) else str(default)
