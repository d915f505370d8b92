"""Do ICL and FT attend to the same training tokens? Kendall's tau and top-k recall between two sets of scores."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dualview.io.errors import UserError
from dualview.metrics.arrays import (
    NUMPY,
    Backend,
    as_type,
    library,
    ordered,
    ordering,
    placed,
    put_like,
    running_maximum,
    to_numpy,
)
from dualview.metrics.cosine import layer_means, overall_mean, ratio
from dualview.metrics.floors.controls import MetricControls
from dualview.metrics.summary import plain
from dualview.records import TokenScores


def kendall(
    x: Float[np.ndarray, "query layer item"], y: Float[np.ndarray, "query layer item"]
) -> Float[np.ndarray, "query layer"]:
    """Kendall's tau-b of each query and layer: 1 the same order, 0 unrelated, −1 reversed.

        τ_b = (concordant − discordant) / √((pairs − ties in x)(pairs − ties in y))

    NaN where either side is constant or not finite. Dai et al. (2212.10559) print tau-a and compute tau-b; without
    ties the two agree. O(n log n), all rows at once: about a tenth of the time of a call of scipy's for each row.
    """
    return Ranked.of(x, 1).tau(Ranked.of(y, 1))


def _tied_pairs(fresh: Bool[np.ndarray, "row later"]) -> Int[np.ndarray, " row"]:
    """Pairs of equal items in each sorted row, given which items after the first differ from the one before."""
    xp = library(fresh)
    if bool(fresh.all()):
        return fresh[:, :0].sum(-1)
    at = put_like(np.arange(1, fresh.shape[1] + 1), fresh)
    return (at - running_maximum(xp.where(fresh, at, 0))).sum(-1)  # each ties with those of its run before it


def _inversions(rows: Int[np.ndarray, "row item"]) -> Int[np.ndarray, " row"]:
    """Pairs i < j with item i greater than item j: within runs by comparing each pair, between runs by merging halves.

    Sort two neighbouring runs together, marking the left one's items: the sum of the left items' places among both,
    less that of their places in their own run, is the number of pairs with the smaller item on the right.
    """
    xp, (count, n) = library(rows), rows.shape
    run = min(n, _DIRECT)
    rows = _padded(rows, run)
    columns = as_type(rows.reshape(-1, run).T, "int16" if n < 1 << 15 else "int32")
    within = xp.zeros_like(columns[0], dtype=xp.int64)
    for j in range(1, run):
        within += (columns[:j] > columns[j]).view(xp.int8).sum(0, dtype=xp.int8)  # fewer than _DIRECT: no overflow
    total = within.reshape(count, rows.shape[1] // run).sum(-1)
    while run < rows.shape[1]:
        rows = _padded(rows, 2 * run)
        halves = count, rows.shape[1] // (2 * run), 2, run
        keys = rows.reshape(halves) * 2
        keys[:, :, 1] += 1
        merged = ordered(keys.reshape(*halves[:2], 2 * run))
        left = (1 - (merged & 1)) * put_like(np.arange(2 * run, dtype=np.int32), merged)
        total += left.reshape(rows.shape).sum(-1) - halves[1] * (run * (run - 1) // 2)
        rows, run = (merged >> 1).reshape(rows.shape), 2 * run
    return total


_DIRECT = 64


def _padded(rows: Int[np.ndarray, "row item"], run: int) -> Int[np.ndarray, "row padded"]:
    """Rows of whole runs, filled up with a number larger than all ranks, which is never inverted."""
    (count, n), xp = rows.shape, library(rows)
    if n % run == 0:
        return rows
    large = xp.full_like(rows[:, :1], (1 << 15) - 1 if n < 1 << 15 else 1 << 29)
    return xp.concatenate([rows, xp.broadcast_to(large, (count, run - n % run))], 1)


def demo_mass_of(
    scores: Float[np.ndarray, "query layer token"], demo_of_token: Int[np.ndarray, " token"], n_demos: int | None = None
) -> Float[np.ndarray, "query layer demo"]:
    """Token scores as attention to whole demonstrations: softmax over tokens, summed within each demonstration."""
    n_demos = int(demo_of_token.max()) + 1 if n_demos is None else n_demos
    xp, values = library(scores), as_type(scores, "float64")
    mass = xp.exp(values - xp.amax(values, axis=-1, keepdims=True))
    mass /= mass.sum(axis=-1, keepdims=True)
    member = (demo_of_token[:, None] == np.arange(n_demos)).astype(np.float64)
    return mass @ put_like(member, mass)


def top_k_recall(
    x: Float[np.ndarray, "query layer item"], y: Float[np.ndarray, "query layer item"], k: int
) -> Float[np.ndarray, "query layer"]:
    """|top-k of x ∩ top-k of y| / k, ties to the lowest index. Two unrelated orders give k / items, not 0."""
    return Ranked.of(x, k).recall(Ranked.of(y, k))


@dataclass(frozen=True)
class Ranked:
    """One rule's scores of some items, ranked once to be compared with many."""

    ranks: Int[np.ndarray, "row item"]
    """0 the highest score; equal scores have equal ranks."""
    ties: Int[np.ndarray, " row"]
    """Pairs of equal scores."""
    usable: Bool[np.ndarray, " row"]
    top: Bool[np.ndarray, "row item"]
    k: int
    shape: tuple[int, ...]
    """Queries and layers, which make the rows."""

    @classmethod
    def of(cls, scores: Float[np.ndarray, "query layer item"], k: int) -> Ranked:
        xp, (*shape, items) = library(scores), scores.shape
        if not 0 < k <= items:
            raise UserError(f"top-k recall: k is {k}, but there are {items} items to rank.")
        rows = as_type(scores.reshape(-1, items), "float64")
        sunk, order = ordering(xp.where(xp.isnan(rows), float("inf"), -rows))
        fresh = sunk[:, 1:] != sunk[:, :-1]
        steps = xp.zeros_like(rows, dtype=xp.int32)
        steps[:, 1:] = xp.cumsum(fresh, -1)
        ranks, last = placed(steps, order), steps[:, k - 1 : k]
        above, equal = ranks < last, ranks == last
        top = above | (equal & (xp.cumsum(equal, -1) <= k - above.sum(-1)[:, None]))  # ties to the lowest index
        return cls(ranks, _tied_pairs(fresh), xp.isfinite(rows).all(-1), top, k, tuple(shape))

    def tau(self, other: Ranked) -> Float[np.ndarray, "query layer"]:
        """τ_b of each query and layer; NaN where one side is constant or not finite."""
        n, xp = int(self.ranks.shape[1]), library(self.ranks)
        wide = self.ranks if n * n < 1 << 31 else as_type(self.ranks, "int64")
        both = ordered(wide * n + other.ranks)  # by x, and by y where x ties: a tie is no inversion
        ties_both = _tied_pairs(both[:, 1:] != both[:, :-1])
        pairs, discordant = n * (n - 1) // 2, _inversions(as_type(both % n, "int32"))
        balance = pairs - self.ties - other.ties + ties_both - 2 * discordant
        scale = xp.sqrt(as_type(pairs - self.ties, "float64") * (pairs - other.ties))
        taus = xp.where(self.usable & other.usable, ratio(balance, scale), float("nan"))
        return to_numpy(taus).reshape(self.shape)

    def recall(self, other: Ranked) -> Float[np.ndarray, "query layer"]:
        return to_numpy((self.top & other.top).sum(-1)).reshape(self.shape) / self.k


