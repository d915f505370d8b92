"""What `make` installs: to run, no more than dualview needs; to test, everything, in one step."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from docs.blocks import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMES_ALONG = {"tokenizers", "huggingface-hub", "click"}
"""Of transformers and typer."""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", each)[0].lower().replace("_", "-") for each in requirements}


def steps(target: str) -> list[str]:
    """What `make` would do in a fresh clone."""
    command = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize(
    ("target", "installed"), [("run", '"."'), ("test", '".[dev]"'), ("lint", '".[dev]"'), ("site", '".[dev]"')]
)
def test_one_installation_with_what_is_needed(target: str, installed: str) -> None:
    [install] = [step for step in steps(target) if "pip install" in step]
    assert install.endswith(f"--editable {installed}")
    assert not any("[dev]" in step for step in steps("run"))


def imported() -> set[str]:
    """Every module that the package imports, at once or later; optional ones are imported by name."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"dualview"}


def test_the_package_imports_only_what_it_depends_on() -> None:
    owners = packages_distributions()
    wanted = {owner.lower().replace("_", "-") for module in imported() for owner in owners[module]}
    assert len(wanted) > 15 and wanted <= names(PROJECT["dependencies"]) | COMES_ALONG
