"""Do ICL and FT attend to the same training tokens? Kendall's tau and top-k recall between two sets of scores."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dualview.io.errors import UserError
from dualview.metrics.controls import MetricControls
from dualview.metrics.cosine import layer_means, overall_mean
from dualview.metrics.summary import plain
from dualview.records import TokenScores


def kendall(
    x: Float[np.ndarray, "query layer item"], y: Float[np.ndarray, "query layer item"]
) -> Float[np.ndarray, "query layer"]:
    """Kendall's tau-b of each query and layer: 1 the same order, 0 unrelated, −1 reversed.

        τ_b = (concordant − discordant) / √((pairs − ties in x)(pairs − ties in y))

    NaN where either side is constant or not finite. Dai et al. (2212.10559) print tau-a and compute tau-b; without
    ties the two agree. O(n log n), all rows at once: about a third of the time of a call of scipy's for each row.
    """
    return Ranked.of(x, 1).tau(Ranked.of(y, 1))


def _tau_b(x: Int[np.ndarray, "row item"], y: Int[np.ndarray, "row item"]) -> Float[np.ndarray, " row"]:
    n = x.shape[1]
    both = np.sort(x.astype(np.int64) * n + y, axis=1)  # by x, and by y where x ties: a tie is no inversion
    ties_x, ties_y, ties_both = (_tied_pairs(np.sort(side, axis=1)) for side in (x, y, both))
    pairs = n * (n - 1) // 2
    discordant = _inversions((both % n).astype(np.int32))
    balance = pairs - ties_x - ties_y + ties_both - 2 * discordant
    scale = np.sqrt((pairs - ties_x).astype(np.float64) * (pairs - ties_y))
    return np.divide(balance, scale, out=np.full(len(x), np.nan), where=scale > 0)


def _dense_ranks(values: Float[np.ndarray, "row item"]) -> Int[np.ndarray, "row item"]:
    order = np.argsort(values, axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    steps = np.zeros(values.shape, dtype=np.int32)
    steps[:, 1:] = np.cumsum(ordered[:, 1:] != ordered[:, :-1], axis=1)
    ranks = np.empty_like(steps)
    np.put_along_axis(ranks, order, steps, axis=1)
    return ranks


def _tied_pairs(ordered: Int[np.ndarray, "row item"]) -> Int[np.ndarray, " row"]:
    """Pairs of equal items in each sorted row: every item ties with those of its run before it."""
    at = np.arange(ordered.shape[1])
    fresh = np.ones(ordered.shape, dtype=bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return (at - np.maximum.accumulate(np.where(fresh, at, 0), axis=1)).sum(axis=1)


def _inversions(rows: Int[np.ndarray, "row item"]) -> Int[np.ndarray, " row"]:
    """Pairs i < j with item i greater than item j, by merging halves.

    Sort two neighbouring sorted runs together, marking the left one's items: a left item's place among both, less its
    place in its own run, is the number of smaller items on the right.
    """
    count, n = rows.shape
    width = 1 << max(0, (n - 1).bit_length())
    padded = np.full((count, width), np.iinfo(np.int32).max >> 1, dtype=np.int32)  # larger than all: never inverted
    padded[:, :n] = rows
    total = np.zeros(count, dtype=np.int64)
    run = 1
    while run < width:
        keys = padded.reshape(count, width // (2 * run), 2, run) * 2 + np.array([0, 1], dtype=np.int32)[:, None]
        merged = np.sort(keys.reshape(count, width // (2 * run), 2 * run), axis=-1)
        place = ((merged & 1) == 0) @ np.arange(2 * run, dtype=np.int64)
        total += (place - run * (run - 1) // 2).sum(axis=1)
        padded = (merged >> 1).reshape(count, width)
        run *= 2
    return total


def demo_mass_of(
    scores: Float[np.ndarray, "query layer token"], demo_of_token: Int[np.ndarray, " token"], n_demos: int | None = None
) -> Float[np.ndarray, "query layer demo"]:
    """Token scores as attention to whole demonstrations: softmax over tokens, summed within each demonstration."""
    n_demos = int(demo_of_token.max()) + 1 if n_demos is None else n_demos
    values = scores.astype(np.float64)
    mass = np.exp(values - values.max(axis=-1, keepdims=True))
    mass /= mass.sum(axis=-1, keepdims=True)
    member = (demo_of_token[:, None] == np.arange(n_demos)).astype(np.float64)
    return mass @ member


def top_k_recall(
    x: Float[np.ndarray, "query layer item"], y: Float[np.ndarray, "query layer item"], k: int
) -> Float[np.ndarray, "query layer"]:
    """|top-k of x ∩ top-k of y| / k, ties to the lowest index. Two unrelated orders give k / items, not 0."""
    return (_top(x, k) & _top(y, k)).sum(axis=-1) / k


def _top(scores: Float[np.ndarray, "query layer item"], k: int) -> Bool[np.ndarray, "query layer item"]:
    items = scores.shape[-1]
    if not 0 < k <= items:
        raise UserError(f"top-k recall: k is {k}, but there are {items} items to rank.")
    chosen = np.argsort(-scores.astype(np.float64), axis=-1, kind="stable")[..., :k]
    member = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(member, chosen, True, axis=-1)
    return member


@dataclass(frozen=True)
class Ranked:
    """One rule's scores of some items, ranked once to be compared with many."""

    ranks: Int[np.ndarray, "query layer item"]
    usable: Bool[np.ndarray, "query layer"]
    top: Bool[np.ndarray, "query layer item"]

    @classmethod
    def of(cls, scores: Float[np.ndarray, "query layer item"], k: int) -> Ranked:
        rows = np.asarray(scores, dtype=np.float64).reshape(-1, scores.shape[-1])
        usable = np.asarray(np.isfinite(rows).all(axis=1))
        ranks = _dense_ranks(np.where(usable[:, None], rows, 0.0)).reshape(scores.shape)
        return cls(ranks, usable.reshape(scores.shape[:-1]), _top(scores, min(k, scores.shape[-1])))

    def tau(self, other: Ranked) -> Float[np.ndarray, "query layer"]:
        flat = (side.ranks.reshape(-1, side.ranks.shape[-1]) for side in (self, other))
        taus = _tau_b(*flat).reshape(self.usable.shape)
        return np.where(self.usable & other.usable, taus, np.nan)

    def recall(self, other: Ranked) -> Float[np.ndarray, "query layer"]:
        return (self.top & other.top).sum(axis=-1) / self.top[0, 0].sum()


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
            recall_token_chance=float(self.tokens.top[0, 0].mean()),
            recall_demo_chance=float(self.demos.top[0, 0].mean()),
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
    def of(cls, scores: TokenScores, threads: int = 1) -> Kendall:
        """Rank the recorded scores of every rule and compare each with ICL's."""
        ours = RankedTokens.of(scores.by_rule["icl"], scores.demo)
        others = {name: given for name, given in scores.by_rule.items() if name != "icl"}

        def agreement(given: Float[np.ndarray, "query layer token"]) -> RankAgreement:
            return ours.agreement(RankedTokens.of(given, scores.demo))

        with ThreadPoolExecutor(threads) as pool:  # nearly all the time is sorting, which releases the GIL
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
