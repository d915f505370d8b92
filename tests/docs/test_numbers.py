"""What the pages quote is what the program says now."""

from __future__ import annotations

import re
from typing import get_args

import yaml

import dualview
from docs.blocks import ROOT
from dualview.duality.verify.run import MISPRINTS, verify_wrong
from dualview.metrics import verdict
from dualview.tasks.task import list_tasks

DOCS = ROOT / "docs"


def test_the_table_of_misprints() -> None:
    """Every misprint is in the table, with the error that `verify --wrong` reports for seed 0."""
    text = (DOCS / "explanation.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([^`]+)` \| .* \| ([\d.e+-]+) \|$", text, re.MULTILINE))
    found = {check.statement: check.error for check in verify_wrong(seed=0)}
    assert set(rows) == set(found) == {identity.statement for identity in MISPRINTS}
    for statement, error in found.items():
        assert abs(float(rows[statement]) / error - 1) < 0.06, statement


def test_the_rule_of_the_verdict() -> None:
    """The metrics page has every level and every word that the verdict can say, and no other."""
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    section = text[text.index("## The verdict") :]
    first = [
        re.findall(r"^\| ([a-z ]+) \|", table, re.MULTILINE)[1:] for table in section.split("\n\n") if "|---" in table
    ]
    levels, words = first[0], first[1]
    assert tuple(levels) == verdict.LEVELS
    assert set(words) == set(get_args(verdict.Overall))


def test_how_many_tasks() -> None:
    row = re.search(r"^\| tasks \| (\d+), and YAML", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None and int(row[1]) == len(list_tasks())


def test_the_version_is_the_same_everywhere() -> None:
    assert dualview.__all__
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cff["version"] == dualview.__version__ and cff["cff-version"] == "1.2.0"
    assert f"version = {{{cff['version']}}}" in (DOCS / "how-to" / "cite.md").read_text(encoding="utf-8")
    assert f"## {cff['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
