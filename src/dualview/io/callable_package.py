"""Packages that load their names on first use, and packages that are verbs too.

`dualview.report(...)` is a call, `dualview.report.html` a module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any


def make_callable(package: str, function: str) -> None:
    """Let `package` be called; the call goes to `function`, given as `module.name`, which is imported then."""
    module, _, name = function.rpartition(".")

    class CallablePackage(ModuleType):
        def __call__(self, *args: Any, **options: Any) -> Any:
            return getattr(import_module(module), name)(*args, **options)

    sys.modules[package].__class__ = CallablePackage


def lazy_names(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A package's `__getattr__` that imports a name when it is first used; `names` lists those of each module."""
    home = {name: module for module, several in names.items() for name in several}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return load
