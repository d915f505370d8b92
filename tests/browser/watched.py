"""A real Chromium, and a page that is watched: what it says to the console, and where it sends requests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTHS = {"phone": (390, 844), "desktop": (1280, 900)}


def missing(why: str) -> None:
    """Skip; but where CI is set, the tests must run."""
    if os.environ.get("CI"):
        pytest.fail(f"{why}, and under CI the browser tests may not be skipped")
    pytest.skip(why)


def executable() -> str | None:
    """Debian's Chromium, or whatever there is of its kind."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def watched(
    browser: Any, address: str, *, size: str = "desktop", scheme: str = "light", path: str = "/"
) -> Generator[Any]:
    """An open page; afterwards its console must have been silent and every request have gone to its own server."""
    width, height = WIDTHS[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        permissions=["clipboard-read", "clipboard-write"],
        reduced_motion="reduce",
        has_touch=size == "phone",
    )
    context.set_default_timeout(20_000)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(address + path)
        yield page
        assert said == []
        assert asked and all(url.startswith((f"{address}/", "blob:", "data:")) for url in asked), asked
    finally:
        context.close()


def no_violations(page: Any) -> None:
    """Nothing that axe finds wrong."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def fits(page: Any) -> bool:
    """Nothing is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
