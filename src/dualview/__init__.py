"""dualview: how far does a language model's in-context learning behave like gradient descent?

The public names are loaded on first use, so that `import dualview` costs nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualview.io import display

if TYPE_CHECKING:
    from dualview.comparison.result import Result
    from dualview.comparison.seeds import compare_seeds
    from dualview.io.errors import UserError
    from dualview.metrics.summary import compute_metrics
    from dualview.metrics.verdict import Verdict, judge
    from dualview.models.language_model import LanguageModel
    from dualview.models.loading import load_model
    from dualview.options import RunOptions
    from dualview.records import Records, Setting, load_records, save_records
    from dualview.store.api import load
    from dualview.sweep.runner import sweep
    from dualview.tasks.task import Task, list_tasks, load_task
    from dualview.verbs import run
    from dualview.verbs import run as compare

__version__ = "0.1.0"
"""The only place where the version is written; the build reads it from here."""

_HOME = {
    "run": "dualview.verbs",
    "UserError": "dualview.io.errors",
    "compute_metrics": "dualview.metrics.summary",
    "LanguageModel": "dualview.models.loading",
    "load_model": "dualview.models.loading",
    "RunOptions": "dualview.options",
    "Records": "dualview.records",
    "Setting": "dualview.records",
    "load_records": "dualview.records",
    "save_records": "dualview.records",
    "Result": "dualview.comparison.result",
    "Task": "dualview.tasks.task",
    "list_tasks": "dualview.tasks.task",
    "load_task": "dualview.tasks.task",
    "Verdict": "dualview.metrics.verdict",
    "judge": "dualview.metrics.verdict",
    "compare_seeds": "dualview.comparison.seeds",
    "load": "dualview.store.api",
}

_PACKAGES = ("lab", "metrics", "report", "store", "sweep", "variants")
"""`metrics`, `report`, `sweep` and each lab can be called: they are verbs too."""

__all__ = [
    "LanguageModel",
    "Records",
    "Result",
    "RunOptions",
    "Setting",
    "Task",
    "UserError",
    "Verdict",
    "compare",
    "compare_seeds",
    "compute_metrics",
    "judge",
    "list_tasks",
    "load",
    "load_model",
    "load_records",
    "load_task",
    "run",
    "save_records",
    "sweep",
]


def _renderer(name: str) -> Callable[[Any], str]:
    """A function of `report.notebook`, imported when something is shown."""
    return lambda thing: getattr(importlib.import_module("dualview.report.notebook"), name)(thing)


display.register("Result", _renderer("result_html"))
display.register("SeedsResult", _renderer("seeds_html"))


_ALIASES = {"compare": "run"}
"""Former names."""


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"dualview.{name}")
    raise AttributeError(f"module 'dualview' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
