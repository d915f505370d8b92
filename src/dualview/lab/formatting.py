"""Numbers as the labs' tables show them, where there may be none."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that are known; None if none is.

    >>> mean([1.0, None, 2.0]), mean([None])
    (1.5, None)
    """
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def number(value: float | None, style: str = ".3f", none: str = "none") -> str:
    """A number in a style; `none` where there is none.

    >>> number(0.25, "+.2f"), number(None, none="–")
    ('+0.25', '–')
    """
    return none if value is None else format(value, style)


def between(ci: Sequence[float] | None, style: str, none: str = "") -> str:
    """An interval; `none` where there is none.

    >>> between([-0.1, 0.25], "+.2f"), between(None, "+.2f")
    ('-0.10 to +0.25', '')
    """
    return none if ci is None else f"{ci[0]:{style}} to {ci[1]:{style}}"
