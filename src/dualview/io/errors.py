"""Errors that the user can fix, and other errors in one line."""

from __future__ import annotations

from typing import Any, get_args


class UserError(Exception):
    """A mistake the user can fix, in one sentence that names what is wrong and what to do.

    The command line prints the sentence alone and exits with code 2.
    """


def one_of(what: str, given: object, choices: Any) -> None:
    """Refuse a word that is none of a `Literal`'s."""
    words = get_args(choices)
    if given not in words:
        raise UserError(f"{what} is one of {', '.join(map(str, words))}, not {given!r}.")


def first_line(error: BaseException) -> str:
    """An error's message, short enough to quote in a sentence."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".")


def cause_of(error: BaseException) -> str:
    """The innermost cause of an error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (error.strerror if isinstance(error, OSError) else None) or first_line(error)


def first_problem(error: Any) -> tuple[str, str]:
    """Where pydantic found the first problem, as a dotted path (empty: in the whole), and its message."""
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])), str(first["msg"]).removeprefix("Value error, ")
