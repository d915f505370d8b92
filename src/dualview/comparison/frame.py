"""A result as a pandas table: one row for each number, with what it is compared with."""

from __future__ import annotations

from typing import Any

from dualview.metrics.measured import CONTROL_OF, Measured

_NUMBERS = (
    *("sim_am.before", "update_norm.icl", "update_norm.ft", "demo_mass.mean"),
    *CONTROL_OF,
)
_ORDER = (
    *("accuracy", "rec2ftp", "agreement", "label_contrast", "sim_aou", "sim_am"),
    *("kendall", "overlap", "demo_mass", "update_norm"),
)
COLUMNS = ("value", "low", "high", "floor", "floor_name", "ceiling", "p")


def frame_of(result: Measured) -> Any:
    """A `pandas.DataFrame` with a row for each number of the run, by its key in the result file.

    Numbers of a patch or an adapter in fine-tuning's place are under `learners.NAME`.

    low, high   the 95 % interval
    floor       the highest floor and its name
    p           of the test against the floors (Rec2FTP: against chance)
    """
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    keys = [*(f"accuracy.{name}" for name in result.accuracy.by_setting), *_NUMBERS]
    rows = {key: row for key in sorted(keys, key=_place) if (row := _row(result, key)) is not None}
    for name, learner in result.learners.items():
        found = {key: _row(learner, key) for key in sorted(_NUMBERS, key=_place)}
        rows |= {f"learners.{name}.{key}": row for key, row in found.items() if row is not None}
    # pandas would type a column of None as object, on which no arithmetic works.
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS))
    numbers = [name for name in COLUMNS if name != "floor_name"]
    return frame.astype(dict.fromkeys(numbers, float)).rename_axis("number")


def _place(key: str) -> int:
    """Numbers of one metric stay together, in the order of the result file."""
    return _ORDER.index(key.split(".", 1)[0])


def _row(result: Measured, key: str) -> list[Any] | None:
    value = result.number(key)
    control = result.control_of(key)
    if value is None and control is None:
        return None
    if control is None:
        low, high = (result.accuracy_ci or {}).get(key.removeprefix("accuracy."), (None, None))
        return [value, low, high, None, None, None, result.rec2ftp.p if key == "rec2ftp.value" else None]
    low, high = control.ci or (None, None)
    name, floor = control.highest_floor or (None, None)
    return [value, low, high, floor, name, control.ceiling, control.p]
