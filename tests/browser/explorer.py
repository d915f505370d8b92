"""The explorer as a person uses it, and the same question put to the library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dualview.analyses.explain import Explanation, explain
from dualview.models.language_model import LanguageModel
from dualview.verbs import run as compare
from equivalence import tiny

DEMOS = [("the film was fine", 1), ("a dull story", 0), ("very warm and clever", 1)]
QUERY = "the plot was slow and very dull"


class Reference:
    """The same question put to the library, from files written here."""

    def __init__(self, lm: LanguageModel, folder: Path) -> None:
        self.lm, self.folder = lm, folder

    def _options(self, demos: Sequence[tuple[str, int]], query: str, lr: float) -> dict[str, Any]:
        tiny.write_rows(self.folder / "d.jsonl", [{"text": text, "label": label} for text, label in demos])
        tiny.write_rows(self.folder / "q.jsonl", [{"text": query, "label": 0}])
        task = {"name": "t", "template": "Review: {text} Sentiment:", "labels": ["Negative", "Positive"]}
        task |= {"train": "d.jsonl", "validation": "q.jsonl"}
        (self.folder / "t.yaml").write_text(yaml.safe_dump(task))
        return {"model": self.lm, "task": str(self.folder / "t.yaml"), "demos": self.folder / "d.jsonl", "lr": lr}

    def explain(self, demos: Sequence[tuple[str, int]], query: str = QUERY, lr: float = 0.05) -> Explanation:
        return explain(query=query, **self._options(demos, query, lr))

    def compare(self, demos: Sequence[tuple[str, int]], query: str = QUERY, lr: float = 0.05) -> dict[str, Any]:
        return compare(**self._options(demos, query, lr), queries=self.folder / "q.jsonl").to_json()


def write_demos(page: Any) -> None:
    """As a person would: clear all, then type, add, type …"""
    page.get_by_role("button", name="Clear all").click()
    for number, (text, label) in enumerate(DEMOS):
        if number > 0:
            page.get_by_role("button", name="Add a demonstration").click()
        page.get_by_label(f"Demonstration {number}: text").fill(text)
        flip = page.get_by_role("button", name=f"Label of demonstration {number}:")
        if flip.inner_text() != ["Negative", "Positive"][label]:
            flip.click()
    page.get_by_label("Query: text").fill(QUERY)
    page.locator("#lr").fill("0.05")


def run(page: Any) -> None:
    from playwright.sync_api import expect

    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#status")).to_contain_text("Done in")


def numbers(page: Any) -> dict[str, list[str]]:
    """The probabilities on the page, as they are written there."""
    return {name: page.locator(f"#setting-{name} .value").all_inner_texts() for name in ("zsl", "icl", "ft")}


def expected(e: Explanation) -> dict[str, list[str]]:
    shares = {name: np.exp(scores) / np.exp(scores).sum() for name, scores in e.log_probs.items()}
    return {name: [f"{share:.3f}" for share in each] for name, each in shares.items()}


def settled(page: Any, wanted: dict[str, list[str]]) -> None:
    """The page runs again by itself after a change; in the end it shows these numbers."""
    from playwright.sync_api import expect

    for name, texts in wanted.items():
        expect(page.locator(f"#setting-{name} .value")).to_have_text(texts)
    expect(page.locator("#status")).to_contain_text("Done in")
