"""Peak memory against the number of queries, no records kept: it should not grow."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from common import embedded, peak_of, prepared, report

from dualview.models.scoring import ask


def one(n: int) -> None:
    lm = embedded()
    which = prepared(lm, n)
    print(peak_of(lambda: ask(lm, which.prompts.queries, replace(which.in_context, record=False))))


def main() -> None:
    peaks: dict[int, float] = {}
    for n in (64, 500, 2000):
        done = subprocess.run([sys.executable, __file__, str(n)], capture_output=True, text=True, check=True)
        peaks[n] = float(done.stdout.split()[-1])
    report("peak memory against queries", peak_mb=peaks)
    print(f"growth {max(peaks.values()) / min(peaks.values()) - 1:+.1%}")


if __name__ == "__main__":
    one(int(sys.argv[1])) if len(sys.argv) > 1 else main()
