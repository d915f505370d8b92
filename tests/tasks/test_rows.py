"""Every problem of a row is one sentence that names the file, the line and the field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dualview.io.errors import UserError
from dualview.tasks.rows import Row
from dualview.tasks.task import Task, load_task


def task(**changes: object) -> Task:
    document = {"name": "toy", "template": "Q: {text}", "labels": ["no", "yes"], "train": "t.jsonl", "validation": "v"}
    document |= changes
    return Task.model_validate({key: value for key, value in document.items() if value is not None})


def read(tmp_path: Path, which: Task, *rows: object) -> list[Row]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return which.read(path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"label": 0}, "field 'text' is missing; the template needs it; the row has 'label'"),
        ({}, "field 'text' is missing; .* no fields at all"),
        ({"text": None, "label": 0}, "field 'text' is None, not text"),
        ({"text": ["a"], "label": 0}, r"field 'text' is \['a'\], not text"),
        ({"text": True, "label": 0}, "field 'text' is True, not text"),
        ({"text": "\ud800", "label": 0}, "field 'text' holds half a surrogate pair"),
        ({"text": "a"}, "field 'label' is missing"),
        ({"text": "a", "label": "yes"}, "field 'label' is 'yes', not an integer; give a label from 0 to 1"),
        ({"text": "a", "label": "1"}, "field 'label' is '1', not an integer"),
        ({"text": "a", "label": 0.5}, "field 'label' is 0.5, not an integer"),
        ({"text": "a", "label": 1.0}, "field 'label' is 1.0, not an integer"),
        ({"text": "a", "label": float("nan")}, "field 'label' is nan, not an integer"),
        ({"text": "a", "label": True}, "field 'label' is True, not an integer"),
        ({"text": "a", "label": None}, "field 'label' is None, not an integer"),
        ({"text": "a", "label": 2}, "field 'label' is 2, out of range; give a label from 0 to 1"),
        ({"text": "a", "label": -1}, "field 'label' is -1, out of range"),
        ({"text": "a", "label": 10**30}, "field 'label' is 10+, out of range"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict, words: str) -> None:
    with pytest.raises(UserError, match=rf"rows\.jsonl, line 3: {words}") as caught:
        read(tmp_path, task(), {"text": "good", "label": 0}, row)
    assert "\n" not in str(caught.value)


def test_numbers_are_text_and_text_is_kept_as_it_is(tmp_path: Path) -> None:
    rows = read(tmp_path, task(), {"text": 12, "label": 0}, {"text": "  {a}\n ", "label": 1}, {"text": "", "label": 1})
    assert [row.fields["text"] for row in rows] == ["12", "  {a}\n ", ""]


def test_an_int_label_that_is_a_numpy_free_python_int(tmp_path: Path) -> None:
    assert read(tmp_path, task(label_field="gold"), {"text": "a", "gold": 1, "label": 0})[0].label == 1
    assert read(tmp_path, task(label_field="gold"), {"text": "a", "label": 1})[0].label == 1


MULTIPLE = {"labels": None, "choices": "options"}


def test_multiple_choice_from_a_list(tmp_path: Path) -> None:
    which = task(**MULTIPLE)
    (row,) = read(tmp_path, which, {"text": "a", "options": ["x", "y y", 3], "label": 2})
    assert row == Row({"text": "a"}, 2, ("x", "y y", "3"))
    assert which.candidates(row) == ("x", "y y", "3")
    (row,) = read(tmp_path, which, {"text": "a", "choices": ["x", "y"], "label": 0})
    assert row.choices == ("x", "y")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a", "label": 0}, "field 'options' is missing; it holds the choices"),
        ({"text": "a", "options": "xy", "label": 0}, "field 'options' is 'xy', not a list"),
        ({"text": "a", "options": {"x": 1}, "label": 0}, "field 'options' is {'x': 1}, not a list"),
        ({"text": "a", "options": None, "label": 0}, "field 'options' is None, not a list"),
        ({"text": "a", "options": ["x"], "label": 0}, r"field 'options' holds 1 choice\(s\)"),
        ({"text": "a", "options": [], "label": 0}, r"field 'options' holds 0 choice\(s\)"),
        ({"text": "a", "options": ["x", " "], "label": 0}, r"field 'options\[1\]' is blank"),
        ({"text": "a", "options": ["x", None], "label": 0}, r"field 'options\[1\]' is None, not text"),
        (
            {"text": "a", "options": ["x", "y"], "label": 2},
            "field 'label' is 2, out of range; give a label from 0 to 1",
        ),
    ],
)
def test_bad_choices(tmp_path: Path, row: dict, words: str) -> None:
    with pytest.raises(UserError, match=rf"line 2: {words}"):
        read(tmp_path, task(**MULTIPLE), row)


def test_arc_rows_from_the_hub_and_from_a_file(tmp_path: Path) -> None:
    arc = load_task("arc_easy")
    nested = {"text": ["w", "x", "y"], "label": ["A", "B", "C"]}
    digits = {"text": ["w", "x", "y"], "label": ["1", "2", "3"]}
    rows = read(
        tmp_path,
        arc,
        {"id": 1, "question": "q", "choices": nested, "answerKey": "C"},
        {"id": 2, "question": "q", "choices": digits, "answerKey": "1"},
        {"question": "q", "choices": ["w", "x", "y"], "label": 1},
    )
    assert [row.label for row in rows] == [2, 0, 1]
    assert {row.choices for row in rows} == {("w", "x", "y")}
    with pytest.raises(UserError, match=r"field 'answerKey' is 'D', which is not in 'choices\.label'"):
        read(tmp_path, arc, {"question": "q", "choices": nested, "answerKey": "D"})
    with pytest.raises(UserError, match="field 'answerKey' is 'A', which is not in"):
        read(tmp_path, arc, {"question": "q", "choices": {"text": ["a", "b"]}, "answerKey": "A"})


def test_piqa_rows_from_the_hub_and_from_a_file(tmp_path: Path) -> None:
    piqa = load_task("piqa")
    rows = read(
        tmp_path,
        piqa,
        {"goal": "g", "sol1": "a", "sol2": "b", "label": 1},
        {"goal": "g", "choices": ["a", "b"], "label": 0},
    )
    assert [(row.choices, row.label) for row in rows] == [(("a", "b"), 1), (("a", "b"), 0)]
    with pytest.raises(UserError, match="field 'sol2' is missing"):
        read(tmp_path, piqa, {"goal": "g", "sol1": "a", "label": 1})
