"""dualview: how far does a language model's in-context learning behave like gradient descent?

Every verb of the command line is a function here, with the verb's name and arguments: `dualview.run(task="movie")`.
`__init__.pyi` lists the public names. They are loaded on first use, so that `import dualview` costs nothing.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dualview.io import display
from dualview.io.collector import collector_paused

__version__ = "0.1.0"
"""The only place where the version is written; the build reads it from here."""

_PACKAGES = ("lab", "metrics", "plot", "report", "store", "sweep", "tasks", "variants")
"""Modules. `metrics`, `report`, `sweep`, `tasks` and each lab can be called: they are verbs too."""

_HOME = {
    alias.asname or alias.name: (str(node.module), alias.name)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The module of each public name, and its name there."""

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def _renderer(name: str) -> Callable[[Any], str]:
    """A function of `report.html.notebook`, imported when something is shown."""
    return lambda thing: getattr(importlib.import_module("dualview.report.html.notebook"), name)(thing)


display.register("Result", _renderer("result_html"))
display.register("SeedsResult", _renderer("seeds_html"))
display.register("Measured", _renderer("measured_html"))
display.register("Verdict", _renderer("verdict_html"))
display.register("VerdictPart", _renderer("verdict_html"))
display.register("Records", _renderer("records_html"))


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dualview' has no attribute {name!r}")
    module, own = _HOME[name]
    with collector_paused():
        if name in _PACKAGES:
            return importlib.import_module(f"dualview.{name}")
        return getattr(importlib.import_module(module), own)


def __dir__() -> list[str]:
    return __all__
