"""Two runs of a store, or two models over their draws, side by side: the same numbers, layer by layer, with the same
floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from starlette.exceptions import HTTPException

from dualview.comparison.result import Result
from dualview.metrics.verdict import over_verdicts
from dualview.options import RunOptions
from dualview.report.overview import mean_of
from dualview.store.api import ls
from dualview.store.store import Store

Row = Mapping[str, Any]
Layers = list[float | None]

METRICS = {"sim_aou": "sim_aou.raw", "sim_am": "sim_am.delta", "label_contrast": "label_contrast.value"}
"""What is compared by layer: names of controls, and keys of the result file."""
_LAYERS = {"label_contrast": "label_contrast.per_layer"}
_DRAWS = "draws:"
_OPTIONS = [
    option.name
    for option in fields(RunOptions)
    if option.name not in {"model", "task", "seed", "lr", "data", "save_records", "protocol", "batch_size"}
] + ["lr_asked"]
"""What draws of one model on one task have in common; a rate chosen per draw counts as `auto`."""


def groups_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The models of a store: runs that differ in nothing but the seed, each named by what sets it apart."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(_signature(row), []).append(row)
    differing = [name for name in _OPTIONS if len({str(row.get(name)) for row in rows}) > 1]
    named = [(_title(group[0], differing), [str(row["key"]) for row in group]) for group in found.values()]
    return [{"id": f"{_DRAWS}{keys[0]}", "title": title, "keys": keys} for title, keys in named]


def _signature(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(name)) for name in ("model", "task", *_OPTIONS))


def _title(row: Row, differing: Sequence[str]) -> str:
    named = [f"{name.removesuffix('_asked')} {row[name]}" for name in differing if row.get(name) is not None]
    return ", ".join([f"{row['model']} on {row['task']}", *named])


def compare(store: Path, first: str, second: str) -> dict[str, Any]:
    """Both sides; each is a run's key, or `draws:` and the key of any draw of a model."""
    with Store(store) as opened:
        rows = {str(row["key"]): row for row in ls(store, all=True).cells}
        keys = opened.keys()
        current = [rows[key] for key in keys if key in rows]
        chosen = [_chosen(rows, current, wanted) for wanted in (first, second)]
        results = [[opened.result(str(row["key"])) for row in side] for side in chosen]
    floors = {name: _floors(results, key) for name, key in METRICS.items()}
    shared = {name: set[str].intersection(*each) for name, each in floors.items()}
    sides = [
        {"id": wanted, "runs": [{"key": row["key"], "seed": row["seed"]} for row in side], **_side(own, shared)}
        for wanted, side, own in zip((first, second), chosen, results, strict=True)
    ]
    left_out = {name: sorted(set[str].union(*each) - shared[name]) for name, each in floors.items()}
    return {"sides": sides, "left_out": left_out}


def _chosen(rows: Mapping[str, Row], current: Sequence[Row], wanted: str) -> list[Row]:
    row = rows.get(wanted.removeprefix(_DRAWS))
    if row is None:
        raise HTTPException(404, f"There is no run {wanted[:80]!r} in this store; choose one from its results")
    if not wanted.startswith(_DRAWS):
        return [row]
    return [each for each in current if _signature(each) == _signature(row)] or [row]


def _floors(sides: Sequence[Sequence[Result]], key: str) -> list[set[str]]:
    """The floors of every run, by name; none where no controls were run."""
    controls = [result.control_of(key) for side in sides for result in side]
    return [set() if control is None else set(control.floors) for control in controls]


def _side(results: Sequence[Result], shared: Mapping[str, set[str]]) -> dict[str, Any]:
    first, many = results[0], len(results) > 1
    verdict = over_verdicts([r.verdict for r in results if r.verdict is not None]) if many else first.verdict
    wilson = first.accuracy_ci or {}
    return {
        "model": first.provenance.model,
        "task": first.task.name,
        "accuracy": {name: _number(results, f"accuracy.{name}", wilson.get(name)) for name in ("zsl", "icl", "ft")},
        "metrics": {name: _metric(results, name, shared[name]) for name in METRICS},
        "verdict": None
        if verdict is None
        else {
            "overall": verdict.overall,
            "sentence": verdict.sentence,
            "levels": {name: {"outcome": each.outcome, "clause": each.clause} for name, each in verdict.levels.items()},
        },
    }


def _number(results: Sequence[Result], key: str, interval: Sequence[float] | None) -> dict[str, Any]:
    """One run's number with its interval over queries; of several, their mean with Student's interval over draws."""
    if len(results) == 1:
        return {"value": results[0].number(key), "interval": interval}
    mean = mean_of((result.number(key) for result in results), key)
    return {"value": mean.value, "interval": None if mean.low is None else [mean.low, mean.high]}


def _metric(results: Sequence[Result], name: str, shared: set[str]) -> dict[str, Any]:
    """One similarity: its number, its layers, and the floors and ceilings that every run of the side has."""
    key = METRICS[name]
    controls = [control for result in results if (control := result.control_of(key)) is not None]
    bounds = [control.per_layer for control in controls if control.per_layer is not None]
    whole = [mean_of(control.floors[floor] for control in controls).value for floor in shared]
    layers = [cast("Layers | None", result.number(_LAYERS.get(name, f"{key}_per_layer"))) for result in results]
    return {
        **_number(results, key, controls[0].ci if controls else None),
        "floor": max((floor for floor in whole if floor is not None), default=None),
        "per_layer": _mean_rows([row for row in layers if row]),
        "floors": _mean_bounds([each.floors for each in bounds], shared),
        "ceilings": _mean_bounds([each.ceilings for each in bounds]),
    }


def _mean_bounds(bounds: Sequence[Mapping[str, Layers]], among: set[str] | None = None) -> dict[str, Layers]:
    """The bounds that every run has, by name, each averaged over the runs."""
    names = set[str].intersection(*map(set, bounds)) if bounds else set[str]()
    names = names if among is None else names & among
    return {name: _mean_rows([each[name] for each in bounds]) for name in sorted(names)}


def _mean_rows(rows: Sequence[Layers]) -> Layers:
    """Each layer's mean over the runs where it is defined."""
    return [mean_of(column).value for column in zip(*rows, strict=True)]
