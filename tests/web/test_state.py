"""What a page may ask, and that its files and its command line say the same."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualview.comparison.single_query import query_row
from dualview.io.errors import UserError
from dualview.tasks.sampling import read_rows
from dualview.tasks.task import load_task
from dualview.web.run_files import commands, files, query_text, written
from dualview.web.state import MOST_CHARACTERS, MOST_DEMOS, DrawQuery, State, read
from web.live import document, row

SERVER = {"dtype": "float32", "device": "auto"}


def state_of(**changes: Any) -> State:
    return State.model_validate({**document("embedded"), **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"template": "no field"}, "field"),
        ({"template": "{text"}, "brace"),
        ({"template": "{text.__class__}"}, "plain field"),
        ({"template": "{label} {text}"}, "label or choices"),
        ({"template": "{text} {other}"}, "other, text"),
        ({"template": "x" * (MOST_CHARACTERS + 1)}, "template"),
        ({"labels": ["one"]}, "at least two"),
        ({"labels": ["same", "same"]}, "differ"),
        ({"labels": ["a", " "]}, "blank"),
        ({"labels": [str(n) for n in range(17)]}, "labels"),
        ({"separator": ""}, "separator"),
        ({"demos": []}, "demos"),
        ({"demos": [row("x", 0)] * (MOST_DEMOS + 1)}, "demos"),
        ({"demos": [row("x", 2)]}, "label 2"),
        ({"demos": [row("x", -1)]}, "demonstration 0, label: must be at least 0"),
        ({"demos": [row("x", None)]}, "no label"),
        ({"demos": [row("x\0y", 0)]}, "NUL"),
        ({"demos": [row("x" * (MOST_CHARACTERS + 1), 0)]}, "characters"),
        ({"demos": [{**row("x", 0), "choices": ["a", "b"]}]}, "choices"),
        ({"query": row("x", 5)}, "query"),
        ({"lr": -1}, "lr: must be at least 0"),
        ({"lr": 1.5}, "lr: must be at most 1"),
        ({"lr": "fast"}, "lr: must be a number"),
        ({"epochs": 6}, "epochs: must be at most 5"),
        ({"epochs": 1.5}, "epochs: must be a whole number"),
        ({"ft_loss": "some"}, "ft_loss: must be 'all' or 'label'"),
        ({"drawn": {"task": "movie", "shots": 65}}, "shots"),
        ({"surprise": 1}, "surprise"),
        ({"model": None}, "model"),
    ],
)
def test_mistakes_are_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        read(State, json.dumps({**document("embedded"), **changes}).encode())
    sentence = str(error.value)
    assert said in sentence and sentence.endswith(".") and "\n" not in sentence
    assert "Input should" not in sentence and "Field required" not in sentence and "_length}" not in sentence


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"model": "\\ud800"}', b'{"lr": NaN}', b"9" * 999],
)
def test_what_is_no_state_is_refused(body: bytes) -> None:
    for kind in (State, DrawQuery):
        with pytest.raises(UserError):
            read(kind, body)


# What people type, and worse; XML-like control characters are text too.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
labels = st.lists(
    texts.filter(lambda x: bool(x.strip())).filter(lambda x: len(x) <= 50), min_size=2, max_size=4, unique=True
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=texts,
    after=texts,
    labels=labels,
    separator=texts.filter(bool),
    demos=st.lists(texts, min_size=1, max_size=3),
    query=texts,
)
def test_the_files_hold_what_was_typed(
    tmp_path: Path, before: str, after: str, labels: list[str], separator: str, demos: list[str], query: str
) -> None:
    def literal(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    state = state_of(
        template=f"{literal(before)}{{text}}{literal(after)}",
        labels=labels,
        separator=separator,
        demos=[row(text, 1) for text in demos],
        query=row(query, None),
    )
    for name, text in files(state).items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="\n")
        assert "END" not in text.split("\n")
    task = load_task(tmp_path / "task.yaml")
    assert (task.template, list(task.labels), task.separator) == (state.template, labels, separator)
    assert [task.render(r) for r in read_rows(task, tmp_path / "demos.jsonl")] == [before + x + after for x in demos]
    assert query_row(task, query_text(state)).fields == {"text": query}
    script = f"cd {tmp_path}\nrm -f *.jsonl *.yaml\n{commands(state, SERVER, None)[1]['files']}"
    subprocess.run(["bash", "-c", script], check=True)
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in files(state)} == files(state)


def test_errors_do_not_name_the_temporary_folder() -> None:
    with pytest.raises(UserError) as error, written(state_of(), SERVER) as options:
        folder = Path(str(options.demos)).parent
        raise UserError(f"{options.demos}, line 3 is wrong.")
    assert str(error.value) == "demos.jsonl, line 3 is wrong."
    assert not folder.exists()


def test_several_fields_and_choices_are_asked_as_json() -> None:
    two = {"fields": {"a": "x", "b": "y"}, "label": 0, "choices": None}
    state = state_of(template="{a} and {b}", demos=[two], query=two)
    assert json.loads(query_text(state)) == {"a": "x", "b": "y"}
    own = {"fields": {"text": "x"}, "label": 1, "choices": ["p", "q"]}
    state = state_of(labels=[], demos=[own], query=own)
    assert json.loads(query_text(state)) == {"text": "x", "choices": ["p", "q"]}
    brace = state_of(query=row('{"text": 1}', None))
    assert json.loads(query_text(brace)) == {"text": '{"text": 1}'}
