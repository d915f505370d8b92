"""Do ICL and FT move the same queries the same way? Agreement of the changes in label log-odds.

Rec2FTP counts whole predictions, so it has no power where nearly all of them are right. Agreement looks at how far each
query's log-odds moved, and only at what sets a query apart within its class:

    Δ_s = c(log p_s) − c(log p_zsl),        c(x) = x − mean over candidates
    r_s = Δ_s − its least-squares fit on the gold class and on c(log p_zsl)
    agreement = Σ_q r_icl·r_ft / √(Σ_q ‖r_icl‖² · Σ_q ‖r_ft‖²)

The fit removes what two unrelated settings share: a shift towards one label, the class itself, and a shrinking or
stretching of the zero-shot log-odds. The test permutes FT's residuals among the queries of a class (Freedman and Lane
1983: residuals of the reduced model are what is exchangeable).

Queries that move far in both settings (long ones, those that zero-shot is unsure of) are not exchangeable with the
rest, and permutations then find agreement where there is none. A second test has only the queries' signs to go by:
whether r_icl·r_ft is above 0, each query keeping how far it moves. The verdict asks for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dualview.metrics.statistics import DRAWS, Interval, correlation_interval, found_at, generator, sign_flip_p

LEAST_ORDERS = 100
"""With fewer orders of the queries within classes, or signs of them, no such test can reach p = .01."""
_ALIKE = "moves all queries of a class alike"
_NO_SCORES = "only the answers are known, not the candidates' scores"
_SAME = 1e-9
_THIRDS = (1 / 3, 2 / 3)
_CHUNK = 4_000_000


@dataclass(frozen=True)
class Agreement:
    """The correlation, −1 to 1, with its interval over queries and its p-values; None with the `reason`."""

    value: float | None
    p: float | None = None
    below_p: float | None = None
    """By permutations: that it is not above, and not below 0."""
    signs_p: float | None = None
    signs_below_p: float | None = None
    """The same by the signs of the queries' products, which holds for queries that move unequally far."""
    interval: Interval | None = None
    detectable: float | None = None
    """The smallest agreement that a run of this size finds at p < .01 with a probability of 80 %; above 1, none."""
    reason: str | None = None

    @property
    def tests(self) -> dict[str, float]:
        """The p-values that it is not above 0, by test; empty where it is undefined."""
        return _known({"permuted": self.p, "signs": self.signs_p})

    @property
    def below(self) -> dict[str, float]:
        """The same that it is not below 0."""
        return _known({"permuted": self.below_p, "signs": self.signs_below_p})

    @property
    def nothing_left(self) -> bool:
        """Whether it is undefined because the fit explains all that a setting moves."""
        return self.reason is not None and self.reason.endswith(_ALIKE)

    def to_json(self) -> dict[str, object]:
        interval = None if self.interval is None else self.interval.to_json()
        return {**vars(self), "interval": interval}


def _known(tests: Mapping[str, float | None]) -> dict[str, float]:
    return {name: p for name, p in tests.items() if p is not None}


def agreement(
    gold: Int[np.ndarray, " query"],
    zsl: Float[np.ndarray, "query candidate"],
    icl: Float[np.ndarray, "query candidate"],
    ft: Float[np.ndarray, "query candidate"],
    *,
    length: Int[np.ndarray, " query"] | None = None,
    bends: bool = False,
    seed: int = 0,
    draws: int = DRAWS,
) -> Agreement:
    """Agreement of the settings' candidate scores (mean log-probabilities); see the module for its equation.

    length   the queries' numbers of tokens, for what agrees beyond them: the fit then has a slope in each class
    bends    for what agrees beyond any function of the zero-shot scores: the fit may bend, and differ by class
    """
    if any((np.isneginf(side).sum(axis=1) >= side.shape[1] - 1).all() for side in (zsl, icl, ft)):
        return Agreement(None, reason=_NO_SCORES)
    base = centred_log_odds(zsl)
    moved = [centred_log_odds(side) - base for side in (icl, ft)]
    own, extra = _classes(gold), list[np.ndarray]()
    if length is not None:
        extra.append(own * ((length - length.mean()) / max(float(length.std()), 1.0))[:, None])
    if bends and np.isfinite(base).all():
        extra += _bends(gold, own, base, zsl)
    return _agreement(gold, base, moved, "agreement", seed, draws, extra)


