"""Every number of a result, worked out again from the contract alone: own tokens, own prompts, own loops.

The model runs by `reference` (one whole prompt at a time, float64) and trains by `training`; metrics are plain Python.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dualview.tasks.prompts import TrainingSequence
from equivalence import reference, tiny, training

SETTINGS = ("zsl", "icl", "ft")


class Words:
    """The tiny tokenizer again, by hand: newlines are words, spaces part words, what is unknown is <unk>."""

    def __init__(self, folder: Path):
        self.ids: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]

    def __call__(self, text: str) -> list[int]:
        words = [word for line in text.replace("\n", " \n ").split(" ") for word in [line] if word]
        return [self.ids.get(word, 0) for word in words]


@dataclass
class Setup:
    """One run as the contract describes it. Rows are {"text", "label"}, and {"choices"} where each has its own."""

    folder: Path
    demos: Sequence[dict[str, Any]]
    queries: Sequence[dict[str, Any]]
    lr: float
    at: str = "prompt"
    bos: bool = True
    separator: str = "\n"
    context: int = 256
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.words = Words(self.folder)
        self.base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float64).eval()
        self.twin = reference.copy_of(self.base).requires_grad_(False)
        self.start = [1] if self.bos else []
        self.used = self._that_fit()

    def text(self, row: dict[str, Any]) -> list[int]:
        return self.words(f"Review: {row['text']} Sentiment:")

    def candidates(self, row: dict[str, Any]) -> list[list[int]]:
        return [self.words(" " + label) for label in row.get("choices", tiny.LABELS)]

    def demo(self, row: dict[str, Any]) -> list[int]:
        between = [2] if self.separator == "eos" else self.words(self.separator)
        return self.text(row) + self.candidates(row)[row["label"]] + between

    def _that_fit(self) -> Sequence[dict[str, Any]]:
        longest = max(len(self.text(row)) + max(len(c) for c in self.candidates(row)) for row in self.queries)
        kept = len(self.demos)
        while len(self.start) + sum(len(self.demo(row)) for row in self.demos[:kept]) + longest > self.context:
            kept -= 1
        return self.demos[:kept]

    @property
    def prefix(self) -> list[int]:
        return self.start + [token for row in self.used for token in self.demo(row)]

    @property
    def sequences(self) -> list[TrainingSequence]:
        return [
            TrainingSequence(
                tuple(self.start + self.text(row) + self.candidates(row)[row["label"]]),
                label_start=len(self.start) + len(self.text(row)),
            )
            for row in self.used
        ]

    def train(self, lr: float | None = None) -> training.Trained:
        return training.train(self.base, "llama", self.sequences, self.lr if lr is None else lr, **self.training)

    def ask(self, twin: PreTrainedModel, prefix: list[int], rows: Sequence[dict[str, Any]]) -> list[reference.Answer]:
        special = len(self.start)
        return [reference.answer(twin, prefix, special, self.text(r), self.candidates(r))[self.at] for r in rows]

    def calibrated(self, twin: PreTrainedModel, prefix: list[int], rows: Sequence[dict[str, Any]]) -> float:
        """Accuracy with each candidate's probability divided by its mean share of three questions without content."""
        right = 0
        for row, found in zip(rows, self.ask(twin, prefix, rows), strict=True):
            prior = np.zeros(len(self.candidates(row)))
            for filler in ("N/A", "", "[MASK]"):
                empty = reference.answer(
                    twin, prefix, len(self.start), self.text({"text": filler}), self.candidates(row)
                )
                weights = np.exp(empty["prompt"].log_probs)
                prior += weights / weights.sum() / 3
            right += int(np.argmax(np.exp(found.log_probs) / prior)) == row["label"]
        return right / len(rows)

    def numbers(self) -> dict[str, Any]:
        """The contract's JSON, less provenance and what is only bookkeeping."""
        trained = self.train()
        answers = {
            "zsl": self.ask(self.twin, self.start, self.queries),
            "icl": self.ask(self.twin, self.prefix, self.queries),
            "ft": self.ask(trained.model, self.start, self.queries),
        }
        gold = [row["label"] for row in self.queries]
        scores = {name: [answer.log_probs for answer in answers[name]] for name in SETTINGS}
        right = {name: [_first_best(s) == g for s, g in zip(scores[name], gold, strict=True)] for name in SETTINGS}
        return {
            "task": {"shots": len(self.demos), "shots_used": len(self.used), "n_queries": len(self.queries)},
            "accuracy": {name: sum(right[name]) / len(gold) for name in SETTINGS},
            "rec2ftp": rec2ftp(right),
            "sim_aou": _sim_aou(answers),
            "sim_am": _sim_am(answers),
            "update_norm": _update_norms(answers),
            "ft": {"steps": len(trained.losses), "losses": trained.losses, "final_loss": trained.losses[-1]},
            "demo_mass": {"mean": _mean([float(np.mean(np.stack(a.demo_mass))) for a in answers["icl"]])},
            "queries": [{"gold": g, **{n: scores[n][i] for n in SETTINGS}} for i, g in enumerate(gold)],
        }


