"""Label scoring with 32 shots, against lm-evaluation-harness on the same prompts (`pip install lm_eval==0.4.13`)."""

from __future__ import annotations

import logging

import numpy as np
import torch
from common import embedded, fastest, must_agree, prepared, report, sizes, texts
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from dualview.models.scoring import ask
from dualview.tasks.prompts import build_prompts
from dualview.tasks.sampling import sample_queries


def main(task: str = "movie", seed: int = 1, queries: int = 64, shots: int = 32, tries: int = 2) -> None:
    logging.disable(logging.WARNING)
    lm = embedded()
    which = prepared(lm, queries, task=task, seed=seed, shots=shots)
    rows = sample_queries(which.task, queries)
    how = which.in_context.__class__(which.prompts.prefix, len(which.prompts.zero_prefix), record=False)

    def ours() -> np.ndarray:
        prompts = build_prompts(which.task, lm.tokenizer, which.demos, rows)
        return ask(lm, prompts.queries, how).settings[0].log_probs

    whole = texts(which, rows)

    models = {n: HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=n, device="cpu") for n in (1, 4, 8)}

    def theirs(batch: int) -> np.ndarray:
        requests = [
            Instance("loglikelihood", {}, (context, candidate), i)
            for i, (context, candidates) in enumerate(whole)
            for candidate in candidates
        ]
        found = models[batch].loglikelihood(requests, disable_tqdm=True)
        return np.array([score for score, _ in found]).reshape(len(whole), -1)

    ours(), models[1].loglikelihood([Instance("loglikelihood", {}, ("a", " b"), 0)], disable_tqdm=True)  # warm
    works = {"ours": ours, **{batch: lambda batch=batch: theirs(batch) for batch in models}}
    others = fastest(works, tries)
    mine = others.pop("ours")
    best = min(others, key=lambda batch: others[batch].seconds)
    if any(len(query.candidates[0]) > 1 for query in which.prompts.queries):
        raise SystemExit("the labels have several tokens: ours are means over them, theirs sums")
    must_agree("log-probabilities", float(abs(mine.found - others[best].found).max()), 1e-4)
    same = (mine.found.argmax(1) == others[best].found.argmax(1)).all()
    if not same or len(np.unique(mine.found.argmax(1))) < 2:
        raise SystemExit("the predictions differ, or are all the same label")
    report(
        f"label scoring, {shots} shots, {queries} queries",
        task=task,
        tries=tries,
        ours_s=mine.seconds,
        theirs_s={batch: round(t.seconds, 2) for batch, t in others.items()},
        best_batch=best,
        labels_predicted=len(np.unique(mine.found.argmax(1))),
        same_predictions=bool(same),
        largest_difference=f"{abs(mine.found - others[best].found).max():.1e}",
    )
    tokens = len(which.prompts.prefix), sum(len(q.ids) for q in which.prompts.queries)
    ceiling = (queries * tokens[0] + tokens[1]) / (tokens[0] + tokens[1])
    print(f"ratio {others[best].seconds / mine.seconds:.1f} (ceiling by tokens {ceiling:.1f})")


if __name__ == "__main__":
    torch.manual_seed(0)
    main(**sizes(__doc__, queries=64, shots=32, seed=1, tries=2))
