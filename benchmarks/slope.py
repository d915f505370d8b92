"""What in-context learning costs beyond zero-shot: the whole pass at 256 queries, and one more query."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from common import embedded, prepared, report, timed

from dualview.models.passes import ask

QUERIES = 256


def main() -> None:
    lm = embedded()
    which = prepared(lm, QUERIES)
    zsl, icl = replace(which.zero_shot, record=False), replace(which.in_context, record=False)
    queries = which.prompts.queries
    ask(lm, queries[:16], icl)  # warm
    times = {
        n: (
            timed(lambda n=n: ask(lm, queries[:n], zsl), 3).seconds,
            timed(lambda n=n: ask(lm, queries[:n], icl), 3).seconds,
        )
        for n in (64, 128, 192, 256)
    }
    prefix, own = len(which.prompts.prefix), sum(len(q.ids) for q in queries)
    t_zsl, t_icl = times[QUERIES]
    efficiency = t_zsl * (prefix + own) / own / t_icl
    sizes = np.array([sum(len(q.ids) for q in queries[:n]) for n in times])
    slopes = [np.polyfit(sizes, [t[i] for t in times.values()], 1)[0] for i in (0, 1)]
    report("in-context against zero-shot, 256 queries", zsl_s=t_zsl, icl_s=t_icl, prefix=prefix, query_tokens=own)
    print(f"x {efficiency:.2f}")
    report("one more query, in-context against zero-shot", slope_zsl=slopes[0], slope_icl=slopes[1])
    print(f"ratio {slopes[1] / slopes[0]:.2f}")


if __name__ == "__main__":
    main()
