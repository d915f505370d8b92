"""Every relative link and anchor of README and docs leads somewhere, in plain Markdown as on the site."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from docs.blocks import PAGES, ROOT

_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^)]*\))?)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def without_code(text: str) -> str:
    """The page without fenced blocks and inline code, whose brackets are no links."""
    text = re.sub(r"^(```+).*?^\1[ \t]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings as plain Markdown viewers make them: lower case, words joined by hyphens."""
    text = re.sub(r"^(```+).*?^\1[ \t]*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        found.add(slug)
    return found


def links(page: Path) -> list[str]:
    return _LINK.findall(without_code(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), f"{page.name}: {link} is neither relative nor https"
            continue
        path, _, anchor = unquote(link).partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{page.name}: {link} leaves the project"
        if page.is_relative_to(ROOT / "docs"):
            on_site = any(target.is_relative_to(ROOT / part) for part in ("docs", "studies/results"))
            assert on_site, f"{page.name}: {link} leaves the site"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}: there is no such heading"


def test_links_are_found_at_all() -> None:
    assert sum(len(links(page)) for page in PAGES) > 40
    assert "the-verdict" in anchors(ROOT / "docs" / "metrics.md")
