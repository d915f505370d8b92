"""The few scipy functions in use, with types (scipy ships none)."""

from __future__ import annotations

from typing import Any, cast

from scipy import special  # pyright: ignore[reportMissingTypeStubs]

_special = cast("Any", special)


def hypergeometric_tail(at_least: int, population: int, successes: int, draws: int) -> float:
    """P(X ≥ at_least) for `draws` drawn without replacement from `population` of which `successes` count."""
    # Imported here because scipy.stats takes half a second, which commands that test nothing need not wait for.
    from scipy import stats  # pyright: ignore[reportMissingTypeStubs]

    return float(cast("Any", stats).hypergeom.sf(at_least - 1, population, successes, draws))


def normal_cdf(x: float) -> float:
    return float(_special.ndtr(x))


def normal_quantile(p: float) -> float:
    return float(_special.ndtri(p))


def student_cdf(t: float, degrees: int) -> float:
    return float(_special.stdtr(degrees, t))


def student_quantile(p: float, degrees: int) -> float:
    return float(_special.stdtrit(degrees, p))