@dataclass(frozen=True)
class RankAgreement:
    """ICL's attention to training tokens against one rule's, per query and layer."""

    tau_token: Float[np.ndarray, "query layer"]
    tau_demo: Float[np.ndarray, "query layer"]
    recall_token: Float[np.ndarray, "query layer"]
    recall_demo: Float[np.ndarray, "query layer"]
    recall_token_chance: float
    recall_demo_chance: float

    def to_json(self) -> dict[str, float | list[float | None] | None]:
        """Means over queries, then layers, and tau of every layer; null where nothing is defined."""
        result: dict[str, float | list[float | None] | None] = {
            "recall_token_chance": self.recall_token_chance,
            "recall_demo_chance": self.recall_demo_chance,
        }
        for name in ("tau_token", "tau_demo", "recall_token", "recall_demo"):
            result[name] = plain(overall_mean(getattr(self, name)))
        result["tau_token_per_layer"] = [plain(tau) for tau in layer_means(self.tau_token)]
        return result


@dataclass(frozen=True)
class RankedTokens:
    """One rule's scores of the training tokens, ranked by token and by demonstration.

    `demo_of_token[t]` is the demonstration that token t belongs to; drop BOS and separators beforehand. The k of the
    recalls are the released program's (100 tokens, 5 demonstrations), at most half of what there is, for the top k of
    k is everything; chance is k / n.
    """

    tokens: Ranked
    demos: Ranked

    @classmethod
    def of(
        cls,
        scores: Float[np.ndarray, "query layer token"],
        demo_of_token: Int[np.ndarray, " token"],
        *,
        top_tokens: int = 100,
        top_demos: int = 5,
    ) -> RankedTokens:
        by_demo = demo_mass_of(scores, demo_of_token)
        halves = (max(1, min(k, s.shape[-1] // 2)) for k, s in ((top_tokens, scores), (top_demos, by_demo)))
        return cls(Ranked.of(scores, next(halves)), Ranked.of(by_demo, next(halves)))

    def agreement(self, other: RankedTokens) -> RankAgreement:
        """Kendall's tau and top-k recall between two rules.

        Caveat: W_Q is never trained, so the released q·q form hardly depends on fine-tuning: compare it with its
        control at a learning rate of 0.
        """
        return RankAgreement(
            tau_token=self.tokens.tau(other.tokens),
            tau_demo=self.demos.tau(other.demos),
            recall_token=self.tokens.recall(other.tokens),
            recall_demo=self.demos.recall(other.demos),
            recall_token_chance=self.tokens.k / int(self.tokens.top.shape[1]),
            recall_demo_chance=self.demos.k / int(self.demos.top.shape[1]),
        )


def rank_agreement(
    icl: Float[np.ndarray, "query layer token"],
    ft: Float[np.ndarray, "query layer token"],
    demo_of_token: Int[np.ndarray, " token"],
    *,
    top_tokens: int = 100,
    top_demos: int = 5,
) -> RankAgreement:
    """`RankedTokens.agreement` of two rules' scores of the training tokens."""
    ours, theirs = (
        RankedTokens.of(scores, demo_of_token, top_tokens=top_tokens, top_demos=top_demos) for scores in (icl, ft)
    )
    return ours.agreement(theirs)


@dataclass(frozen=True)
class Kendall:
    """Agreement of ICL with each form of fine-tuning's attention, by name; `…_lr0` are the controls."""

    forms: Mapping[str, RankAgreement]
    ceiling: RankAgreement | None
    """ICL's own attention to the same tokens, with the demonstrations in another order."""
    tokens: int
    queries: int

    @classmethod
    def of(cls, scores: TokenScores, threads: int = 1, backend: Backend = NUMPY) -> Kendall:
        """Rank the recorded scores of every rule and compare each with ICL's."""
        ours = RankedTokens.of(backend.put(scores.by_rule["icl"]), scores.demo)
        others = {name: given for name, given in scores.by_rule.items() if name != "icl"}

        def agreement(given: Float[np.ndarray, "query layer token"]) -> RankAgreement:
            return ours.agreement(RankedTokens.of(backend.put(given), scores.demo))

        with ThreadPoolExecutor(backend.threads(threads)) as pool:  # sorting releases the GIL
            forms = dict(zip(others, pool.map(agreement, others.values()), strict=True))
        return cls(forms, forms.pop("icl_reordered", None), len(scores.demo), len(scores.by_rule["icl"]))

    def controls(self) -> dict[str, MetricControls]:
        """Each form's tau by token, between its control at a learning rate of 0 and ICL with itself."""
        ceiling = None if self.ceiling is None else plain(overall_mean(self.ceiling.tau_token))
        return {
            f"kendall_{name}": MetricControls.over_queries(
                f"kendall_{name}",
                agreement.tau_token,
                {"lr0": self.forms[f"{name}_lr0"].tau_token},
                {"icl_reordered": ceiling},
            )
            for name, agreement in self.forms.items()
            if f"{name}_lr0" in self.forms
        }

    def to_json(self) -> dict[str, object]:
        return {
            "value": None if "dual_v" not in self.forms else self.forms["dual_v"].to_json()["tau_token"],
            **{name: agreement.to_json() for name, agreement in self.forms.items()},
            **({} if self.ceiling is None else {"icl_reordered": self.ceiling.to_json()}),
            "tokens": self.tokens,
            "queries": self.queries,
        }
