"""SKIPS.md names every test that can be skipped, and no other."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
_SKIP = re.compile(r"\bskip(?:if)?\(|\bimportorskip\(|\bxfail\b")
USES_A_SKIP = {"tests/browser/watched.py": {"tests/browser", "tests/report/test_browser.py"}}
"""Who is skipped by a helper that is no test itself."""


def skipping() -> set[str]:
    """The files and folders whose tests can be skipped, as SKIPS.md names them."""
    found: set[str] = set()
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS.parent).as_posix()
        if path != Path(__file__) and _SKIP.search(path.read_text(encoding="utf-8")):
            found |= USES_A_SKIP.get(name, {name})
    return found


def test_every_skip_is_listed_and_every_listed_one_exists() -> None:
    rows = [line.split("|")[1] for line in (TESTS / "SKIPS.md").read_text(encoding="utf-8").splitlines() if "`" in line]
    named = {name for row in rows for name in re.findall(r"`(tests/[^`]+)`", row)}
    assert named == skipping()
    tests = {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}
    text = "".join((TESTS.parent / name).read_text(encoding="utf-8") for name in named if name.endswith(".py"))
    assert tests and all(f"def {name}(" in text for name in tests)
