"""What an option takes, as its `--help` shows it: `<int>`, `<float>|auto`, `cpu|cuda`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from dualview.options import RunOptions


def metavar_of(hint: Any) -> str:
    """The word for a type.

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


DTYPES = metavar_of(get_type_hints(RunOptions)["dtype"])
