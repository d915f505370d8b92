"""Options of the command line: one builder for the fields of a settings class, and the options that verbs share.

The settings classes are plain dataclasses, so that `--help` waits neither for torch nor for pydantic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from dualview.io import terminal
from dualview.io.json_files import Place, is_stdout
from dualview.options import RunOptions

Verb = Callable[..., None]


def with_options(settings: type, without: Sequence[str] = ()) -> Callable[[Verb], Verb]:
    """Give a verb an option for each field of `settings`, except `without`, in place of its `**options`."""

    def add_to(verb: Verb) -> Verb:
        hints = get_type_hints(settings, include_extras=True)
        own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        built = [_option(field, hints[field.name]) for field in fields(settings) if field.name not in without]
        parameters = [*built, *own]
        verb.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        verb.__annotations__ = {p.name: p.annotation for p in parameters}
        return verb

    return add_to


def _option(field: Field[Any], hint: Any) -> inspect.Parameter:
    """One field as an option; None where it is not given."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    flag = f"--{field.name.replace('_', '-')}"
    default = "" if field.default in (None, False) else f" [default: {_shown(field.default, flag)}]"
    # Values are read as text: the settings class checks them and names what is wrong in one sentence.
    taken: Any = list[str] if get_origin(kind) is tuple else str
    if kind is bool:
        taken = bool
        flag = f"{flag}/--no-{flag[2:]}" if field.default else flag
    metavar = None if kind is bool else metavar_of(hint)
    option = typer.Option(flag, help=field.metadata["help"] + default, metavar=metavar, show_default=False)
    annotation = Annotated[taken | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown(default: Any, flag: str) -> str:
    if default is True:
        return flag[2:]
    if isinstance(default, tuple):
        return ",".join(_shown(each, flag) for each in default) or "none"  # pyright: ignore[reportUnknownVariableType]
    return f"{default:g}" if isinstance(default, float) else str(default)


def metavar_of(hint: Any) -> str:
    """What an option takes, as `--help` shows it.

    >>> metavar_of(int | Literal["auto"]), metavar_of(tuple[float, ...]), metavar_of(Literal["yes", "no"] | None)
    ('<int>|auto', '<float>,…', 'yes|no')
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return metavar_of(parts[0])
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin is tuple:
        return "<path>" if parts[0] is Path else f"{metavar_of(parts[0])},…"  # a path may hold a comma
    if parts:
        return "|".join(metavar_of(part) for part in parts if part is not type(None))
    return f"<{hint.__name__.lower()}>"


def json_option(what: str) -> Any:
    """`--json`, which means the same everywhere: a file, or `-` for standard output."""
    return typer.Option(metavar="<path>", help=f"write {what} to this file; - prints JSON in place of the table")


def show(json: Place, *content: Any, width: int = terminal.WIDTH) -> None:
    """Print tables, unless JSON goes to standard output in their place."""
    if not is_stdout(json):
        terminal.show(*content, width=width)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, so that the function's own defaults hold for the others."""
    return {name: value for name, value in options.items() if value is not None}


DTYPES = metavar_of(get_type_hints(RunOptions)["dtype"])
QueryOption = Annotated[
    str, typer.Option(help="the query's text; a JSON object where the template has several fields", metavar="<str>")
]
