"""A whole cell against the protocol as released: whole prompts one at a time, eager attention, full maps, JSON records.

The baseline does what the published program does, in the same library: for each of zero-shot, in-context and
fine-tuned, every query alone, `output_attentions` on, the attention module's output and the last row of the maps of
every layer written as JSON text and read back by the metrics; fine-tuning one demonstration a step by autograd and SGD.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import embedded, fastest, must_agree, prepared, report, sizes

from dualview.comparison.run import run
from dualview.models.language_model import LanguageModel
from dualview.options import RunOptions
from dualview.tasks.prompts import PromptSet

LR = 0.003


def released(lm: LanguageModel, prompts: PromptSet, folder: Path) -> tuple[dict[str, list[list[float]]], float]:
    """Every setting's scores, and SimAOU."""
    model: Any = copy.deepcopy(lm.model)
    model.set_attn_implementation("eager")
    found = {
        "zsl": _ask(model, prompts, prompts.zero_prefix, folder / "zsl.jsonl"),
        "icl": _ask(model, prompts, prompts.prefix, folder / "icl.jsonl"),
    }
    trained = [p for name, p in model.named_parameters() if "k_proj" in name or "v_proj" in name]
    for p in trained:
        p.requires_grad_()
    optimizer = torch.optim.SGD(trained, lr=LR)
    for sequence in prompts.training_sequences:
        ids = torch.tensor([sequence.ids])
        optimizer.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        optimizer.step()
    found["ft"] = _ask(model, prompts, prompts.zero_prefix, folder / "ft.jsonl")
    records = {name: [json.loads(line) for line in (folder / f"{name}.jsonl").open()] for name in found}
    return found, _similarity(records)


def _ask(model: Any, prompts: PromptSet, prefix: tuple[int, ...], path: Path) -> list[list[float]]:
    outputs: list[Any] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda _m, _i, out: outputs.append(out[0][0, -1]))
        for layer in model.model.layers
    ]
    scores: list[list[float]] = []
    with path.open("w") as file, torch.no_grad():
        for query in prompts.queries:
            outputs.clear()
            ids = torch.tensor([[*prefix, *query.ids]])
            found = model(input_ids=ids, use_cache=False, output_attentions=True)
            log_probs = torch.log_softmax(found.logits[0, -1], -1)
            scores.append([float(log_probs[candidate[0]]) for candidate in query.candidates])
            rows = [a[0, :, -1, len(prefix) :].tolist() for a in found.attentions]
            file.write(json.dumps({"h": [h.tolist() for h in outputs], "m": rows}) + "\n")
    for hook in hooks:
        hook.remove()
    return scores


def _similarity(records: dict[str, list[dict[str, Any]]]) -> float:
    values: list[float] = []
    for zsl, icl, ft in zip(records["zsl"], records["icl"], records["ft"], strict=True):
        for a, b, c in zip(zsl["h"], icl["h"], ft["h"], strict=True):
            u, v = np.array(b) - np.array(a), np.array(c) - np.array(a)
            values.append(float(u @ v / (np.linalg.norm(u) * np.linalg.norm(v))))
    return float(np.mean(values))


def main(queries: int = 64, shots: int = 32, tries: int = 2) -> None:
    lm = embedded()
    which = prepared(lm, queries, shots=shots)
    options = RunOptions.make(n_queries=queries, shots=shots, lr=LR, controls="none")
    run(RunOptions.make(n_queries=4, shots=2, lr=LR, controls="none"), lm=lm)  # warm
    with tempfile.TemporaryDirectory() as folder:
        both = {"ours": lambda: run(options, lm=lm), "theirs": lambda: released(lm, which.prompts, Path(folder))}
        ours, theirs = fastest(both, tries).values()
    scores, similarity = theirs.found
    worst = max(
        abs(a - b)
        for name in ("zsl", "icl", "ft")
        for mine, row in zip(ours.found.queries, scores[name], strict=True)
        for a, b in zip(getattr(mine, name), row, strict=True)
    )
    must_agree("log-probabilities", worst, 1e-3)
    must_agree("SimAOU", abs(similarity - ours.found.sim_aou.raw), 1e-3)
    report(
        f"a whole cell, {shots} shots, {queries} queries",
        tries=tries,
        ours_s=ours.seconds,
        released_s=theirs.seconds,
        largest_difference=worst,
    )
    print(f"ratio {theirs.seconds / ours.seconds:.1f}")


if __name__ == "__main__":
    main(**sizes(__doc__, queries=64, shots=32, tries=2))
