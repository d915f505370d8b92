"""Where there is no Chromium the tests are skipped, but never under CI."""

from __future__ import annotations

import pytest

from browser.watched import executable, missing


def test_skipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Chromium"):
        missing("no Chromium")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="under CI"):
        missing("no Chromium")


def test_looking_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert executable() is None
