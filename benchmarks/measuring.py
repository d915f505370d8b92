"""What the numbers of a run cost once it is recorded: metrics and verdict, from records of a given shape.

    python benchmarks/measuring.py                              # 500 queries of an 8B model, 4 of its 32 layers
    python benchmarks/measuring.py --layers 30 --width 576 --heads 9 --queries 256
    python benchmarks/measuring.py --layers 32 --device cuda    # as a run on a GPU computes them

Records are random, with the settings of quick controls.
"""

from __future__ import annotations

import argparse

import numpy as np
from common import report, timed

from dualview.metrics.recompute import measure
from dualview.records import Records, Setting

JUDGED = ("icl", "ft", "icl_flipped_labels", "ft_flipped_labels")
SETTINGS = ("zsl", *JUDGED, "icl_reordered", "zsl_shifted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("queries", 500), ("layers", 4), ("width", 4096), ("heads", 32), ("columns", 45)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", help="compute with torch on this device, such as cuda; default: numpy")
    chosen = parser.parse_args()
    records = synthetic(chosen.queries, chosen.layers, chosen.width, chosen.heads, chosen.columns)
    found = timed(lambda: measure(records, device=chosen.device), 3)
    report("metrics and verdict from records", shape=vars(chosen), seconds=found.seconds)
    print(f"{found.seconds / chosen.layers:.3f} s a layer")


def synthetic(queries: int, layers: int, width: int, heads: int, columns: int) -> Records:
    """Random updates of a random zero-shot pass, each setting's partly that of the one before."""
    rng = np.random.default_rng(0)
    own = rng.integers(columns // 2, columns + 1, queries)
    inside = np.arange(columns) < own[:, None, None, None]
    h = rng.standard_normal((queries, layers, width), np.float32)
    m = rng.standard_normal((queries, layers, heads, columns), np.float32) * inside
    settings = {"zsl": Setting(rng.normal(size=(queries, 2)), h, m)}
    move, turn = (rng.standard_normal(x.shape, np.float32) for x in (h, m))
    for name in SETTINGS[1:]:
        move = 0.7 * move + 0.7 * rng.standard_normal(h.shape, np.float32)
        turn = (0.7 * turn + 0.7 * rng.standard_normal(m.shape, np.float32)) * inside
        off = 0.9 * move if name in JUDGED else None
        scores = rng.normal(size=(queries, 2))
        settings[name] = Setting(scores, h + move, m + turn, off_span=off)
    return Records(rng.integers(0, 2, queries), settings, own, {"controls": "quick"})


if __name__ == "__main__":
    main()
