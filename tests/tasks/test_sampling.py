"""Demonstrations depend on (task, seed, shots) alone, queries on neither seed nor shots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dualview.io.errors import UserError
from dualview.tasks.rows import Row
from dualview.tasks.sampling import read_rows, sample_demos, sample_queries, selection_rows
from dualview.tasks.task import Task, load_task


def make(tmp_path: Path, name: str = "toy", train: int = 100, extra: str = "") -> Task:
    for split, count in (("train", train), ("validation", 50)):
        lines = (json.dumps({"text": f"{split} {i}", "label": i % 2}) for i in range(count))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    path = tmp_path / f"{name}.yaml"
    path.write_text(
        f'name: {name}\ntemplate: "{{text}}"\nlabels: ["no", "yes"]\ntrain: train.jsonl\nvalidation: validation.jsonl\n'
        + extra
    )
    return load_task(path)


def texts(rows: list[Row]) -> list[str]:
    return [row.fields["text"] for row in rows]


def test_demos_are_a_draw_without_replacement_from_train_only(tmp_path: Path) -> None:
    task = make(tmp_path)
    for seed in range(20):
        drawn = texts(sample_demos(task, seed, 32))
        assert len(set(drawn)) == 32
        assert set(drawn) <= set(texts(task.rows("train")))
        assert not set(drawn) & set(texts(task.rows("selection")))


def test_demos_depend_on_task_seed_and_shots_alone(tmp_path: Path) -> None:
    task = make(tmp_path)
    first = sample_demos(task, 1, 8)
    assert sample_demos(load_task(tmp_path / "toy.yaml"), 1, 8) == first
    assert sample_demos(task.model_copy(update={"separator": "eos"}), 1, 8) == first
    assert sample_demos(task, 2, 8) != first
    assert sample_demos(task, 1, 9)[:8] != first
    assert sample_demos(make(tmp_path, name="other"), 1, 8) != first


def test_demos_are_drawn_evenly(tmp_path: Path) -> None:
    """Over 400 seeds each of the 75 pool rows is drawn about as often: 400 · 15 / 75 = 80 times, give or take 5 σ."""
    task = make(tmp_path)
    counts = dict.fromkeys(texts(task.rows("train")), 0)
    for seed in range(400):
        for text in texts(sample_demos(task, seed, 15)):
            counts[text] += 1
    sigma = (400 * 0.2 * 0.8) ** 0.5
    assert all(abs(count - 80) < 5 * sigma for count in counts.values())


def test_all_of_the_pool_and_one_more(tmp_path: Path) -> None:
    task = make(tmp_path)
    assert sorted(texts(sample_demos(task, 3, 75))) == sorted(texts(task.rows("train")))
    with pytest.raises(
        UserError, match=r"--shots is 76 but task toy has 75 demonstration rows .*held out for selection"
    ):
        sample_demos(task, 3, 76)
    for shots in (0, -1):
        with pytest.raises(UserError, match="at least one demonstration"):
            sample_demos(task, 3, shots)


def test_queries(tmp_path: Path) -> None:
    task = make(tmp_path)
    everything = sample_queries(task)
    assert sorted(texts(everything)) == sorted(texts(task.rows("validation")))
    assert everything != task.rows("validation")
    assert sample_queries(task, 7) == everything[:7]
    assert sample_queries(task, 999) == everything
    assert sample_queries(task, seed=2) != everything
    with pytest.raises(UserError, match="--n-queries is 0"):
        sample_queries(task, 0)


def test_selection_rows_are_the_first_of_the_split(tmp_path: Path) -> None:
    task = make(tmp_path, train=400)
    assert selection_rows(task) == task.rows("selection")[:64]
    named = make(tmp_path, name="named", extra="selection: validation.jsonl\n")
    assert texts(selection_rows(named, 3)) == ["validation 0", "validation 1", "validation 2"]
    assert len(named.rows("train")) == 100


def test_given_rows_are_taken_exactly(tmp_path: Path) -> None:
    task = make(tmp_path)
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "b", "label": 1}\n{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n')
    assert texts(read_rows(task, path)) == ["b", "a", "b"]
    path.write_text('{"text": "b", "label": 5}\n')
    with pytest.raises(UserError, match=r"mine\.jsonl, line 1: field 'label' is 5, out of range"):
        read_rows(task, str(path))
