"""dualview: how far does a language model's in-context learning behave like gradient descent?

Every verb of the command line is a function here, with the verb's name and arguments: `dualview.run(task="movie")`.
Names are loaded on first use, so that `import dualview` costs nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualview.io import display
from dualview.io.collector import collector_paused

if TYPE_CHECKING:
    from dualview import lab, plot, store, variants
    from dualview.analyses.compile import compile_patch as compile
    from dualview.analyses.explain import explain
    from dualview.analyses.heads import heads
    from dualview.comparison.result import Result
    from dualview.comparison.seeds import SeedsResult, compare_seeds
    from dualview.io.doctor import doctor
    from dualview.io.errors import UserError
    from dualview.metrics.measured import Measured
    from dualview.metrics.recompute import recompute as metrics
    from dualview.metrics.summary import compute_metrics
    from dualview.metrics.verdict import Verdict, judge
    from dualview.models.exact import exact
    from dualview.models.language_model import LanguageModel
    from dualview.models.loading import load_model
    from dualview.options import RunOptions
    from dualview.pieces import ask, build_prompts, finetune, gather, load_result
    from dualview.records import Records, Setting, load_records, save_records
    from dualview.report.build import report
    from dualview.store.api import diff, export, load, ls, query, show
    from dualview.store.store import Store
    from dualview.sweep.runner import sweep
    from dualview.tasks.task import Task, list_tasks, load_task, tasks
    from dualview.verbs import assets, calibrate, prompt, run, verify
    from dualview.verbs import run as compare
    from dualview.web.serve import serve

__version__ = "0.1.0"
"""The only place where the version is written; the build reads it from here."""

_PACKAGES = ("lab", "metrics", "plot", "report", "store", "sweep", "tasks", "variants")
"""Modules. `metrics`, `report`, `sweep`, `tasks` and each lab can be called: they are verbs too."""

_NAMES = {
    "analyses.compile": ("compile=compile_patch",),
    "analyses.explain": ("explain",),
    "analyses.heads": ("heads",),
    "comparison.result": ("Result",),
    "comparison.seeds": ("SeedsResult", "compare_seeds"),
    "io.errors": ("UserError",),
    "metrics.measured": ("Measured",),
    "metrics.summary": ("compute_metrics",),
    "metrics.verdict": ("Verdict", "judge"),
    "models.exact": ("exact",),
    "models.language_model": ("LanguageModel",),
    "models.loading": ("load_model",),
    "options": ("RunOptions",),
    "pieces": ("ask", "build_prompts", "finetune", "gather", "load_result"),
    "records": ("Records", "Setting", "load_records", "save_records"),
    "store.api": ("diff", "export", "load", "ls", "query", "show"),
    "store.store": ("Store",),
    "tasks.task": ("Task", "list_tasks", "load_task"),
    "io.doctor": ("doctor",),
    "verbs": ("assets", "calibrate", "compare=run", "prompt", "run", "verify"),
    "web.serve": ("serve",),
}
"""Which module each public name comes from; `public=own` where it has another name there."""

_HOME = {
    public: (module, own or public)
    for module, names in _NAMES.items()
    for public, _, own in (name.partition("=") for name in names)
}

__all__ = [
    "LanguageModel",
    "Measured",
    "Records",
    "Result",
    "RunOptions",
    "SeedsResult",
    "Setting",
    "Store",
    "Task",
    "UserError",
    "Verdict",
    "ask",
    "assets",
    "build_prompts",
    "calibrate",
    "compare",
    "compare_seeds",
    "compile",
    "compute_metrics",
    "diff",
    "doctor",
    "exact",
    "explain",
    "export",
    "finetune",
    "gather",
    "heads",
    "judge",
    "lab",
    "list_tasks",
    "load",
    "load_model",
    "load_records",
    "load_result",
    "load_task",
    "ls",
    "metrics",
    "plot",
    "prompt",
    "query",
    "report",
    "run",
    "save_records",
    "serve",
    "show",
    "store",
    "sweep",
    "tasks",
    "variants",
    "verify",
]


def _renderer(name: str) -> Callable[[Any], str]:
    """A function of `report.html.notebook`, imported when something is shown."""
    return lambda thing: getattr(importlib.import_module("dualview.report.html.notebook"), name)(thing)


display.register("Result", _renderer("result_html"))
display.register("SeedsResult", _renderer("seeds_html"))
display.register("Measured", _renderer("measured_html"))
display.register("Verdict", _renderer("verdict_html"))
display.register("VerdictPart", _renderer("verdict_html"))
display.register("Records", _renderer("records_html"))


def _import(module: str) -> Any:
    with collector_paused():
        return importlib.import_module(f"dualview.{module}")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module, own = _HOME[name]
        return getattr(_import(module), own)
    if name in _PACKAGES:
        return _import(name)
    raise AttributeError(f"module 'dualview' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