def accuracy(answers: Sequence[reference.Answer], rows: Sequence[dict[str, Any]]) -> float:
    return sum(_first_best(a.log_probs) == row["label"] for a, row in zip(answers, rows, strict=True)) / len(rows)


def _first_best(scores: Sequence[float]) -> int:
    best = 0
    for index, score in enumerate(scores):
        if score > scores[best]:
            best = index
    return best


def rec2ftp(right: dict[str, list[bool]]) -> dict[str, Any]:
    wrong = [i for i, ok in enumerate(right["zsl"]) if not ok]
    by_ft = [i for i in wrong if right["ft"][i]]
    by_icl = [i for i in wrong if right["icl"][i]]
    both = [i for i in by_ft if i in by_icl]
    n, good, drawn = len(wrong), len(by_icl), len(by_ft)
    p = None
    if drawn:
        ways = sum(math.comb(good, x) * math.comb(n - good, drawn - x) for x in range(len(both), min(good, drawn) + 1))
        p = ways / math.comb(n, drawn)
    return {
        "value": len(both) / drawn if drawn else None,
        "n_ft": drawn,
        "n_both": len(both),
        "chance": good / n if n else None,
        "p": p,
        "reverse": len(both) / good if good else None,
    }


def _length(x: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in x))


def _cosine(a: Any, b: Any, zsl_length: float) -> float | None:
    x, y = _length(a), _length(b)
    if x < 1e-4 * zsl_length or y < 1e-4 * zsl_length:
        return None
    return math.fsum(p * q for p, q in zip(a, b, strict=True)) / (x * y)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _layers(name: str, table: list[list[float | None]]) -> dict[str, Any]:
    """`table[query][layer]`: per-layer means over queries, then their mean over layers."""
    per_layer = [_mean([row[layer] for row in table]) for layer in range(len(table[0]))]
    return {name: _mean(per_layer), f"{name}_per_layer": per_layer}


def _sim_aou(answers: dict[str, list[reference.Answer]]) -> dict[str, Any]:
    raw: list[list[float | None]] = []
    normalised: list[list[float | None]] = []
    for zsl, icl, ft in zip(*(answers[name] for name in SETTINGS), strict=True):
        raw.append([])
        normalised.append([])
        for z, i, f in zip(zsl.h, icl.h, ft.h, strict=True):
            raw[-1].append(_cosine(i - z, f - z, _length(z)))
            z, i, f = (x / _length(x) for x in (z, i, f))
            normalised[-1].append(_cosine(i - z, f - z, 1.0))
    norms = _update_norms(answers)
    lean = [1 - 1 / math.sqrt(1 + norms[name] ** 2) for name in ("icl", "ft")]
    return {
        **_layers("raw", raw),
        **_layers("normalised", normalised),
        "noise_floor": 0.5 * math.sqrt(lean[0] * lean[1]),
    }


def _sim_am(answers: dict[str, list[reference.Answer]]) -> dict[str, Any]:
    tables: dict[str, list[list[float | None]]] = {"before": [], "after": [], "delta": []}
    for zsl, icl, ft in zip(*(answers[name] for name in SETTINGS), strict=True):
        for table in tables.values():
            table.append([])
        for z, i, f in zip(zsl.m, icl.m, ft.m, strict=True):
            heads: dict[str, list[float | None]] = {"before": [], "after": [], "delta": []}
            for a, b, c in zip(z, i, f, strict=True):
                heads["before"].append(_cosine(b, a, _length(a)))
                heads["after"].append(_cosine(b, c, _length(a)))
                heads["delta"].append(_cosine(b - a, c - a, _length(a)))
            for name, values in heads.items():
                tables[name][-1].append(_mean(values))
    return {key: value for name, table in tables.items() for key, value in _layers(name, table).items()}


def _update_norms(answers: dict[str, list[reference.Answer]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("icl", "ft"):
        sizes = [
            _length(s - z) / _length(z)
            for zsl, setting in zip(answers["zsl"], answers[name], strict=True)
            for z, s in zip(zsl.h, setting.h, strict=True)
        ]
        found[name] = math.fsum(sizes) / len(sizes)
    return found


def differences(expected: Any, found: Any, within: float = 1e-6, where: str = "") -> list[str]:
    """Every place where the found JSON does not hold what was expected; keys beyond it are no matter."""
    if isinstance(expected, dict):
        missing = [f"{where}.{key} is missing" for key in expected if key not in found]
        pairs = [(f"{where}.{key}", value, found[key]) for key, value in expected.items() if key in found]
        return missing + [line for path, a, b in pairs for line in differences(a, b, within, path)]
    if isinstance(expected, list | tuple):
        if not isinstance(found, list) or len(found) != len(expected):
            return [f"{where}: {found!r} for {expected!r}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, within, f"{where}[{i}]")]
    if expected is None or found is None or isinstance(expected, int | str):
        return [] if expected == found else [f"{where}: {found!r} for {expected!r}"]
    return [] if abs(expected - found) < within else [f"{where}: {found!r} for {expected!r}"]
