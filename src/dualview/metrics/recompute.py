"""`dualview metrics`: every number of a run again, from its records, without a model."""

from __future__ import annotations

from typing import Any

from dualview.io.json_files import Place, check_place, save_json
from dualview.metrics.measured import Measured
from dualview.metrics.summary import compute_metrics
from dualview.metrics.verdict import judge
from dualview.records import as_records


def recompute(records: object, *, json: Place = None) -> Measured:
    """Every metric from records, with controls and the verdict where the records hold control settings.

    records   a records.safetensors file, `Records`, a result with its records in memory, or a mapping of arrays
    json      a file for the numbers, or "-" for standard output
    """
    check_place(json)
    kept = as_records(records)
    found: dict[str, Any] = compute_metrics(kept).to_json()
    if kept.controls:
        verdict = judge(kept)
        found |= {"controls": verdict.controls_json(), "verdict": verdict.to_json()}
    measured = Measured.model_validate(found)
    save_json(json, measured.to_json())
    return measured
