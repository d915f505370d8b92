"""Intervals and p-values: one 95 % interval for each kind of data, and the tests.

    bootstrap over queries   rows of one run (queries, pieces of text): `query_interval`, `ratio_interval`
    Wilson                   a proportion: `wilson_interval`
    Student over draws       independent draws (seeds, trainings, tasks, random problems): `draw_interval`

Everything random takes a seed and a name: each named draw has its own generator, so a new control never changes another
number. All queries of a run share one list of demonstrations and one fine-tuning, so an interval over queries holds for
*this* list and run only. An interval over draws holds for other draws and the same queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from dualview.metrics._scipy import (
    beta_quantile,
    hypergeometric_tail,
    normal_cdf,
    normal_quantile,
    student_cdf,
    student_quantile,
)
from dualview.metrics.cosine import defined_mean, ratio

DRAWS = 1999
"""Default number of resamples: the smallest p-value is then 1/2000."""

_CHUNK = 2_000_000


Kind = Literal["bootstrap over queries", "Wilson", "Student over draws"]


@dataclass(frozen=True)
class Interval:
    """A confidence interval, and the name of the method: one for each kind of data."""

    low: float
    high: float
    level: float = 0.95
    kind: Kind = "bootstrap over queries"

    def to_json(self) -> list[float]:
        return [self.low, self.high]


def generator(seed: int, name: str) -> np.random.Generator:
    """The generator of one named draw of one seed, independent of every other name's."""
    return np.random.default_rng([seed, *name.encode()])


def _as_table(values: Float[np.ndarray, " query *layer"]) -> Float[np.ndarray, "query layer"]:
    return values.astype(np.float64).reshape(values.shape[0], -1)


