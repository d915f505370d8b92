"""The papers' six tasks in full, from rows next to the repository, through the embedded model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualview.io.assets import embedded_model
from dualview.tasks.prompts import build_prompts
from dualview.tasks.sampling import sample_demos, sample_queries, selection_rows
from dualview.tasks.task import check_task, load_task

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SIX = {  # task → (validation rows, the first validation row rendered by hand from these fields, label words)
    "sst2": (872, "Sentence: {text} Label:", "Negative Positive"),
    "sst5": (1101, "Sentence: {text} Label:", "terrible bad neutral good great"),
    "mr": (1066, "Review: {text} Sentiment:", "Negative Positive"),
    "subj": (2000, "Input: {text} Type:", "objective subjective"),
    "agnews": (
        7600,
        "Classify the news articles into the categories of World, Sports, Business, and Technology. "
        "Article: {text} Answer:",
        "World Sports Business Technology",
    ),
    "cb": (56, "{premise} Question: {hypothesis}. True, False, or Neither? Answer:", "True False Neither"),
}
pytestmark = [
    pytest.mark.skipif(not DATA.is_dir(), reason="needs the papers' six tasks as rows in ../shared/data"),
    pytest.mark.embedded,
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_model())


@pytest.mark.parametrize("name", SIX)
def test_a_paper_task_from_files(name: str, tokenizer: Any) -> None:
    count, template, words = SIX[name]
    task = load_task(name, data=DATA)
    check = check_task(task)
    assert check.splits["validation"].rows == count
    assert all(min(split.label_counts) > 0 for split in check.splits.values())
    assert task.labels == tuple(words.split())
    demos, queries, selection = sample_demos(task, 1, 32), sample_queries(task, 100), selection_rows(task)
    pool = {task.render(row) for row in demos}
    assert not pool & {task.render(row) for row in selection}
    raw = json.loads((DATA / name / "validation.jsonl").read_text(encoding="utf-8").split("\n")[0])
    assert task.render(task.rows("validation")[0]) == template.format(**raw)
    prompts = build_prompts(task, tokenizer, demos, queries, max_context=8192)
    assert prompts.bos is None and prompts.shots_used == 32
    spoken = "".join(f"{task.render(row)} {task.labels[row.label]}\n" for row in demos)
    assert tokenizer.decode(prompts.prefix) == spoken
    assert all(len(candidate) == 1 for candidate in prompts.queries[0].candidates)  # as comparison.md says of the six
    short = build_prompts(task, tokenizer, demos, queries, max_context=len(prompts.prefix) // 2 + 300)
    assert 1 <= short.shots_used < 32 and short.demos == prompts.demos[: short.shots_used]
