"""What each setting predicts, and how many of fine-tuning's corrections ICL repeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dualview.io.errors import UserError
from dualview.metrics.cosine import ratio
from dualview.metrics.statistics import hypergeometric_p


def predictions(log_probs: Float[np.ndarray, "query candidate"]) -> Int[np.ndarray, " query"]:
    """The candidate with the highest score, ties to the lowest index; −1 (never right) where all are NaN."""
    unusable = np.isnan(log_probs)
    best = np.argmax(np.where(unusable, -np.inf, log_probs), axis=1)
    return np.where(unusable.all(axis=1), -1, best).astype(np.int64)


def correct(
    log_probs: Float[np.ndarray, "query candidate"], gold: Int[np.ndarray, " query"]
) -> Bool[np.ndarray, " query"]:
    return predictions(log_probs) == gold


def accuracy(log_probs: Float[np.ndarray, "query candidate"], gold: Int[np.ndarray, " query"]) -> float:
    return float(correct(log_probs, gold).mean())


@dataclass(frozen=True)
class Rec2FTP:
    """Recall to fine-tuning predictions (Dai et al. 2212.10559, section 4.3), with what is needed to read it.

    value = n_both / n_ft: of the queries that ZSL has wrong and FT right, the fraction ICL has right too. 1: ICL fixes
    all that FT fixes; `chance`: what an ICL of the same accuracy on ZSL's errors reaches if its fixes had nothing to do
    with FT's (about .7 in the paper's own runs, not 0). `p`: one-sided hypergeometric. `reverse`: of what ICL fixed,
    the fraction FT fixed too. None where there is nothing to divide by, with the `reason`.
    """

    value: float | None
    n_ft: int
    n_both: int
    n_icl: int
    n_wrong: int
    chance: float | None
    p: float | None
    reverse: float | None
    reason: str | None

    def to_json(self) -> dict[str, float | int | str | None]:
        return dict(vars(self))


def rec2ftp(
    gold: Int[np.ndarray, " query"],
    zsl: Float[np.ndarray, "query candidate"],
    icl: Float[np.ndarray, "query candidate"],
    ft: Float[np.ndarray, "query candidate"],
) -> Rec2FTP:
    """Rec2FTP from the three settings' candidate scores."""
    wrong = ~correct(zsl, gold)
    by_icl, by_ft = wrong & correct(icl, gold), wrong & correct(ft, gold)
    n_wrong, n_icl, n_ft = int(wrong.sum()), int(by_icl.sum()), int(by_ft.sum())
    n_both = int((by_icl & by_ft).sum())
    reason = None
    if n_ft == 0:
        reason = "ZSL is right on every query" if n_wrong == 0 else "FT fixes none of ZSL's errors"
    return Rec2FTP(
        value=n_both / n_ft if n_ft else None,
        n_ft=n_ft,
        n_both=n_both,
        n_icl=n_icl,
        n_wrong=n_wrong,
        chance=n_icl / n_wrong if n_wrong else None,
        p=hypergeometric_p(n_both, n_ft, n_icl, n_wrong),
        reverse=n_both / n_icl if n_icl else None,
        reason=reason,
    )


def prediction_warnings(log_probs: Mapping[str, Float[np.ndarray, "query candidate"]]) -> list[str]:
    """Settings whose predictions cannot be trusted: one label for every query, or scores that are not numbers."""
    warnings: list[str] = []
    for name, scores in log_probs.items():
        unusable = int(np.isnan(scores).any(axis=1).sum())
        if unusable:
            warnings.append(f"{name} has scores that are not numbers for {unusable} of {scores.shape[0]} queries.")
        predicted = predictions(scores)
        if predicted.size > 1 and predicted[0] >= 0 and bool((predicted == predicted[0]).all()):
            warnings.append(f"{name} predicts label {int(predicted[0])} for all {predicted.size} queries.")
    return warnings


def candidate_distribution(log_probs: Float[np.ndarray, "*batch candidate"]) -> Float[np.ndarray, "*batch candidate"]:
    """The scores as probabilities over the candidates (softmax); 0 for a candidate a query does not have."""
    scores = log_probs.astype(np.float64)
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def order_sensitivity(log_probs: Float[np.ndarray, "permutation query candidate"]) -> Float[np.ndarray, " query"]:
    """How much the order of the demonstrations matters (Shen et al. 2310.08540, section 4).

    The standard deviation over permutations of each candidate's probability, averaged over a query's candidates:
    0, the order does not matter; at most ½. The deviation divides by the number of permutations run, so few
    permutations understate it: compare only equal numbers of them.
    """
    if log_probs.shape[0] < 2:
        raise UserError("order sensitivity needs at least two permutations of the demonstrations.")
    spread: np.ndarray = candidate_distribution(log_probs).std(axis=0)
    exists = np.isfinite(log_probs).any(axis=0)
    return ratio(np.where(exists, spread, 0.0).sum(axis=-1), exists.sum(axis=-1).astype(np.float64))
