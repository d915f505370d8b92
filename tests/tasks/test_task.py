"""Task files: what a good one means, and one clear sentence for every bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dualview.io.errors import UserError
from dualview.tasks.rows import Row
from dualview.tasks.sampling import sample_demos, sample_queries
from dualview.tasks.task import ABSTRACT_WORDS, Task, check_task, list_tasks, load_task, shuffled

GOOD = {
    "name": "toy",
    "template": "Q: {text} A:",
    "labels": ["no", "yes"],
    "train": "train.jsonl",
    "validation": "validation.jsonl",
}


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_task(folder: Path, train: list[dict] | None = None, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    document = {key: value for key, value in (GOOD | changes).items() if value is not None}
    (folder / "toy.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    rows = [{"text": f"train {i}", "label": i % 2} for i in range(40)] if train is None else train
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "validation.jsonl", [{"text": f"asked {i}", "label": i % 2} for i in range(10)])
    return folder / "toy.yaml"


def test_a_good_task(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path))
    assert task.separator == "\n"
    assert task.template_fields == ("text",)
    row = task.rows("validation")[3]
    assert row == Row({"text": "asked 3"}, label=1)
    assert task.render(row) == "Q: asked 3 A:"
    assert task.candidates(row) == ("no", "yes")
    check = check_task(task)
    assert {split: seen.rows for split, seen in check.splits.items()} == {
        "train": 30,
        "selection": 10,
        "validation": 10,
    }
    assert check.warnings == ()


def test_paths_are_relative_to_the_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task(tmp_path / "deep")
    monkeypatch.chdir(tmp_path)
    assert len(load_task("deep/toy.yaml").rows("validation")) == 10


def test_a_task_from_python(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a", "label": 0}])
    task = Task.model_validate(GOOD | {"train": str(path), "validation": str(path)})
    assert task.rows("validation") == [Row({"text": "a"}, 0)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"template": "no field"}, r"toy\.yaml: template: has no \{field\}"),
        ({"template": "{}"}, r"template: \{\} is not a plain field"),
        ({"template": "{text.x}"}, r"template: \{text\.x\} is not a plain field"),
        ({"template": "{text!r}"}, "template: .* is not a plain field"),
        ({"template": "{text:>9}"}, "template: .* is not a plain field"),
        ({"template": "{text"}, "template: .*write a literal brace twice"),
        ({"template": None}, "template: is missing"),
        ({"validation": None}, "validation: is missing"),
        ({"name": "a/b"}, "name: "),
        ({"name": "../b"}, "name: "),
        ({"labels": ["yes", "yes"]}, "labels: holds 'yes' twice"),
        ({"labels": ["yes", " "]}, "labels: holds a blank one"),
        ({"labels": ["yes"]}, "labels: give at least two"),
        ({"labels": []}, "labels: give either labels or"),
        ({"labels": [True, False]}, r"labels\.0: is True to YAML; put it in quotes"),
        ({"labels": [1, 2]}, r"labels\.0: is 1 to YAML; put it in quotes"),
        ({"labels": "yes"}, "labels: "),
        ({"choices": "options"}, "labels: give either labels or, for multiple choice, choices"),
        ({"labels": None, "choices": ["one"]}, "choices: lists fewer than two fields"),
        ({"separator": ""}, "separator: is empty"),
        ({"seperator": "x"}, "seperator: is not a task's key"),
        ({"_folder": "/"}, "_folder: is not a task's key"),
    ],
)
def test_bad_task_files(tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load_task(write_task(tmp_path, **changes))
    assert "toy.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not valid YAML"),
        ("- a\n- b\n", "not a mapping"),
        ("", "not a mapping"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"bad\.yaml.*{words}"):
        load_task(path)


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'nonsense' is not in the library \(agnews, "):
        load_task("nonsense")
    with pytest.raises(UserError, match=r"none\.yaml cannot be read"):
        load_task(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        (tmp_path / "folder.yaml").mkdir()
        load_task(tmp_path / "folder.yaml")


@pytest.mark.parametrize("renames", [{"text": "sentence"}, {"sentence": "text"}])
def test_a_field_is_found_under_either_name(tmp_path: Path, renames: dict) -> None:
    rows = [
        {"text": "own", "label": 0},
        {"sentence": "other", "label": 1},
        {"sentence": "x", "text": "own", "label": 1},
    ]
    task = load_task(write_task(tmp_path, fields=renames))
    read = task.read(write_rows(tmp_path / "rows.jsonl", rows))
    assert [row.fields["text"] for row in read] == ["own", "other", "own"]


def test_data_folder_replaces_the_sources(tmp_path: Path) -> None:
    path = write_task(tmp_path, train=[{"text": "a", "label": 0}])
    folder = tmp_path / "data" / "toy"
    folder.mkdir(parents=True)
    write_rows(folder / "train.jsonl", [{"text": f"here {i}", "label": 0} for i in range(8)])
    write_rows(folder / "validation.jsonl", [{"text": "there", "label": 1}])
    task = load_task(path, data=tmp_path / "data")
    assert task.rows("validation") == [Row({"text": "there"}, 1)]
    assert (len(task.rows("train")), len(task.rows("selection"))) == (6, 2)
    write_rows(folder / "selection.jsonl", [{"text": "chosen", "label": 1}])
    task = load_task(path, data=tmp_path / "data")
    assert (len(task.rows("train")), task.rows("selection")) == (8, [Row({"text": "chosen"}, 1)])
    (folder / "validation.jsonl").unlink()
    with pytest.raises(UserError, match=r"validation\.jsonl does not exist"):
        load_task(path, data=tmp_path / "data").rows("validation")
    with pytest.raises(UserError, match=r"--data needs toy/train\.jsonl"):
        load_task(path, data=tmp_path / "nowhere")


def test_a_copy_with_other_settings_reads_its_own_rows(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path, fields={"text": "other"}))
    write_rows(tmp_path / "validation.jsonl", [{"text": "t", "title": "u", "label": 0}])
    assert task.rows("validation")[0].fields == {"text": "t"}
    assert task.model_copy(update={"template": "{title}"}).rows("validation")[0].fields == {"title": "u"}


@pytest.mark.parametrize(("count", "held"), [(2, 1), (4, 1), (5, 1), (40, 10), (250, 62), (5000, 512)])
def test_selection_is_a_fixed_part_of_train(tmp_path: Path, count: int, held: int) -> None:
    rows = [
        {"text": f"t{i}", "label": int(i >= count // 2)} for i in range(count)
    ]  # sorted by label, as files often are
    path = write_task(tmp_path, train=rows)
    first, again = load_task(path), load_task(path)
    pool, chosen = first.rows("train"), first.rows("selection")
    assert len(chosen) == held and len(pool) == count - held
    assert sorted(row.fields["text"] for row in pool + chosen) == sorted(row["text"] for row in rows)
    assert (again.rows("train"), again.rows("selection")) == (pool, chosen)
    if held >= 62:
        share = sum(row.label for row in chosen[:64]) / len(chosen[:64])
        assert 0.3 < share < 0.7


def test_selection_never_shares_a_text_with_the_pool(tmp_path: Path) -> None:
    rows = [{"text": f"t{i % 9}", "label": i % 2} for i in range(60)]
    task = load_task(write_task(tmp_path, train=rows))
    with pytest.raises(UserError, match="too few different rows"):
        task.rows("selection")
    rows = [{"text": f"t{i // 2}", "label": 0} for i in range(60)]
    task = load_task(write_task(tmp_path, train=rows))
    assert not {row.fields["text"] for row in task.rows("train")} & {
        row.fields["text"] for row in task.rows("selection")
    }


def test_one_train_row_is_a_demonstration_and_no_selection(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path, train=[{"text": "only", "label": 0}]))
    assert len(task.rows("train")) == 1
    with pytest.raises(UserError, match="name a selection source"):
        task.rows("selection")


def test_check_warns_of_absent_labels_and_shared_texts(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "label": 0} for i in range(39)] + [{"text": "asked 1", "label": 0}]
    check = check_task(load_task(write_task(tmp_path, train=rows)))
    assert "train has no row labelled yes" in check.warnings
    assert any("validation has too" in warning for warning in check.warnings)


PIECES = st.text("aé %$\n\\", max_size=6)


@given(st.lists(st.tuples(PIECES, st.sampled_from(["a", "b c", "ü"])), min_size=1, max_size=5), PIECES, st.data())
def test_filling_is_str_format(parts: list[tuple[str, str]], tail: str, data: st.DataObject) -> None:
    """Against `str.format`, literal braces included; what is filled in is never read as a template again."""
    template = "".join(f"{text}{{{{{{{field}}}" for text, field in parts) + tail
    task = Task.model_validate(GOOD | {"template": template})
    values = {field: data.draw(PIECES) + "{text}" for field in task.template_fields}
    assert task.fill(values) == template.format(**values)


@given(st.integers(0, 300), st.text(max_size=5))
def test_shuffled_is_a_permutation_of_its_key_alone(count: int, key: str) -> None:
    order = shuffled(count, key)
    assert sorted(order) == list(range(count))
    assert shuffled(count, key) == order


def test_shuffled_never_changes() -> None:
    """Frozen: if this fails, every published run would draw other rows."""
    assert shuffled(10, "demos of sst2, seed 1, shots 32") == [1, 7, 3, 5, 6, 0, 2, 9, 8, 4]
    assert shuffled(5, "a") != shuffled(5, "b")


def test_the_library_parses_and_is_documented() -> None:
    tasks = {task.name: task for task in list_tasks()}
    wanted = "agnews arc_easy cb imdb movie movie5 mr piqa product rte source sst2 sst5 subj trec tweet"
    assert list(tasks) == wanted.split()
    for name, task in tasks.items():
        assert load_task(name) == task
        assert task.citation and task.licence and task.notes, name
        assert (task.choices is None) == bool(task.labels)


@pytest.mark.parametrize("task", [task for task in list_tasks() if task.labels], ids=lambda task: task.name)
def test_abstract_labels_of_the_library(task: Task) -> None:
    """Meaningless words, the same every time; no class is named in the template; the fields stay."""
    abstract = task.relabelled("abstract")
    assert abstract == load_task(task.name, labels="abstract") and task.relabelled("natural") is task
    assert len(set(abstract.labels)) == len(task.labels) and set(abstract.labels) <= set(ABSTRACT_WORDS)
    text = abstract.fill(dict.fromkeys(abstract.template_fields, "x")).lower()
    for label in (*task.labels, *abstract.labels):
        assert label.lower() not in text.replace(":", " ").split(), label
    assert set(abstract.template_fields) == set(task.template_fields)


def test_abstract_words_are_fixed() -> None:
    assert load_task("movie", labels="abstract").labels == ("Mir", "Nim")
    assert load_task("sst5", labels="abstract").labels == ("Wen", "Vik", "Sab", "Bak", "Ras")
    assert load_task("agnews", labels="abstract").template == "Article: {text} Answer:"


def test_abstract_labels_change_words_and_nothing_else(tmp_path: Path) -> None:
    path = write_task(tmp_path, abstract_labels=["foo", "bar"], abstract_template="{text} =>")
    natural, abstract = load_task(path), load_task(path, labels="abstract")
    assert natural.labels == ("no", "yes") and natural.template == "Q: {text} A:"
    assert abstract.labels == ("foo", "bar") and abstract.template == "{text} =>"
    for seed in (1, 2):
        assert sample_demos(natural, seed, 5) == sample_demos(abstract, seed, 5)
    assert sample_queries(natural) == sample_queries(abstract)
    assert natural.rows("selection") == abstract.rows("selection")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"abstract_labels": ["foo"]}, "abstract_labels: give 2 different words"),
        ({"abstract_labels": ["foo", "foo"]}, "abstract_labels: give 2 different words"),
        ({"abstract_labels": ["foo", " "]}, "abstract_labels: holds a blank one"),
        ({"abstract_template": "{other} A:"}, "abstract_template: must have the fields of template"),
        ({"abstract_template": "{text} Yes or what?"}, "abstract_template: names the label 'yes'"),
        ({"labels": None, "choices": ["a", "b"], "abstract_labels": ["foo", "bar"]}, "not for multiple choice"),
    ],
)
def test_wrong_abstract_labels(tmp_path: Path, changes: dict, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        load_task(write_task(tmp_path, **changes))


def test_tasks_that_cannot_have_abstract_labels(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"piqa is multiple choice.*use --labels natural"):
        load_task("piqa", labels="abstract")
    with pytest.raises(UserError, match=r"names the label 'no'.*add abstract_template"):
        load_task(write_task(tmp_path, template="Yes or no? {text}", labels=["no", "maybe"]), labels="abstract")
    many = write_task(tmp_path, labels=[f"l{n}" for n in range(len(ABSTRACT_WORDS) + 1)])
    with pytest.raises(UserError, match="add abstract_labels"):
        load_task(many, labels="abstract")


@pytest.mark.embedded
def test_abstract_words_are_one_token_each() -> None:
    from transformers import AutoTokenizer

    from dualview.io.assets import embedded_model

    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    assert [len(tokenizer(f" {word}").input_ids) for word in ABSTRACT_WORDS] == [1] * len(ABSTRACT_WORDS)


@pytest.mark.parametrize("value", ["[" * 3000, "1" * 5000])
def test_yaml_that_python_cannot_hold_is_one_sentence(value: str, tmp_path: Path) -> None:
    path = write_task(tmp_path)
    path.write_text(path.read_text() + f"more: {value}\n")
    with pytest.raises(UserError, match=r"toy\.yaml is not valid YAML"):
        load_task(path)
