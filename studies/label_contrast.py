"""What flipping the labels changes in attention's output, ICL with itself in another order and with other queries.

    python studies/label_contrast.py qwen2.5-coder-0.5b ../shared/data sst2:abstract subj:abstract

For each task with 16 demonstrations and 48 queries: the mean cosine of the label contrast in the prompt's own order and
in another one (flipped alike), of the same query and of another; each as `label_contrast` has it (raw, every layer the
same), and beyond what all queries share, with layers by size (`specific_contrast`). A second line has an order in which
demonstrations change places only with others of their label: the sequence of labels stays, and with it what the last
labels do to every query.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dualview.comparison.controls.settings import REORDERED, flipped_labels, reordered
from dualview.comparison.prepare import prepare
from dualview.metrics.cosine import overall_mean
from dualview.metrics.label_contrast import label_contrast, specific_contrast
from dualview.metrics.predictions import accuracy
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import PassPlan, ask
from dualview.options import RunOptions
from dualview.records import Setting
from dualview.tasks.prompts import PromptSet
from dualview.tasks.task import shuffled

SHOTS, QUERIES, OTHERS = 16, 48, 20


def same_labels(labels: Sequence[int], key: str) -> list[int]:
    """An order of the demonstrations in which each place keeps its label."""
    order = list(range(len(labels)))
    for label in sorted(set(labels)):
        places = [place for place, own in enumerate(labels) if own == label]
        for place, moved in zip(places, shuffled(len(places), f"{key} {label}"), strict=True):
            order[place] = places[moved]
    return order


def measured(options: RunOptions, lm: LanguageModel | None) -> tuple[LanguageModel, dict[str, dict[str, float]]]:
    """What each kind of order finds, by its name."""
    prepared = prepare(options, lm)
    queries, both = prepared.prompts.queries, (prepared.prompts, flipped_labels(prepared))
    gold = np.array([query.gold for query in queries])

    def asked(plan: PassPlan) -> Setting:
        return ask(prepared.lm, queries, plan).settings[0]

    def contrast(prompts: Sequence[PromptSet]) -> list[Setting]:
        return [asked(replace(prepared.in_context, prefix=each.prefix)) for each in prompts]

    zsl, own = outputs([asked(prepared.zero_shot)])[0], contrast(both)
    right = {name: accuracy(each.log_probs, gold) for name, each in zip(("true", "flipped"), own, strict=True)}
    labels = [row.label for row in prepared.demos[: prepared.prompts.shots_used]]
    kept = same_labels(labels, REORDERED)
    orders = {
        "another order": [reordered(each, REORDERED) for each in both],
        "another order, same labels": [replace(each, demos=tuple(each.demos[at] for at in kept)) for each in both],
    }
    return prepared.lm, {
        name: {**{f"accuracy, {which}": value for which, value in right.items()}, **similar(zsl, own, contrast(again))}
        for name, again in orders.items()
    }


def outputs(settings: Sequence[Setting]) -> list[np.ndarray]:
    return [np.asarray(each.h, dtype=np.float64) for each in settings]


def similar(zsl: np.ndarray, own: Sequence[Setting], again: Sequence[Setting]) -> dict[str, float]:
    """The contrast in one order with that in another: of the same query, and of others."""
    (true, other), repeated = outputs(own), outputs(again)
    found = {"raw, same query": overall_mean(label_contrast(zsl, true, other, *repeated))}
    found["specific, same query"] = float(specific_contrast(zsl, true, other, *repeated).mean())
    moved = [[np.roll(side, shift, axis=0) for side in repeated] for shift in range(1, OTHERS + 1)]
    found["raw, another"] = float(np.mean([overall_mean(label_contrast(zsl, true, other, *each)) for each in moved]))
    found["specific, another"] = float(np.mean([specific_contrast(zsl, true, other, *each).mean() for each in moved]))
    return found


def main() -> None:
    model, data, *cells = sys.argv[1:]
    lm = None
    for cell in cells:
        task, _, labels = cell.partition(":")
        given = {"labels": labels} if labels else {}
        options = RunOptions.make(model=model, task=task, data=data, shots=SHOTS, n_queries=QUERIES, seed=1, **given)
        lm, found = measured(options, lm)
        for order, numbers in found.items():
            shown = ", ".join(f"{name} {value:+.2f}" for name, value in numbers.items())
            print(f"{cell}, {order}: {shown}", flush=True)


if __name__ == "__main__":
    main()
