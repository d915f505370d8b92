"""The golden numbers: what a tiny, deterministic model and task give in float64, run by run.

They cover the comparison with full controls, every fine-tuning rule and a compiled patch, and are independent of the
lab. `write.py` writes them to `numbers.json`; `test_golden.py` compares.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualview.analyses.compile import compile_patch
from dualview.comparison.numerics import NUMERICS_VERSION
from dualview.comparison.run import run
from dualview.models.loading import load_model
from dualview.options import RunOptions
from equivalence import tiny

FILE = Path(__file__).with_name("numbers.json")
RTOL, ATOL = 1e-4, 1e-6
"""Above what processors make of the same run, far below a change of method.

Float64 alone would allow 1e-6. But an untrained control draws its weights in float32, and the logarithm behind the
normal draws differs in its last digit between processors, which moves those floors by up to 1e-5.
"""
MARGIN = 1e-6
"""The least gap between the two best candidates of a query: no processor's rounding changes an answer."""

SETTINGS = ("zsl", "icl", "ft")
_SECTIONS = (
    "accuracy",
    "rec2ftp",
    "sim_aou",
    "sim_am",
    "update_norm",
    "demo_mass",
    "kendall",
    "overlap",
    "order_sensitivity",
    "calibrated",
    "queries",
    "controls",
    "verdict",
    "ft",
)
_WORDS = ("overall", "status")
"""The texts that count: every other one may be reworded."""

Numbers = dict[str, float | str]


def compute() -> dict[str, Any]:
    """The golden numbers of this code, with the version they belong to."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        lm = load_model(str(tiny.save_model(folder / "model")), dtype="float64", device="cpu")
        task = str(tiny.save_task(folder / "task", train=40, validation=20))
        common: dict[str, Any] = {"model": lm.name, "task": task, "shots": 5, "n_queries": 12, "dtype": "float64"}
        runs: dict[str, dict[str, Any]] = {
            "full controls": {"controls": "full", "lr": "auto", "lr_grid": (0.01, 0.05), "calibrate": True},
            "layer-causal": {"controls": "none", "lr": 0.05, "ft_rule": "layer-causal"},
            "linearised": {"controls": "none", "lr": 0.05, "ft_rule": "linearised"},
        }
        numbers: dict[str, Numbers] = {}
        for name, settings in runs.items():
            content = run(RunOptions.make(**common, **settings), lm=lm).to_json()
            content["queries"] = [{setting: query[setting] for setting in SETTINGS} for query in content["queries"]]
            _must_have_margins(content["queries"])
            numbers[name] = dict(_flat({section: content.get(section) for section in _SECTIONS}))
        options = {name: value for name, value in common.items() if name != "model"}
        patch = compile_patch(out=folder / "patch", model=lm, fit_rows=5, lr=0.05, **options).to_json()
        numbers["compiled patch"] = dict(_flat({name: patch[name] for name in ("settings", "ridges", "ridge")}))
        return {"numerics_version": NUMERICS_VERSION, "numbers": numbers}


def _must_have_margins(queries: Sequence[Mapping[str, Any]]) -> None:
    for query in queries:
        for scores in query.values():
            best, second = sorted(scores)[:-3:-1]
            assert best - second > MARGIN, f"a query has two candidates within {MARGIN}; choose another seed"


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, float | str]]:
    """Every number, and the words that count, by its dotted path."""
    if isinstance(value, Mapping):
        for name, part in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _flat(part, f"{path}.{name}".strip("."))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            yield from _flat(part, f"{path}.{index}")
    elif isinstance(value, int | float):
        yield path, float(f"{value:.10g}")  # digits that mean something at RTOL
    elif isinstance(value, str) and path.rpartition(".")[2] in _WORDS:
        yield path, value


def moved(stored: Mapping[str, Numbers], found: Mapping[str, Numbers]) -> list[str]:
    """Each stored number that is missing or another one now, as a line of text."""
    lines: list[str] = []
    for name, numbers in stored.items():
        for path, before in numbers.items():
            now = found.get(name, {}).get(path)
            if now is None or not _same(before, now):
                lines.append(f"{name}: {path}: {before} before, {now} now")
    return lines


def _same(before: float | str, now: float | str) -> bool:
    if isinstance(before, str) or isinstance(now, str):
        return before == now
    return math.isclose(before, now, rel_tol=RTOL, abs_tol=ATOL) or bool(np.isnan(before) and np.isnan(now))


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))