def label_agreement(
    gold: Int[np.ndarray, " query"],
    zsl: Float[np.ndarray, "query candidate"],
    icl: Float[np.ndarray, "query candidate"],
    icl_flipped: Float[np.ndarray, "query candidate"],
    ft: Float[np.ndarray, "query candidate"],
    ft_flipped: Float[np.ndarray, "query candidate"],
    *,
    seed: int = 0,
    draws: int = DRAWS,
) -> Agreement:
    """The same for what labels teach: Δ_s = c(log p_s) − c(log p_s[flipped]), the label contrast of the log-odds."""
    pairs = ((icl, icl_flipped), (ft, ft_flipped))
    moved = [centred_log_odds(true) - centred_log_odds(flipped) for true, flipped in pairs]
    return _agreement(gold, centred_log_odds(zsl), moved, "label agreement", seed, draws)


def _agreement(
    gold: Int[np.ndarray, " query"],
    base: Float[np.ndarray, "query candidate"],
    moved: Sequence[Float[np.ndarray, "query candidate"]],
    name: str,
    seed: int,
    draws: int,
    extra: Sequence[Float[np.ndarray, "query column"]] = (),
) -> Agreement:
    """Agreement of two changes of log-odds beyond the `extra` columns too; `name` names its random draws."""
    if not all(np.isfinite(side).all() for side in moved):
        return Agreement(None, reason="a score is not finite: fine-tuning diverged")
    own = _classes(gold)
    member, basis = own.argmax(axis=1), _column_basis(np.column_stack([own, base, *extra]))
    if gold.size < basis.shape[1] + 2:
        return Agreement(None, reason=f"{gold.size} queries are too few to tell them apart within classes")
    orders = sum(math.lgamma(int(size) + 1) for size in np.bincount(member))
    if min(orders, gold.size * math.log(2)) < math.log(LEAST_ORDERS):
        return Agreement(None, reason="too few queries of each class to permute")
    rest = [side - basis @ (basis.T @ side) for side in moved]
    for setting, side, whole in zip(("ICL", "FT"), rest, moved, strict=True):
        if np.linalg.norm(side) <= _SAME * max(np.linalg.norm(whole), np.linalg.norm(base)):
            return Agreement(None, reason=f"{setting} {_ALIKE}")
    ours, theirs = rest
    value = _correlation(ours, theirs)
    null = _permuted(ours, theirs, basis, member, generator(seed, name), draws)
    slack, products = 1e-12, (ours * theirs).sum(axis=1)
    spread = float(np.linalg.norm(products) / (np.linalg.norm(ours) * np.linalg.norm(theirs)))
    return Agreement(
        value=value,
        p=(1 + int((null >= value - slack).sum())) / (draws + 1),
        below_p=(1 + int((null <= value + slack).sum())) / (draws + 1),
        signs_p=sign_flip_p(products, seed=seed, name=f"signs/{name}", draws=draws),
        signs_below_p=sign_flip_p(-products, seed=seed, name=f"signs/{name}", draws=draws),
        interval=correlation_interval(ours, theirs, seed=seed, name=f"ci/{name}", draws=draws),
        detectable=found_at(0.01) * max(float(null.std()), spread),
    )


def _classes(gold: Int[np.ndarray, " query"]) -> Float[np.ndarray, "query class"]:
    """Which of the classes that occur each query is of: a 1 in its column."""
    classes, member = np.unique(gold, return_inverse=True)
    return np.eye(classes.size)[member]


