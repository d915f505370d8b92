"""dualview: how far does a language model's in-context learning behave like gradient descent?

The public names are loaded on first use, so that `import dualview` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualview.comparison.result import Result
    from dualview.comparison.run import compare
    from dualview.comparison.seeds import compare_seeds
    from dualview.comparison.verdict import Verdict, judge
    from dualview.io.errors import UserError
    from dualview.metrics.summary import compute_metrics
    from dualview.models.loading import LanguageModel, load_model
    from dualview.options import RunOptions
    from dualview.records import Records, Setting, load_records, save_records
    from dualview.store.api import load
    from dualview.sweep.runner import sweep
    from dualview.tasks.task import Task, list_tasks, load_task

__version__ = "0.1.0"
"""The only place where the version is written; the build reads it from here."""

_HOME = {
    "compare": "dualview.comparison.run",
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
    "Verdict": "dualview.comparison.verdict",
    "judge": "dualview.comparison.verdict",
    "compare_seeds": "dualview.comparison.seeds",
    "load": "dualview.store.api",
    "sweep": "dualview.sweep.runner",
}

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
    "save_records",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dualview' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
