"""How the labs' tables show numbers and intervals that may be missing."""

from __future__ import annotations

from collections.abc import Sequence


def number(value: float | None, style: str = ".3f", none: str = "none") -> str:
    """A number in a format; `none` where it is missing.

    >>> number(0.25, "+.2f"), number(None, none="–")
    ('+0.25', '–')
    """
    return none if value is None else format(value, style)


def between(ci: Sequence[float] | None, style: str, none: str = "") -> str:
    """An interval; `none` where it is missing.

    >>> between([-0.1, 0.25], "+.2f"), between(None, "+.2f")
    ('-0.10 to +0.25', '')
    """
    return none if ci is None else f"{ci[0]:{style}} to {ci[1]:{style}}"
