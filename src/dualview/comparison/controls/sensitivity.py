"""Order sensitivity and the norm curve: does the order of the demonstrations matter, and does the step size?

Both use the first queries only: they compare settings with one another, and cost many passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from dualview.comparison.controls.settings import PERMUTATIONS, reordered
from dualview.comparison.prepare import Prepared
from dualview.learning.recipe import Tuned
from dualview.learning.selection import ask_each
from dualview.metrics.predictions import order_sensitivity
from dualview.metrics.summary import compute_metrics
from dualview.models.scoring import Asked, ask
from dualview.records import Records, Setting
from dualview.records.setting import to_host

QUERIES = 64


def order_report(prepared: Prepared, tuned: Mapping[str, Tuned], passes: Mapping[str, Asked]) -> dict[str, Any]:
    """How much ICL's, and fine-tuning's, answers vary over orders of the same demonstrations (Shen et al. 2024).

    The first order is the prompt's own, whose `passes` there are; `tuned` has the others by name, as
    `control_trainings` calls them.
    """
    lm, queries = prepared.lm, prepared.prompts.queries[:QUERIES]
    if prepared.prompts.shots_used < 2:
        return {"permutations": 0, "queries": len(queries), "icl": None, "ft": None}
    widest = max(len(query.candidates) for query in queries)
    icl, ft = ([passes[name].settings[0].log_probs[: len(queries), :widest]] for name in ("icl", "ft"))
    orders = [f"order {i}" for i in range(1, PERMUTATIONS)]
    for name in orders:
        context = replace(prepared.in_context, prefix=reordered(prepared.prompts, name).prefix, record=False)
        icl.append(ask(lm, queries, context).settings[0].log_probs)
    bare = replace(prepared.zero_shot, record=False)
    trained = [tuned[name] for name in orders if name in tuned]  # distillation is not trained in other orders
    ft += [setting.log_probs for setting in ask_each(lm, queries, bare, trained)] if trained else []
    return {
        "permutations": PERMUTATIONS,
        "queries": len(queries),
        "icl": float(np.nanmean(order_sensitivity(np.stack(icl)))),
        "ft": float(np.nanmean(order_sensitivity(np.stack(ft)))) if trained else None,
    }


def norm_curve(
    prepared: Prepared, grids: Mapping[str, Sequence[Tuned]], zsl: Asked, icl: Asked
) -> list[dict[str, Any]]:
    """Every similarity against the size of fine-tuning's update: rules (each with its grid) compare at equal size only.

    Sizes and similarities are of the first queries, as is the accuracy.
    """
    queries = prepared.prompts.queries[:QUERIES]
    gold = np.array([query.gold for query in queries])
    columns = zsl.columns[: len(queries)]
    widest = max(len(query.candidates) for query in queries)
    base = {"zsl": _first(zsl, columns, widest), "icl": _first(icl, columns, widest)}
    points: list[dict[str, Any]] = []
    asked = [
        (rule, tuned, setting)
        for rule, grid in grids.items()
        for tuned, setting in zip(grid, ask_each(prepared.lm, queries, prepared.zero_shot, grid), strict=True)
    ]
    for rule, tuned, ft in asked:
        found: Any = compute_metrics(Records(gold, {**base, "ft": ft}, columns)).to_json()
        points.append(
            {
                "rule": rule,
                "lr": tuned.lr,
                "status": tuned.status,
                "accuracy": found["accuracy"]["ft"],
                "update_norm": found["update_norm"]["ft"],
                "sim_aou_raw": found["sim_aou"]["raw"],
                "sim_aou_normalised": found["sim_aou"]["normalised"],
                "sim_am_after": found["sim_am"]["after"],
                "sim_am_delta": found["sim_am"]["delta"],
                "queries": len(queries),
            }
        )
    return points


def _first(asked: Asked, columns: Int[np.ndarray, " query"], candidates: int) -> Setting:
    """A pass as if only the first queries had been asked: its arrays are no wider than these need."""
    whole, n = asked.settings[0], len(columns)
    return Setting(
        whole.log_probs[:n, :candidates],
        None if whole.h is None else to_host(whole.h[:n]),
        None if whole.m is None else to_host(whole.m[:n, ..., : int(columns.max())]),
        None if whole.demo_mass is None else whole.demo_mass[:n],
    )
