"""How similarly in-context learning and fine-tuning change one query, layer by layer, between floor and ceiling.

One query has no interval and no other query to shuffle with: those floors and the verdict need many queries, as in
`dualview run`. Here are the floors that the query's own records and the two quick controls give.
"""

from __future__ import annotations

from typing import Any

from dualview.metrics.controls import ROLES, SIMILARITIES, ControlOptions, similarity_controls
from dualview.metrics.nulls import record_floors
from dualview.metrics.summary import compute_metrics
from dualview.records import MAIN_SETTINGS, Records

SHOWN = ("sim_aou", "sim_am", "sim_aou_normalised")


def similarity_json(records: Records) -> dict[str, Any]:
    """The result file's similarities, and for each its floors and ceiling by layer."""
    measured = compute_metrics(records).to_json()
    return {
        **{key: measured[key] for key in ("sim_aou", "sim_am", "update_norm", "demo_mass")},
        "bounds": {name: bounds_json(records, name) for name in SHOWN},
        "meaning": {name: ROLES[name].meaning for name in records.controls if name in ROLES},
    }


def bounds_json(records: Records, name: str) -> dict[str, dict[str, list[float | None]]]:
    """One similarity's floors and ceilings by layer; those that one query does not have are left out."""
    similarity = SIMILARITIES[name]
    stacks = [getattr(records[setting], similarity.array) for setting in MAIN_SETTINGS]
    own = record_floors(stacks[0], stacks[1], stacks[2], [similarity.form], columns=records.columns)
    layers = similarity_controls(records, name, own[similarity.form], ControlOptions()).per_layer
    assert layers is not None
    return {
        kind: {bound: list(row) for bound, row in rows.items() if any(value is not None for value in row)}
        for kind, rows in (("floor", layers.floors), ("ceiling", layers.ceilings))
    }
