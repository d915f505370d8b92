"""From records to the result: the last step of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dualview.comparison.finetuning import FineTuning
from dualview.comparison.prepare import Prepared
from dualview.comparison.provenance import finished
from dualview.comparison.result import SCHEMA, Result
from dualview.io.clock import Clock
from dualview.learning.selection import status_of
from dualview.metrics.summary import plain
from dualview.records import Records, Setting
from dualview.tasks.prompts import Query


def assemble(
    prepared: Prepared,
    learnt: FineTuning,
    records: Records,
    found: dict[str, Any],
    known: dict[str, Any],
    clock: Clock,
    *,
    selection_rows: int,
) -> Result:
    """The result of one comparison: everything measured (`found`) and its provenance (`known`)."""
    prompts = prepared.prompts
    ft = _ft_part(prepared, learnt, records["ft"])
    warnings = [*_run_warnings(prepared, ft), *found["warnings"]]
    return Result.model_validate(
        {
            "schema": SCHEMA,
            "provenance": finished(known, prepared.lm, clock),
            "task": {
                "name": prepared.task.name,
                "shots": prompts.shots,
                "shots_used": prompts.shots_used,
                "n_queries": len(prompts.queries),
                "labels": list(prepared.task.labels),
            },
            **found,
            "ft": ft,
            "selection": {
                "rows": selection_rows,
                "lr": [vars(trial) for trial in learnt.trials],
                "seed": [vars(trial) for trial in prepared.seed_trials],
            },
            "warnings": warnings,
            "queries": _queries(records, prompts.queries),
        }
    )


def _ft_part(prepared: Prepared, learnt: FineTuning, setting: Setting) -> dict[str, Any]:
    options, tuned = prepared.options, learnt.tuned
    chosen = next((trial for trial in learnt.trials if trial.value == tuned.lr), None)
    # JSON has no NaN: the loss of a diverged training is null.
    final = tuned.losses[-1]
    return {
        "rule": options.ft_rule,
        "lr": tuned.lr,
        "loss": options.ft_loss,
        "params": options.ft_params,
        "epochs": options.epochs,
        "steps": len(tuned.losses),
        "final_loss": final if np.isfinite(final) else None,
        "losses": [loss if np.isfinite(loss) else None for loss in tuned.losses],
        "status": chosen.status if chosen is not None else status_of(tuned, setting.log_probs),
    }


def _run_warnings(prepared: Prepared, ft: dict[str, Any]) -> list[str]:
    warnings: list[str] = []
    prompts, lm = prepared.prompts, prepared.lm
    if prompts.shots_used < prompts.shots:
        warnings.append(
            f"truncation: {prompts.shots_used} of {prompts.shots} demonstrations fit the context; "
            "in-context learning and fine-tuning both use those."
        )
    if ft["status"] != "ok":
        warnings.append(f"fine-tuning {ft['status']} at learning rate {ft['lr']:g}.")
    if lm.fast and not lm.shares_prefix(len(prompts.prefix), max(query.longest for query in prompts.queries)):
        warnings.append("slow path: rotary positions are scaled by length here; every in-context prompt was run whole.")
    if lm.whole_because is not None:
        warnings.append(f"slow path: {lm.whole_because}; every prompt was run whole.")
    return warnings


def _queries(records: Records, queries: Sequence[Query]) -> list[dict[str, Any]]:
    return [
        {
            "gold": query.gold,
            **{
                name: [plain(score) for score in setting.log_probs[i, : len(query.candidates)]]
                for name, setting in records.settings.items()
            },
        }
        for i, query in enumerate(queries)
    ]