def _bends(
    gold: Int[np.ndarray, " query"],
    own: Float[np.ndarray, "query class"],
    base: Float[np.ndarray, "query candidate"],
    scores: Float[np.ndarray, "query candidate"],
) -> list[Float[np.ndarray, "query column"]]:
    """Columns for a fit on the zero-shot scores that bends and differs by class, as many as the queries can carry.

    In this order: a slope by class of the gold label's log-odds, and of their excess over the class's lower and upper
    third; every candidate's score (a query may expect none of the labels, which log-odds do not say) and its excess
    over thirds; a slope by class of every candidate's log-odds; their signed squares.
    """
    odds = base[np.arange(gold.size), gold]
    knots = [[np.quantile(odds[own[:, c] > 0], at) for c in range(own.shape[1])] for at in _THIRDS]
    hinges = [own * np.maximum(odds - own @ np.array(at), 0.0)[:, None] for at in knots]
    slopes = [own * each[:, None] for each in base.T]
    groups = [own * odds[:, None], np.column_stack(hinges)]
    if np.isfinite(scores).all():
        bent = [np.maximum(scores - np.quantile(scores, at, axis=0), 0.0) for at in _THIRDS]
        groups += [scores - scores.mean(axis=0), np.column_stack(bent)]
    taken: list[np.ndarray] = []
    for columns in (*groups, np.column_stack(slopes), base * np.abs(base)):
        if _column_basis(np.column_stack([own, base, *taken, columns])).shape[1] <= gold.size / 4:
            taken.append(columns)
    return taken


def centred_log_odds(log_probs: Float[np.ndarray, "query candidate"]) -> Float[np.ndarray, "query candidate"]:
    """Each score less the mean over the query's candidates; 0 where a query has no such candidate (−∞)."""
    scores = log_probs.astype(np.float64)
    there = ~np.isneginf(scores)
    count = np.maximum(there.sum(axis=1, keepdims=True), 1)
    mean = np.where(there, scores, 0.0).sum(axis=1, keepdims=True) / count
    return np.where(there, scores - mean, 0.0)


def _column_basis(columns: Float[np.ndarray, "query column"]) -> Float[np.ndarray, "query rank"]:
    """Orthonormal columns that span the given ones."""
    left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return left[:, sizes > 1e-10 * sizes[0]]


def _correlation(a: Float[np.ndarray, "query candidate"], b: Float[np.ndarray, "query candidate"]) -> float:
    return float(np.clip(np.vdot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)), -1.0, 1.0))


def _permuted(
    ours: Float[np.ndarray, "query candidate"],
    theirs: Float[np.ndarray, "query candidate"],
    basis: Float[np.ndarray, "query rank"],
    member: Int[np.ndarray, " query"],
    rng: np.random.Generator,
    draws: int,
) -> Float[np.ndarray, " draw"]:
    """The correlation with FT's residuals permuted within classes, and freed again of what the fit explains."""
    size = ours.size
    found: list[np.ndarray] = []
    for start in range(0, draws, step := max(1, _CHUNK // size)):
        count = min(step, draws - start)
        order = np.empty((count, member.size), dtype=np.int64)
        for label in range(int(member.max()) + 1):
            own = np.flatnonzero(member == label)
            order[:, own] = rng.permuted(np.broadcast_to(own, (count, own.size)), axis=1)
        shuffled = theirs[order.T]  # queries first: then what the fit explains of all draws is one matrix product
        product = np.einsum("qc,qdc->d", ours, shuffled)
        explained = (basis.T @ shuffled.reshape(member.size, -1)).reshape(-1, count, theirs.shape[1])
        left = np.sqrt(np.maximum((theirs**2).sum() - (explained**2).sum(axis=(0, 2)), 1e-300))
        found.append(product / (np.linalg.norm(ours) * left))
    return np.clip(np.concatenate(found), -1.0, 1.0)
