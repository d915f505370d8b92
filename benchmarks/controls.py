"""What the quick controls add to the default run: the same run without and with them, everything but loading."""

from __future__ import annotations

from typing import Any

from common import embedded, in_turn, peak_of, report, sizes

from dualview import run


def main(queries: int = 200, shots: int = 32, tries: int = 3) -> None:
    lm = embedded()
    options: dict[str, Any] = {"model": lm, "n_queries": queries, "shots": shots}
    run(**{**options, "n_queries": 4, "shots": 2, "lr": 0.003})  # warm
    works = {name: lambda name=name: run(**options, controls=name) for name in ("none", "quick")}
    megabytes = dict.fromkeys(works, 0.0)

    def measured(name: str) -> None:
        megabytes[name] = max(megabytes[name], peak_of(works[name]))

    seconds = in_turn({name: lambda name=name: measured(name) for name in works}, tries)
    report(
        f"the default run without and with quick controls, {queries} queries",
        tries=tries,
        seconds={name: round(value, 2) for name, value in seconds.items()},
        peak_MB={name: round(value) for name, value in megabytes.items()},
    )
    print(f"controls {seconds['quick'] / seconds['none'] - 1:+.0%}")


if __name__ == "__main__":
    main(**sizes(__doc__, queries=200, shots=32, tries=3))
