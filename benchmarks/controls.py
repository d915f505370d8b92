"""What the quick controls add to the default run: the same run without and with them, everything but loading."""

from __future__ import annotations

from common import embedded, in_turn, report

from dualview import run


def main() -> None:
    lm = embedded()
    seconds = in_turn({name: lambda name=name: run(model=lm, controls=name) for name in ("none", "quick")}, 2)
    report("the default run without and with quick controls", seconds=seconds)
    print(f"controls {seconds['quick'] / seconds['none'] - 1:+.0%}")


if __name__ == "__main__":
    main()
