"""How similarly in-context learning and fine-tuning change one query, layer by layer, between floor and ceiling.

One query has no interval and no other query to shuffle with: those floors and the verdict need many queries, as in
`dualview run`. Here are the floors that the query's own records and the two quick controls give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from dualview.metrics.agreement import centred_log_odds
from dualview.metrics.cosine import UNDEFINED_BELOW, norm, ratio
from dualview.metrics.floors.controls import ROLES, SIMILARITIES, ControlOptions, layer_bounds, similarity_controls
from dualview.metrics.floors.nulls import contrast_floors, off_spans_of, record_floors
from dualview.metrics.label_contrast import FLIPPED
from dualview.metrics.measured import LayerBounds
from dualview.metrics.summary import compute_metrics, plain
from dualview.records import MAIN_SETTINGS, Records

SHOWN = ("sim_aou", "sim_am", "sim_aou_normalised")


def similarity_json(records: Records, skipped: Mapping[str, str]) -> dict[str, Any]:
    """The result file's similarities, and for each its floors and ceiling by layer.

    `skipped`: why some controls could not be run.
    """
    measured = compute_metrics(records).to_json()
    return {
        "label_contrast": contrast_json(records, measured["label_contrast"], skipped),
        "skipped": dict(skipped),
        **{key: measured[key] for key in ("sim_aou", "sim_am", "update_norm", "demo_mass")},
        "bounds": {name: bounds_json(records, name) for name in SHOWN},
        "meaning": {name: ROLES[name].meaning for name in records.controls if name in ROLES},
    }


def bounds_json(records: Records, name: str) -> dict[str, dict[str, list[float | None]]]:
    """One similarity's floors and ceilings by layer; those that one query does not have are left out."""
    similarity = SIMILARITIES[name]
    stacks = [getattr(records[setting], similarity.array) for setting in MAIN_SETTINGS]
    off = off_spans_of(records) if similarity.array == "h" else []
    z, p, f = stacks
    own = record_floors(z, p, f, [similarity.form], columns=records.columns, off=off, gold=records.gold)
    layers = similarity_controls(records, name, own[similarity.form], ControlOptions()).per_layer
    assert layers is not None
    return _bounds(layers)


def contrast_json(records: Records, measured: Any, skipped: Mapping[str, str]) -> dict[str, Any]:
    """The label contrast by layer with its floors, the relative sizes ‖h_s − h_s[flipped]‖ / ‖h_zsl‖ of the two
    differences, and the label log-odds (each candidate's log-probability less their mean) of every setting.

    Only `reason` is set where flipped labels could not be run; it is set too where nothing is defined.
    """
    found = contrast_floors(records)
    if measured is None or found is None:
        why = next((skipped[name] for name in FLIPPED.values() if name in skipped), "Flipped labels were not run.")
        return {"reason": why}
    zsl = _outputs(records, "zsl")
    changes = {name: _outputs(records, name) - _outputs(records, flipped) for name, flipped in FLIPPED.items()}
    sizes = {name: ratio(norm(change), norm(zsl)) for name, change in changes.items()}
    floors = {name: floor.per_query for name, floor in found.floors.items()}
    names = ("zsl", *(name for pair in FLIPPED.items() for name in pair))
    return {
        **measured,
        "reason": None if measured["value"] is not None else _unchanged(sizes),
        "norms": {name: [plain(value) for value in size] for name, size in sizes.items()},
        "bounds": _bounds(layer_bounds(found.value, floors, {})),
        "log_odds": {name: [plain(x) for x in centred_log_odds(records[name].log_probs)[0]] for name in names},
    }


def _outputs(records: Records, name: str) -> Float[np.ndarray, "layer d_model"]:
    h = records[name].h
    assert h is not None
    return h[0].astype(np.float64)


def _unchanged(sizes: Mapping[str, Float[np.ndarray, " layer"]]) -> str:
    """Why no layer has a label contrast."""
    if not all(np.isfinite(size).all() for size in sizes.values()):
        return "Undefined at every layer: fine-tuning diverged."
    names = {"icl": "the in-context model", "ft": "the fine-tuned model"}
    still = [names[name] for name, size in sizes.items() if (size < UNDEFINED_BELOW).all()]
    where = " and ".join(still) or "one side or the other"
    return f"Undefined at every layer: flipping the labels changes nothing in {where} beyond rounding."


def _bounds(layers: LayerBounds) -> dict[str, dict[str, list[float | None]]]:
    """Floors and ceilings by layer, without those that are undefined at every layer."""
    return {
        kind: {bound: list(row) for bound, row in rows.items() if any(value is not None for value in row)}
        for kind, rows in (("floor", layers.floors), ("ceiling", layers.ceilings))
    }
