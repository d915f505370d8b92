"""How alike in-context learning and fine-tuning change one query, layer by layer, between floor and ceiling.

One query has no interval and no other query to be shuffled with; those floors and the verdict need many queries, which
`dualview run` asks. What is left: the floors that the query's own records and the two quick controls give.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dualview.metrics.controls import ROLES, SIMILARITIES, control_trios
from dualview.metrics.floors import record_floors
from dualview.metrics.summary import compute_metrics, plain
from dualview.metrics.vectors import layer_means, similarity_table
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
    tables = {floor: each.per_query for floor, each in own[similarity.form].floors.items()}
    kinds = dict.fromkeys(tables, "floor")
    for control, trio in control_trios(records).items():
        arrays = [getattr(setting, similarity.array) for setting in (trio.zsl, trio.icl, trio.ft)]
        tables[control] = similarity_table(similarity.form, arrays[0], arrays[1], arrays[2], records.columns)
        kinds[control] = trio.bound
    found: dict[str, dict[str, list[float | None]]] = {"floor": {}, "ceiling": {}}
    for bound, table in tables.items():
        if kinds[bound] in found and not bool(np.isnan(table).all()):
            found[kinds[bound]][bound] = [plain(value) for value in layer_means(table)]
    return found
