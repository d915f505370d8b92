"""Packed prompts against whole ones: the largest difference of any label's log-probability, in each dtype.

The whole prompts are run by transformers alone: each query after all demonstrations, one at a time, with the model's
own attention. In a narrower dtype the two ways round differently at every step, so how far whole prompts in that dtype
are from whole prompts in the first one is printed too: that is what rounding costs without any packing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import must_agree, prepared, report, timed

from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import PromptSet

WITHIN = 1e-3
"""How far apart the two may be in float32 and float64."""


def packed(lm: LanguageModel, prompts: PromptSet) -> np.ndarray:
    """[query, candidate] scores, all queries behind one prefix."""
    if not lm.fast:
        raise SystemExit(f"{lm.name} runs whole prompts in {lm.dtype}: {lm.whole_because}")
    how = PassPlan(prompts.prefix, len(prompts.zero_prefix), record=False)
    return np.asarray(ask(lm, prompts.queries, how).settings[0].log_probs)


def whole(lm: LanguageModel, prompts: PromptSet) -> np.ndarray:
    """The same scores, from transformers' own pass over every prompt."""
    scores = np.full((len(prompts.queries), max(len(q.candidates) for q in prompts.queries)), np.nan)
    with torch.no_grad():
        for i, query in enumerate(prompts.queries):
            read: dict[tuple[int, ...], torch.Tensor] = {}  # candidates of one token share a pass
            for j, candidate in enumerate(query.candidates):
                tokens, start = len(candidate), candidate[:-1]
                if start not in read:
                    ids = torch.tensor([[*prompts.prefix, *query.ids, *start]], device=lm.device)
                    logits = lm.model(input_ids=ids, use_cache=False, logits_to_keep=tokens).logits[0]
                    read[start] = torch.log_softmax(logits.double().cpu(), -1)
                scores[i, j] = float(read[start][range(tokens), list(candidate)].mean())
    return scores


def apart(one: np.ndarray, two: np.ndarray) -> float:
    """The largest difference; a query with fewer candidates than others has none at the end of its row."""
    return float(np.nanmax(abs(one - two)))


def compare(lm: LanguageModel, prompts: PromptSet, first: np.ndarray | None, **about: Any) -> np.ndarray:
    """Both ways for one dtype, and what they differ by; returns the scores of whole prompts."""
    ours, theirs = timed(lambda: packed(lm, prompts)), timed(lambda: whole(lm, prompts))
    gap = apart(ours.found, theirs.found)
    dtype = str(lm.dtype).removeprefix("torch.")
    report(
        f"packed against whole prompts, {lm.name}, {dtype}",
        **about,
        shots=prompts.shots_used,
        queries=len(prompts.queries),
        prefix_tokens=len(prompts.prefix),
        largest_difference=f"{gap:.2g}",
        mean_difference=f"{float(np.nanmean(abs(ours.found - theirs.found))):.2g}",
        same_predictions=float((np.nanargmax(ours.found, 1) == np.nanargmax(theirs.found, 1)).mean()),
        whole_from_first_dtype=None if first is None else f"{apart(theirs.found, first):.2g}",
        packed_s=ours.seconds,
        whole_s=theirs.seconds,
    )
    print(f"{dtype}: largest difference {gap:.2g}")
    if lm.dtype in (torch.float32, torch.float64):
        must_agree(f"log-probabilities in {dtype}", gap, WITHIN)
    return theirs.found


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--task", default="movie")
    parser.add_argument("--data", type=Path, default=None, help="as `dualview run --data`")
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args(given)
    first: np.ndarray | None = None
    for dtype in asked.dtypes.split(","):
        lm = load_model(asked.model, dtype=dtype, device=asked.device)
        which = prepared(lm, asked.queries, task=asked.task, data=asked.data, shots=asked.shots)
        found = compare(lm, which.prompts, first, task=asked.task)
        first = found if first is None else first


if __name__ == "__main__":
    main()
