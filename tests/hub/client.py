"""Processes that use a hub, and what their commands came to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """What a command came to."""

    code: int
    out: str
    err: str
    seconds: float

    def complaint(self) -> str:
        """The one sentence of a user's mistake; anything else on the terminal is a failure of the test."""
        said = [line for line in self.err.splitlines() if not line.startswith("loading ")]
        assert self.code == 2 and len(said) == 1 and not self.out, (self.code, self.out, self.err)
        assert said[0].startswith("dualview: ") and said[0].endswith("."), said
        return said[0].removeprefix("dualview: ")

    def fine(self) -> str:
        """What it printed; on standard error there may be nothing but the progress of loading."""
        stray = [line for line in self.err.splitlines() if "…" not in line and not line.endswith(" s")]
        assert self.code == 0 and not stray, (self.code, self.err)
        return self.out


class Client:
    """A process that uses a hub; its cache is its own."""

    def __init__(self, url: str, home: Path, **env: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        self.env = {**kept, "HF_ENDPOINT": url, "HF_HOME": str(home), "PYTHONPATH": path, **env}
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, *command: str, **env: str) -> Answer:
        """Run `dualview` with these arguments."""
        return self._ask({"command": command, "env": env})

    def python(self, code: str, **env: str) -> Answer:
        return self._ask({"python": code, "env": env})

    def _ask(self, what: Mapping[str, Any]) -> Answer:
        if self._process is None:
            driver = [sys.executable, str(Path(__file__).with_name("driver.py"))]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(driver, env=self.env, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        start = time.monotonic()
        print(json.dumps(what), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return Answer(**answer, seconds=time.monotonic() - start)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
