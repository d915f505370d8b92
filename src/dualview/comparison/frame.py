"""A result as a pandas table: one row for each number, with what it is compared with."""

from __future__ import annotations

from typing import Any

from dualview.metrics.measured import Measured

CONTROL_OF = {
    "rec2ftp.value": "rec2ftp",
    "sim_aou.raw": "sim_aou",
    "sim_aou.normalised": "sim_aou_normalised",
    "sim_am.after": "sim_am_after",
    "sim_am.delta": "sim_am",
    "kendall.released.tau_token": "kendall_released",
    "kendall.dual_k.tau_token": "kendall_dual_k",
    "kendall.dual_v.tau_token": "kendall_dual_v",
    "overlap.ft.token_overlap": "token_overlap",
}
"""Which of a result's controls belong to a number, by its key in the result file."""
_NUMBERS = (
    *("sim_am.before", "update_norm.icl", "update_norm.ft", "demo_mass.mean"),
    *CONTROL_OF,
)
COLUMNS = ("value", "low", "high", "floor", "floor_name", "ceiling", "p")


def frame_of(result: Measured) -> Any:
    """A `pandas.DataFrame` with a row for each number of the run, by its key in the result file.

    low, high   the 95 % interval
    floor       the highest floor and its name
    p           of the test against the floors (Rec2FTP: against chance)
    """
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    keys = [*(f"accuracy.{name}" for name in result.accuracy.by_setting), *_NUMBERS]
    rows = {key: row for key in sorted(keys, key=_place) if (row := _row(result, key)) is not None}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS))
    numbers = [name for name in COLUMNS if name != "floor_name"]
    return frame.astype(dict.fromkeys(numbers, float)).rename_axis("number")


def _place(key: str) -> int:
    """Numbers of one metric stay together, in the order of the result file."""
    return ("accuracy", "rec2ftp", "sim_aou", "sim_am", "kendall", "overlap", "demo_mass", "update_norm").index(
        key.split(".", 1)[0]
    )


def _row(result: Measured, key: str) -> list[Any] | None:
    value = result.number(key)
    control = (result.controls or {}).get(CONTROL_OF.get(key, ""))
    if value is None and control is None:
        return None
    if control is None:
        return [value, None, None, None, None, None, result.rec2ftp.p if key == "rec2ftp.value" else None]
    low, high = control.ci or (None, None)
    name, floor = control.highest_floor or (None, None)
    return [value, low, high, floor, name, control.ceiling, control.p]
