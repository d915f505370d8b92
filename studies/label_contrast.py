"""What flipping the labels changes in attention's output, ICL with itself in another order and with other queries.

    python studies/label_contrast.py qwen2.5-coder-0.5b ../shared/data sst2:abstract subj:abstract

For each task with 16 demonstrations and 48 queries: the mean cosine of the label contrast in the prompt's own order and
in another one (flipped alike), of the same query and of another; each as `label_contrast` has it (raw, every layer the
same), and beyond what all queries share, with layers by size (`specific_contrast`).
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from dualview.comparison.controls.settings import REORDERED, flipped_labels, reordered
from dualview.comparison.prepare import prepare
from dualview.metrics.cosine import overall_mean
from dualview.metrics.label_contrast import label_contrast, specific_contrast
from dualview.metrics.predictions import accuracy
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import ask
from dualview.options import RunOptions

SHOTS, QUERIES, OTHERS = 16, 48, 20


def measured(options: RunOptions, lm: LanguageModel | None) -> tuple[LanguageModel, dict[str, float]]:
    prepared = prepare(options, lm)
    queries, flipped = prepared.prompts.queries, flipped_labels(prepared)
    orders = [each for own in (prepared.prompts, flipped) for each in (own, reordered(own, REORDERED))]
    plans = [prepared.zero_shot, *(replace(prepared.in_context, prefix=each.prefix) for each in orders)]
    asked, gold = [ask(prepared.lm, queries, plan).settings[0] for plan in plans], np.array([q.gold for q in queries])
    zsl, true, true_again, other, other_again = (np.asarray(each.h, dtype=np.float64) for each in asked)
    found = {f"accuracy, {name}": [accuracy(asked[at].log_probs, gold)] for name, at in (("true", 1), ("flipped", 3))}
    found |= {"raw, same query": [overall_mean(label_contrast(zsl, true, other, true_again, other_again))]}
    found["specific, same query"] = [float(specific_contrast(zsl, true, other, true_again, other_again).mean())]
    for shift in range(1, OTHERS + 1):
        moved = [np.roll(side, shift, axis=0) for side in (true_again, other_again)]
        found.setdefault("raw, another", []).append(overall_mean(label_contrast(zsl, true, other, *moved)))
        found.setdefault("specific, another", []).append(float(specific_contrast(zsl, true, other, *moved).mean()))
    return prepared.lm, {name: float(np.mean(values)) for name, values in found.items()}


def main() -> None:
    model, data, *cells = sys.argv[1:]
    lm = None
    for cell in cells:
        task, _, labels = cell.partition(":")
        given = {"labels": labels} if labels else {}
        options = RunOptions.make(model=model, task=task, data=data, shots=SHOTS, n_queries=QUERIES, seed=1, **given)
        lm, found = measured(options, lm)
        print(cell, ", ".join(f"{name} {value:+.2f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
