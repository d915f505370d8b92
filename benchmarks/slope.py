"""What in-context learning costs beyond zero-shot: the whole pass at 256 queries, and one more query.

A pass goes pack by pack; each pack's fastest of the repeats is taken, so that a moment's disturbance spoils one pack of
one repeat. The first pack comes with the prefix; the others are what further queries cost.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from common import embedded, prepared, report

from dualview.models.language_model import LanguageModel
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import Query

QUERIES, REPEATS = 256, 8


def pack_seconds(lm: LanguageModel, queries: tuple[Query, ...], how: PassPlan) -> list[float]:
    """How long each pack of a pass took."""
    ends = [time.perf_counter()]
    ask(lm, queries, how, progress=lambda _queries: ends.append(time.perf_counter()))
    return list(np.diff(ends))


def main() -> None:
    lm = embedded()
    which = prepared(lm, QUERIES)
    passes = {"zsl": replace(which.zero_shot, record=False), "icl": replace(which.in_context, record=False)}
    queries = which.prompts.queries
    ask(lm, queries[:16], passes["icl"])  # warm
    runs = [[pack_seconds(lm, queries, how) for how in passes.values()] for _ in range(REPEATS)]
    best = dict(zip(passes, np.array(runs).min(0), strict=True))
    prefix, own = len(which.prompts.prefix), sum(len(q.ids) for q in queries)
    t_zsl, t_icl = (float(best[name].sum()) for name in passes)
    report("in-context against zero-shot, 256 queries", zsl_s=t_zsl, icl_s=t_icl, prefix=prefix, query_tokens=own)
    print(f"x {t_zsl * (prefix + own) / own / t_icl:.2f}")
    packs = {name: [round(float(seconds), 3) for seconds in best[name]] for name in passes}
    report("one more query, in-context against zero-shot", seconds_a_pack=packs)
    print(f"ratio {best['icl'][1:].sum() / best['zsl'][1:].sum():.2f}")


if __name__ == "__main__":
    main()
