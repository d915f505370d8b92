"""The few scipy functions in use, with types (scipy ships none)."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from scipy import special  # pyright: ignore[reportMissingTypeStubs]

_special = cast("Any", special)


def hypergeometric_tail(at_least: int, population: int, successes: int, draws: int) -> float:
    """P(X ≥ at_least) for `draws` drawn without replacement from `population` of which `successes` count."""
    # Written out because importing scipy.stats takes most of a second.
    least, most = max(at_least, 0, draws - (population - successes)), min(draws, successes)
    if least > most:
        return 0.0
    x = np.arange(least, most + 1)
    ways = _log_choose(successes, x) + _log_choose(population - successes, draws - x) - _log_choose(population, draws)
    return min(1.0, float(np.exp(_special.logsumexp(ways))))


def _log_choose(n: int, k: np.ndarray | int) -> np.ndarray:
    return _special.gammaln(n + 1) - _special.gammaln(np.asarray(k) + 1) - _special.gammaln(n - np.asarray(k) + 1)


def normal_cdf(x: float) -> float:
    return float(_special.ndtr(x))


def normal_quantile(p: float) -> float:
    return float(_special.ndtri(p))


def beta_quantile(p: float, a: float, b: float) -> float:
    return float(_special.betaincinv(a, b, p))


def student_cdf(t: float, degrees: float) -> float:
    return float(_special.stdtr(degrees, t))


def student_quantile(p: float, degrees: int) -> float:
    return float(_special.stdtrit(degrees, p))