def _chunks(draws: int, width: int) -> Iterator[int]:
    size = max(1, _CHUNK // max(1, width))
    yield from [size] * (draws // size)
    if draws % size:
        yield draws % size


def _counts(rng: np.random.Generator, draws: int, n: int) -> Float[np.ndarray, "draw n"]:
    """How often each of n units is drawn, n times with replacement, in each resample."""
    picks: np.ndarray = rng.integers(0, n, size=(draws, n)) + np.arange(draws)[:, None] * n
    return np.bincount(picks.ravel(), minlength=draws * n).reshape(draws, n).astype(np.float64)


def _resampled_layers(
    values: Float[np.ndarray, "query layer"], rng: np.random.Generator, draws: int
) -> Float[np.ndarray, "draw layer"]:
    """Per-layer means of resampled queries, NaN where a resample holds nothing defined."""
    defined = ~np.isnan(values)
    filled, weight = np.where(defined, values, 0.0), defined.astype(np.float64)
    parts: list[np.ndarray] = []
    for size in _chunks(draws, values.shape[0]):
        counts = _counts(rng, size, values.shape[0])
        parts.append(ratio(counts @ filled, counts @ weight))
    return np.concatenate(parts)


def _expanded_tail(level: float, n: int) -> float:
    """The percentile whose bootstrap interval is as wide as Student's.

    A plain percentile interval is too narrow by √((n−1)/n) and uses the normal in place of the t quantile
    (Hesterberg 2015, "What teachers should know about the bootstrap", section 5.3); this undoes both.
    """
    return normal_cdf(-((n / (n - 1)) ** 0.5) * student_quantile((1 + level) / 2, n - 1))


def _percentiles(samples: Float[np.ndarray, " draw"], tail: float, level: float) -> Interval | None:
    samples = samples[~np.isnan(samples)]
    if samples.size == 0:
        return None
    low, high = np.quantile(samples, [tail, 1 - tail])
    return Interval(float(low), float(high), level)


def query_interval(
    values: Float[np.ndarray, " query *layer"],
    *,
    seed: int,
    name: str = "interval",
    draws: int = DRAWS,
    level: float = 0.95,
) -> Interval | None:
    """Bootstrap interval of the mean (over queries, then layers) by resampling queries; NaN values are left out.

    The expanded percentile interval. None with fewer than two queries that have a value. Paired differences: pass the
    differences.
    """
    table = _as_table(values)
    table = table[~np.isnan(table).all(axis=1)]
    if table.shape[0] < 2:
        return None
    means = defined_mean(_resampled_layers(table, generator(seed, name), draws), axis=1)
    return _percentiles(means, _expanded_tail(level, table.shape[0]), level)


def ratio_interval(
    part: Float[np.ndarray, " query"], whole: Float[np.ndarray, " query"], *, name: str, level: float = 0.95
) -> Interval | None:
    """The same bootstrap for mean(part) / mean(whole); None where the resampled denominator changes sign."""
    if part.size < 2:
        return None
    means = _resampled_layers(np.stack([part, whole], axis=1), generator(0, name), DRAWS)
    if not (np.sign(means[:, 1]) == np.sign(whole.mean())).all():
        return None
    return _percentiles(means[:, 0] / means[:, 1], _expanded_tail(level, part.size), level)


def correlation_interval(
    a: Float[np.ndarray, " query *part"],
    b: Float[np.ndarray, " query *part"],
    *,
    seed: int,
    name: str,
    draws: int = DRAWS,
    level: float = 0.95,
) -> Interval | None:
    """The same bootstrap for Σ a·b / √(Σ‖a‖² Σ‖b‖²), the cosine of everything that queries have."""
    if a.shape[0] < 2:
        return None
    left, right = _as_table(a), _as_table(b)
    sums = np.stack([(left * right).sum(1), (left**2).sum(1), (right**2).sum(1)], axis=1)
    means = _resampled_layers(sums, generator(seed, name), draws)
    return _percentiles(
        ratio(means[:, 0], np.sqrt(means[:, 1] * means[:, 2])), _expanded_tail(level, a.shape[0]), level
    )


def paired_interval(
    after: Float[np.ndarray, " query *layer"],
    before: Float[np.ndarray, " query *layer"],
    *,
    seed: int,
    name: str = "paired",
    draws: int = DRAWS,
    level: float = 0.95,
) -> Interval | None:
    """Bootstrap interval of the mean difference after − before, query by query."""
    return query_interval(after - before, seed=seed, name=name, draws=draws, level=level)


def draw_interval(
    values: Sequence[float | None], limits: tuple[float, float] | None = None, *, level: float = 0.95
) -> Interval | None:
    """Student's interval of the mean over independent draws: mean ± t_{n−1} s/√n.

    Undefined values are left out; None with fewer than two. `limits` are the bounds of what the value can be
    (0 and 1 for an accuracy): the interval is cut there.
    """
    defined = np.array([value for value in values if value is not None and np.isfinite(value)], dtype=np.float64)
    if defined.size < 2:
        return None
    centre = float(defined.mean())
    half = student_quantile((1 + level) / 2, defined.size - 1) * float(defined.std(ddof=1)) / defined.size**0.5
    low, high = limits or (-np.inf, np.inf)
    return Interval(max(low, centre - half), min(high, centre + half), level, "Student over draws")


def draw_p(values: Float[np.ndarray, " draw"]) -> float | None:
    """Student's two-sided p that the mean over draws is 0; None with fewer than two draws, or where all are equal."""
    spread = float(values.std(ddof=1)) if values.size > 1 else 0.0
    return 2 * student_cdf(-abs(float(values.mean())) * values.size**0.5 / spread, values.size - 1) if spread else None


def above_zero_p(values: Float[np.ndarray, " draw"]) -> float:
    """One-sided p that the mean over independent draws is above 0: Student's t, from seven draws exact sign flips.

    Draws that are all equal and above 0 give the smallest p that so many draws can: 2⁻ⁿ.
    """
    n = values.size
    if _EXACT_FROM <= n <= _EXACT_TO:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float((signs @ values >= values.sum() - 1e-12 * np.abs(values).sum()).mean())
    return student_p(values)


def student_p(values: Float[np.ndarray, " unit"]) -> float:
    """One-sided p that the mean is above 0, by Student's t; where all values are equal 2⁻ⁿ above 0, ½ at 0, 1 below."""
    n, mean = values.size, float(values.mean())
    spread = float(values.std(ddof=1)) if n > 1 else 0.0
    if spread <= 1e-12 * abs(mean):
        return 0.5**n if mean > 0 else 0.5 if mean == 0 else 1.0
    return 1 - student_cdf(mean * n**0.5 / spread, n - 1)


_EXACT_FROM, _EXACT_TO = 7, 16


def same_queries_p(values: Sequence[float]) -> float | None:
    """One p from those of several runs of the *same* queries, which chance may favour in all of them alike.

    The mean of the normal scores of the p-values has a variance of at most 1 however they depend on one another; only
    where they are independent is it less, and this p too large. None without a p-value.
    """
    scores = [normal_quantile(min(max(p, 1e-15), 1 - 1e-15)) for p in values]
    return normal_cdf(float(np.mean(scores))) if scores else None


def found_at(alpha: float, power: float = 0.8) -> float:
    """How many standard deviations above its floor a value must be to be found at p < alpha with this probability."""
    return normal_quantile(1 - alpha) + normal_quantile(power)


def detectable_mean(values: Float[np.ndarray, " draw"], alpha: float, power: float = 0.8) -> float | None:
    """The mean that so many draws with this spread find at p < alpha with the given probability."""
    n = values.size
    if n < 2:
        return None
    reach = student_quantile(1 - alpha, n - 1) + student_quantile(power, n - 1)
    return reach * float(values.std(ddof=1)) / n**0.5


def detectable_beyond(draws: Sequence[float], alpha: float, power: float = 0.8) -> float | None:
    """How far above a control's mean a value must be for `another_draw_p` < alpha with the given probability.

    (t_{1−α} + t_{power}) s √(1 + 1/n) with n − 1 degrees of freedom; None with fewer than two draws.
    """
    n = len(draws)
    if n < 2:
        return None
    reach = student_quantile(1 - alpha, n - 1) + student_quantile(power, n - 1)
    return reach * float(np.std(draws, ddof=1)) * (1 + 1 / n) ** 0.5


def cosine_above_p(cosine: float, deviation: float) -> float:
    """One-sided p of a mean cosine whose chance values have the mean 0 and the given standard deviation.

    Chance values end at ±1, which the normal tail forgets where they are widely spread. Taken for the cosine r of a
    random direction in N = 1/deviation² dimensions, whose variance is 1/N, r √(N−1) / √(1−r²) is Student's t with N − 1
    degrees of freedom. In one dimension r is 1 or −1, each half of the time.
    """
    degrees = deviation**-2 - 1
    if not degrees > 0:
        return 0.5
    rest = max(1 - cosine**2, 1e-300)
    return student_cdf(-cosine * (degrees / rest) ** 0.5, degrees)


def another_draw_p(value: float, draws: Sequence[float]) -> float | None:
    """P that another similarity drawn like these reaches `value`; None with fewer than two.

    Student's predictive distribution on Fisher's scale, artanh: on their own scale it would put draws beyond 1, and
    few draws that differ widely would keep even a similarity of 1 from being told from them.
    """
    n = len(draws)
    if n < 2:
        return None
    reached, *known = np.arctanh(np.clip([value, *draws], -_NEARLY_1, _NEARLY_1))
    mean, spread = float(np.mean(known)), float(np.std(known, ddof=1))
    if spread <= 1e-12 * max(1.0, abs(mean)):
        return 0.0 if reached > mean else 1.0
    return 1 - student_cdf((float(reached) - mean) / (spread * (1 + 1 / n) ** 0.5), n - 1)


_NEARLY_1 = 1 - 1e-12


def wilson_interval(successes: int, n: int, level: float = 0.95) -> Interval | None:
    """Wilson's score interval of a proportion; None when n is 0.

    For Rec2FTP: given n_ft, n_both is binomial, and a bootstrap would collapse to a point at recalls of 0 and 1.
    """
    if n == 0:
        return None
    z, p = normal_quantile((1 + level) / 2), successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return Interval(max(0.0, centre - half), min(1.0, centre + half), level, "Wilson")


def p_text(p: float, style: str = ".2g") -> str:
    """A p-value as text. Below 1e-15 only rounding is left of the tail of a distribution, which may be 0.

    >>> p_text(0.0123), p_text(0.0)
    ('0.012', '< 1e-15')
    """
    return "< 1e-15" if p < 1e-15 else format(p, style)


def p_clause(p: float) -> str:
    """`p = 0.0123`, or `p < 1e-15`."""
    text = p_text(p, ".3g")
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def clopper_pearson_upper(successes: int, n: int, level: float = 0.95) -> float:
    """The upper end of Clopper and Pearson's exact interval of a proportion; 1 when nothing was tried."""
    return 1.0 if successes >= n else beta_quantile((1 + level) / 2, successes + 1, n - successes)


def hypergeometric_p(n_both: int, n_ft: int, n_icl: int, n_wrong: int) -> float | None:
    """One-sided P(X ≥ n_both): do ICL's fixes and FT's meet more often than if each fixed its own at random?

    Population: the n_wrong queries ZSL got wrong; successes: the n_icl of them that ICL has right; draws: the n_ft that
    FT has right. None when FT fixed nothing.
    """
    return None if n_ft == 0 else hypergeometric_tail(n_both, n_wrong, n_icl, n_ft)


def sign_flip_p(
    excess: Float[np.ndarray, " query *layer"], *, seed: int, name: str = "signs", draws: int = DRAWS
) -> float | None:
    """One-sided p that the mean excess (over queries, then layers) is above 0, by flipping whole queries' signs.

    Null: each query's excess is as likely to be −x as x. A query's layers flip together, so their dependence is kept.
    The observed data counts as one of the draws, hence p ≥ 1/(draws + 1). None when nothing is defined.
    """
    table = _as_table(excess)
    defined = ~np.isnan(table)
    counts = defined.sum(axis=0)
    if not counts.any():
        return None
    weights = np.where(counts > 0, 1.0 / np.maximum(counts, 1), 0.0)
    parts: np.ndarray = (np.where(defined, table, 0.0) * weights).sum(axis=1)
    observed, slack = float(parts.sum()), 1e-12 * float(np.abs(parts).sum())
    rng, reached = generator(seed, name), 0
    for size in _chunks(draws, parts.shape[0]):
        signs = rng.integers(0, 2, size=(size, parts.shape[0]), dtype=np.int8) * 2 - 1
        reached += int((signs @ parts >= observed - slack).sum())
    return (reached + 1) / (draws + 1)


def holm(p: Float[np.ndarray, " test"]) -> Float[np.ndarray, " test"]:
    """Holm's step-down adjusted p-values (family-wise error, any dependence); NaN entries are no tests."""
    return _step(p, lambda ranked: np.maximum.accumulate(ranked * np.arange(ranked.size, 0, -1)))


def benjamini_hochberg(p: Float[np.ndarray, " test"]) -> Float[np.ndarray, " test"]:
    """Benjamini and Hochberg's adjusted p-values (false discovery rate); NaN entries are no tests."""
    return _step(p, lambda q: np.minimum.accumulate((q * q.size / np.arange(1, q.size + 1))[::-1])[::-1])


def _step(
    p: Float[np.ndarray, " test"], adjust: Callable[[Float[np.ndarray, " k"]], Float[np.ndarray, " k"]]
) -> Float[np.ndarray, " test"]:
    """Apply a correction to the sorted, defined p-values and put the results back in place."""
    adjusted = np.full(p.shape, np.nan)
    tests = np.flatnonzero(~np.isnan(p))
    order = tests[np.argsort(p[tests], kind="stable")]
    adjusted[order] = np.minimum(1.0, adjust(p[order]))
    return adjusted
