"""Packages that are verbs too: `dualview.report(...)` is a call, `dualview.report.html` a module."""

from __future__ import annotations

import sys
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
