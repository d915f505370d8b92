"""The fixtures of the report's tests."""

from browser.conftest import browser as browser  # a real Chromium, or a skip that says so
from report.made import bend as bend
from report.made import run as run
