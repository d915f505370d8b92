"""Token overlap: do ICL and FT agree on the most probable next tokens (Shen et al., arXiv 2310.08540)?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dualview.io.errors import UserError
from dualview.metrics.cosine import ratio
from dualview.metrics.floors.controls import MetricControls
from dualview.records import Records, Setting

COMPARED = ("zsl", "ft", "patch", "icl_reordered")
"""The settings that are compared with ICL, where they were asked."""


@dataclass(frozen=True)
class TopK:
    """The k likeliest next tokens of each query, likeliest first."""

    ids: Int[np.ndarray, "query k"]
    probs: Float[np.ndarray, "query k"]


def top_k(distribution: Float[np.ndarray, "query vocab"], k: int = 10) -> TopK:
    """The k likeliest tokens, ties to the lowest id."""
    if not 0 < k <= distribution.shape[1]:
        raise UserError(f"top-k: k is {k}, but the vocabulary has {distribution.shape[1]} tokens.")
    ids = np.argsort(-distribution.astype(np.float64), axis=1, kind="stable")[:, :k]
    return TopK(ids.astype(np.int64), np.take_along_axis(distribution, ids, axis=1).astype(np.float64))


def token_overlap(a: TopK, b: TopK) -> Float[np.ndarray, " query"]:
    """|top-k ∩ top-k| / k (Shen et al.): 1 the same tokens, 0 none in common. Order and probabilities do not count."""
    return (a.ids[:, :, None] == b.ids[:, None, :]).any(axis=2).mean(axis=1, dtype=np.float64)


def overlap_cosine(a: TopK, b: TopK) -> Float[np.ndarray, " query"]:
    """Overlap cosine similarity (Shen et al.): Σ_O p_a p_b / √(Σ_O p_a² · Σ_O p_b² · (k − |O|)), O the shared tokens.

    0 when no token is shared. NaN (null) when all are: the published denominator is then 0. It is a cosine divided by
    √(k − |O|), so its largest value depends on the overlap itself: read it together with `token_overlap`.
    """
    same = (a.ids[:, :, None] == b.ids[:, None, :]).astype(np.float64)
    shared_a, shared_b = same.any(axis=2), same.any(axis=1)
    product = np.einsum("qi,qij,qj->q", a.probs, same, b.probs)
    squares = (np.where(shared_a, a.probs, 0.0) ** 2).sum(axis=1) * (np.where(shared_b, b.probs, 0.0) ** 2).sum(axis=1)
    shared, k = shared_a.sum(axis=1), a.ids.shape[1]
    values = ratio(product, np.sqrt(squares * (k - shared)))
    return np.where(shared == 0, 0.0, values)


def overlap_report(records: Records) -> dict[str, dict[str, float | int | None]]:
    """The result file's `overlap`: ICL's top tokens compared with those of each other setting."""
    tops = {name: _top(records.settings.get(name)) for name in dict.fromkeys(("icl", *COMPARED, *records.learners))}
    icl = tops.pop("icl")
    return {name: _pair(icl, top) for name, top in tops.items() if icl is not None and top is not None}


def overlap_controls(records: Records) -> dict[str, MetricControls]:
    """ICL's overlap with FT, between its overlap with zero-shot (floor) and with ICL reordered (ceiling)."""
    icl, zsl, ft = (_top(records[name]) for name in ("icl", "zsl", "ft"))
    if icl is None or ft is None or zsl is None:
        return {}
    reordered = _top(records.settings.get("icl_reordered"))
    ceiling = None if reordered is None else float(token_overlap(icl, reordered).mean())
    values, floors = token_overlap(icl, ft), {"zsl": token_overlap(icl, zsl)}
    return {"token_overlap": MetricControls.over_queries("token_overlap", values, floors, {"icl_reordered": ceiling})}


def _top(setting: Setting | None) -> TopK | None:
    if setting is None or setting.top_ids is None or setting.top_probs is None:
        return None
    return TopK(setting.top_ids, setting.top_probs)


def _pair(a: TopK, b: TopK) -> dict[str, float | int | None]:
    cosines = overlap_cosine(a, b)
    defined = cosines[np.isfinite(cosines)]
    return {
        "token_overlap": float(token_overlap(a, b).mean()),
        "overlap_cosine": float(defined.mean()) if len(defined) else None,
        "total_overlaps": int((~np.isfinite(cosines)).sum()),
    }
