"""How long each part of some work took."""

from __future__ import annotations

import time


class Clock:
    """The seconds spent in each part since it was created."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._since
        self._since = now
