"""What the records cost: the same forward passes with and without them, in time and in peak memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from common import embedded, in_turn, must_agree, peak_of, prepared, report

from dualview.models.scoring import ask

QUERIES = 64


def peak(record: str) -> float:
    """Peak memory of a process of its own, in MB."""
    done = subprocess.run([sys.executable, __file__, record], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def one(record: bool) -> None:
    lm = embedded()
    which = prepared(lm, QUERIES)
    print(peak_of(lambda: ask(lm, which.prompts.queries, replace(which.in_context, record=record))))


def main() -> None:
    lm = embedded()
    which = prepared(lm, QUERIES)
    queries = which.prompts.queries
    without, with_records = replace(which.in_context, record=False), which.in_context
    both = [ask(lm, queries, how).settings[0].log_probs for how in (without, with_records)]  # warm
    must_agree("log-probabilities", float(abs(both[0] - both[1]).max()), 0.0)
    works = {"without": lambda: ask(lm, queries, without), "with": lambda: ask(lm, queries, with_records)}
    seconds = in_turn(works, 12)
    memory = {"without": peak("0"), "with": peak("1")}
    report("recording, 64 queries, 32 shots", seconds=seconds, memory_mb=memory)
    print(f"time {seconds['with'] / seconds['without'] - 1:+.1%} memory {memory['with'] / memory['without'] - 1:+.1%}")


if __name__ == "__main__":
    one(sys.argv[1] == "1") if len(sys.argv) > 1 else main()
