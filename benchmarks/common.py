"""What the benchmarks share: the same prompts for both sides, timing, and one line at the end that says the ratio."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from dualview.comparison.prepare import Prepared, prepare
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.options import RunOptions
from dualview.tasks.rows import Row

T = TypeVar("T")


@dataclass(frozen=True)
class Timed:
    seconds: float
    found: Any


def timed(work: Callable[[], T], repeats: int = 1) -> Timed:
    """The fastest of some repeats: the one least disturbed by what else the machine was doing."""
    best, found = float("inf"), None
    for _ in range(repeats):
        start = time.perf_counter()
        found = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return Timed(best, found)


def must_agree(what: str, difference: float, tolerance: float) -> None:
    """No ratio of two programs that do not do the same."""
    if not difference <= tolerance:
        raise SystemExit(f"{what}: the two sides differ by {difference:.2g}, more than {tolerance:g}")


def fastest(works: dict[Any, Callable[[], Any]], tries: int) -> dict[Any, Timed]:
    """The fastest try of each and what it found, all equally often and in turn, so that they meet the same machine."""
    best: dict[Any, Timed] = {}
    for _ in range(tries):
        for name, work in works.items():
            tried = timed(work)
            best[name] = min(best.get(name, tried), tried, key=lambda one: one.seconds)
    return best


def in_turn(works: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """The seconds of `fastest`."""
    return {name: best.seconds for name, best in fastest(works, repeats).items()}


def sizes(doc: str | None, **defaults: int) -> dict[str, int]:
    """Whole numbers from the command line, such as --queries 8."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return vars(parser.parse_args())


def peak_of(work: Callable[[], Any]) -> float:
    """Peak memory of this process while `work` runs, in MB: what loading the model took before is forgotten (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    work()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def embedded() -> LanguageModel:
    return load_model("embedded", device="cpu")


def prepared(lm: LanguageModel, n_queries: int, **options: Any) -> Prepared:
    return prepare(RunOptions.make(n_queries=n_queries, **options), lm)


def texts(which: Prepared, queries: list[Row]) -> list[tuple[str, list[str]]]:
    """Each query's whole prompt as text, and its candidates: what a tool that takes text is given."""
    task = which.task
    between = task.separator
    demos = "".join(f"{task.render(row)} {task.candidates(row)[row.label]}{between}" for row in which.demos)
    return [(demos + task.render(row), [f" {label}" for label in task.candidates(row)]) for row in queries]


def report(name: str, **numbers: Any) -> None:
    """One JSON line with the numbers, the machine and the versions."""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    about = {"machine": machine, "threads": torch.get_num_threads()}
    about |= {package: version(package) for package in ("torch", "transformers")}
    plain = {key: round(value, 4) if isinstance(value, float) else value for key, value in numbers.items()}
    print(json.dumps({"benchmark": name, **plain, **about}))
