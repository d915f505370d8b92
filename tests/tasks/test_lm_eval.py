"""Tasks of lm-evaluation-harness: the tokens and accuracies are those of the harness itself, on rows of this file."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.api.samplers import FirstNSampler
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import dualview
from dualview.analyses.certificate.architectures import random_model
from dualview.io.errors import UserError
from dualview.models.reader import load_reader
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import build_prompts, content_free_queries
from dualview.tasks.sampling import sample_demos
from dualview.tasks.show_prompt import ShownPrompt
from dualview.tasks.task import Task, check_task, list_tasks, load_task

THEIRS = Path(lm_eval.__file__).parent / "tasks"
SHOTS, QUERIES = 4, 6
WORDS = ("river", "stone", "market", "winter", "garden", "letter", "engine", "window", "doctor", "bridge", "candle")


def sentences(kind: int) -> dict[str, Any]:
    words = f"{WORDS[kind % 11]} and a {WORDS[(kind * 7 + 3) % 11]} "
    mood = ("a dull, lifeless", "a warm and lovely")[kind % 2]
    return {"sentence": f"{mood} film about a {words}", "label": kind % 2}


def questions(kind: int) -> dict[str, Any]:
    names = ["A", "B", "C", "D"] if kind % 3 else ["1", "2", "3"]  # ARC has rows of both kinds
    texts = [f"the {WORDS[(kind + 4 * place) % 11]}." for place in range(len(names))]
    return {
        "question": f"What is next to the {WORDS[kind % 11]} in picture {kind}?",
        "choices": {"text": texts, "label": names},
        "answerKey": names[kind % len(names)],
    }


def causes(kind: int) -> dict[str, Any]:
    return {
        "premise": f"The {WORDS[kind % 11]} broke on day {kind}.",
        "question": ("cause", "effect")[kind % 2],
        "choice1": f"The {WORDS[(kind + 5) % 11]} fell on it.",
        "choice2": f"The {WORDS[(kind + 9) % 11]} was repaired.",
        "label": kind % 2,
    }


def facts(kind: int) -> dict[str, Any]:
    return {
        "support": f"  Every {WORDS[kind % 11]} has a number, and this one has {kind}.",
        "question": f"What has the number {kind}?",
        **{f"distractor{n}": WORDS[(kind + 3 * n) % 11] for n in (1, 2, 3)},
        "correct_answer": WORDS[kind % 11],
    }


def exams(kind: int) -> dict[str, Any]:
    choices = [f"the {WORDS[(kind + 2 * place) % 11]}" for place in range(4)]
    return {"question": f" Which of them has number {kind}? ", "choices": choices, "answer": kind % 4}


TASKS: dict[str, tuple[str, Any]] = {
    "sst2": ("glue/sst2/default.yaml", sentences),
    "arc_easy": ("arc/arc_easy.yaml", questions),
    "copa": ("super_glue/copa/default.yaml", causes),  # its templates are Python functions
    "sciq": ("sciq/sciq.yaml", facts),
    "mmlu": ("mmlu/default/_default_template_yaml", exams),
}


def write(folder: Path, name: str, train: int = 24, **changes: Any) -> str:
    """Their YAML of a task with rows of ours, as `--task` takes it."""
    path, row = TASKS[name]
    splits = {"train": range(train), "validation": range(100, 106), "test": range(200, 200 + QUERIES)}
    splits["dev"] = splits["train"]
    for split, kinds in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row(kind)) + "\n" for kind in kinds))
    document = {
        "include": str(THEIRS / path),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(folder / f"{split}.jsonl") for split in splits}},
        **changes,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(document))
    return f"lm-eval:{folder / name}.yaml"


@cache
def model() -> Any:
    """Small, with random weights: equal numbers are wanted, not good ones."""
    return random_model("llama", load_reader("embedded").tokenizer, seed=0)


@cache
def harness() -> Any:
    return HFLM(pretrained=model().model, tokenizer=model().tokenizer, batch_size=4, device="cpu")


def theirs(name: str, task: Task, seed: int = 1) -> Any:
    """The harness's task, made to show dualview's demonstrations in dualview's order."""
    (found,) = TaskManager(include_defaults=False).load(name.removeprefix("lm-eval:"))["tasks"].values()
    documents = list(found.fewshot_docs())
    drawn = [int(row.where.rpartition(" ")[2]) - 1 for row in sample_demos(task, seed, SHOTS)]
    found.sampler = FirstNSampler([documents[index] for index in drawn])
    return found


CASES = [
    ("sst2", {}),
    ("arc_easy", {}),
    ("copa", {}),
    ("sciq", {}),
    ("sst2", {"description": "Films, good and bad.\n\n", "fewshot_delimiter": "\n###\n", "target_delimiter": "\n"}),
    ("arc_easy", {"doc_to_text": "Q: {{question}} A: "}),  # a blank at the end belongs to the answer
]


@pytest.mark.embedded
@pytest.mark.parametrize("bos", ["auto", "yes"])
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_prompts_are_theirs_token_for_token(tmp_path: Path, name: str, changes: dict[str, Any], bos: Any) -> None:
    asked = write(tmp_path, name, **changes)
    task = load_task(asked)
    other = theirs(asked, task)
    tokenizer = model().tokenizer
    queries = task.rows("validation")
    prompts = build_prompts(task, tokenizer, sample_demos(task, 1, SHOTS), queries, bos=bos)
    start = () if bos == "auto" else (tokenizer.bos_token_id,)
    assert len(queries) == len(list(other.eval_docs)) and prompts.shots_used == SHOTS
    for document, query in zip(other.eval_docs, prompts.queries, strict=True):
        for shots, prefix in ((0, prompts.zero_prefix), (SHOTS, prompts.prefix)):
            context = other.fewshot_context(document, num_fewshot=shots)
            requests = other.construct_requests(document, context)
            assert len(requests) == len(query.candidates)
            for request, candidate in zip(requests, query.candidates, strict=True):
                before, after = harness()._encode_pair(*request.args)
                assert (*prefix, *query.ids) == (*start, *before) and candidate == tuple(after)
    for demo, row in zip(prompts.demos, sample_demos(task, 1, SHOTS), strict=True):
        assert tokenizer.decode(demo.ids) == (
            task.render(row) + task.delimiter + task.candidates(row)[row.label] + task.separator
        )
    for sequence, row in zip(prompts.training_sequences, sample_demos(task, 1, SHOTS), strict=True):
        text = tokenizer.decode(sequence.ids[len(start) :])
        assert text == task.description + task.render(row) + task.delimiter + task.candidates(row)[row.label]


@pytest.mark.embedded
@pytest.mark.parametrize(("name", "changes"), [CASES[0], CASES[1], CASES[2], CASES[4]])
def test_accuracies_are_theirs(
    tmp_path: Path, name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It describes the machine in every result, by some ten programs that it starts.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
    asked = write(tmp_path, name, **changes)
    task = load_task(asked)
    result = dualview.run(model=model(), task=asked, shots=SHOTS, lr=0.01, controls="none", n_queries=100)
    rows = task.rows("validation")
    prompts = build_prompts(task, model().tokenizer, sample_demos(task, 1, SHOTS), rows)
    special = len(prompts.zero_prefix)
    for setting, shots, prefix in (("zsl", 0, prompts.zero_prefix), ("icl", SHOTS, prompts.prefix)):
        found = lm_eval.simple_evaluate(
            harness(),
            tasks=[theirs(asked, task)],
            task_manager=TaskManager(include_defaults=False),  # or it reads all its thousands of files each time
            num_fewshot=shots,
            bootstrap_iters=0,
            random_seed=None,
        )
        assert found is not None
        (scores,), (samples,) = found["results"].values(), found["samples"].values()
        assert result.accuracy.by_setting[setting] == scores["acc,none"]
        ours = ask(model(), prompts.queries, PassPlan(prefix, special, record=False)).settings[0].log_probs
        for sample, log_probs in zip(sorted(samples, key=lambda sample: sample["doc_id"]), ours, strict=True):
            expected = [score for ((score, _),) in sample["resps"]]
            assert log_probs[: len(expected)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.embedded
@pytest.mark.parametrize(("name", "shots", "train"), [("mmlu", 5, 5), ("sciq", SHOTS, 40)])
def test_first_n_is_theirs_without_any_help(
    tmp_path: Path, name: str, shots: int, train: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where their sampler is `first_n` (MMLU), the default seed shows their demonstrations; other seeds draw."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
    changes = {"task": "mmlu_of_ours"} if name == "mmlu" else {"fewshot_config": {"sampler": "first_n"}}
    asked = write(tmp_path, name, train=train, **changes)
    result = dualview.run(model=model(), task=asked, shots=shots, lr=0.01, controls="none", n_queries=100)
    for setting, count in (("zsl", 0), ("icl", shots)):
        found = lm_eval.simple_evaluate(
            harness(),
            tasks=[asked.removeprefix("lm-eval:")],
            task_manager=TaskManager(include_defaults=False),
            num_fewshot=count,
            bootstrap_iters=0,
        )
        assert found is not None
        (scores,), (samples,) = found["results"].values(), found["samples"].values()
        assert result.accuracy.by_setting[setting] == scores["acc,none"]
    task = load_task(asked)
    prompts = build_prompts(task, model().tokenizer, sample_demos(task, 1, shots), task.rows("validation"))
    for sample, query in zip(sorted(samples, key=lambda sample: sample["doc_id"]), prompts.queries, strict=True):
        shown = harness()._encode_pair(sample["arguments"][0][0], sample["arguments"][0][1])[0]
        assert (*prompts.prefix, *query.ids) == tuple(shown)
    assert sample_demos(task, 2, shots) != sample_demos(task, 1, shots)
    if train > 32:  # the last rows are for selection, never the first
        assert {row.where for row in task.rows("selection")}.isdisjoint(row.where for row in task.rows("train"))
    else:
        assert len(task.rows("train")) == train
        with pytest.raises(UserError, match="give --lr"):
            task.rows("selection")


def test_documents_of_files(tmp_path: Path) -> None:
    """`--demos` and `--queries` take the harness's documents, processed and asked as the harness does."""
    (tmp_path / "utils.py").write_text(
        "def half(docs):\n    return docs.filter(lambda doc: doc['label'] == 1)\n"
        "def loud(docs):\n    return docs.map(lambda doc: {'sentence': doc['sentence'].upper()})\n"
    )
    asked = write(tmp_path, "sst2", fewshot_config={"doc_to_text": "Shown: {{sentence}}"})
    path = Path(asked.removeprefix("lm-eval:"))
    path.write_text(path.read_text() + "process_docs: !function utils.loud\n")
    task, file = load_task(asked), tmp_path / "test.jsonl"
    queries, demos = task.read(file), task.read(file, "train")
    assert [(task.render(row), row.label) for row in queries] == [
        (f"{sentences(kind)['sentence'].upper()}\nQuestion: Is this sentence positive or negative?\nAnswer:", kind % 2)
        for kind in range(200, 200 + QUERIES)
    ]
    assert [task.render(row) for row in demos] == [f"Shown: {sentences(200 + n)['sentence'].upper()}" for n in range(6)]
    path.write_text(path.read_text().replace("utils.loud", "utils.half"))
    assert [row.label for row in load_task(asked).read(file)] == [1, 1, 1]
    file.write_text('{"text": "no such field", "label": 1}\n')
    with pytest.raises(UserError, match=r"row 1: lm_eval cannot build the prompt"):
        load_task(asked).read(file)


def test_labels_that_are_true_or_false(tmp_path: Path) -> None:
    asked = write(tmp_path, "sst2")
    for split in ("train", "validation", "test"):
        path = tmp_path / f"{split}.jsonl"
        path.write_text(path.read_text().replace('"label": 0', '"label": false').replace('"label": 1', '"label": true'))
    labels = [row.label for row in load_task(asked).rows("validation")]
    assert labels == [kind % 2 for kind in range(100, 106)]


@pytest.mark.embedded
def test_a_task_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lm-eval:sst2` finds their file; only the data set comes from here."""
    import datasets

    write(tmp_path, "sst2")
    local = datasets.load_dataset("json", data_files={s: str(tmp_path / f"{s}.jsonl") for s in ("train", "validation")})
    monkeypatch.setattr(datasets, "load_dataset", lambda **_: local)
    task = load_task("lm-eval:sst2")
    assert task.labels == ("negative", "positive") and task.name == "lm-eval.sst2"
    assert check_task(task).splits["validation"].rows == 6
    assert task.render(task.rows("validation")[0]) == (
        sentences(100)["sentence"] + "\nQuestion: Is this sentence positive or negative?\nAnswer:"
    )


def test_splits_and_rows(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, "arc_easy"))
    assert [len(task.rows(split)) for split in ("train", "selection", "validation")] == [24, 6, QUERIES]
    row = task.rows("validation")[1]
    assert row.choices == tuple(questions(201)["choices"]["text"]) and row.choices[row.label].startswith("the ")
    # Without a split that is left over, a part of the train rows is for selection; two have a text of the pool.
    only = load_task(write(tmp_path, "sst2", test_split=None))
    assert [len(only.rows(split)) for split in ("train", "selection", "validation")] == [18, 4, 6]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    assert load_task(write(tmp_path, "sst2")).labels == ("negative", "positive")
    assert load_task(write(tmp_path, "sst2", doc_to_choice=["bad", "good"])).labels == ("bad", "good")


REFUSED = [
    ({"output_type": "generate_until"}, "output_type generate_until"),
    ({"output_type": "loglikelihood"}, "output_type loglikelihood"),
    ({"doc_to_text": "{{label}}"}, "puts the choices into the question"),
    ({"doc_to_target": "{{[0, 1]}}"}, "several right answers"),
    ({"doc_to_target": "sentence"}, "not a choice"),
    ({"training_split": None}, "no split for demonstrations"),
    ({"gen_prefix": "It is"}, "gen_prefix"),
    ({"doc_to_choice": None}, "doc_to_choice"),
    ({"description": "About {{sentence}}"}, "description"),
    ({"group": "many", "task": ["sst2"]}, "group"),
    ({"fewshot_config": {"target_delimiter": "\n"}}, "another way"),
    ({"fewshot_config": {"doc_to_choice": ["bad", "good"]}}, "another way"),
    ({"doc_to_text": "{{nothing}}"}, "lm_eval cannot"),
    ({"doc_to_text": "{{sentence"}, "lm_eval cannot"),
    ({"dataset_kwargs": {"data_files": "missing.jsonl"}}, "lm_eval cannot load"),
    ({"include": "missing.yaml"}, "lm_eval cannot load"),
    ({"validation_split": "nowhere"}, "lm_eval cannot load"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        load_task(write(tmp_path, "sst2", **changes)).rows("validation")
    assert "\n" not in str(refused.value) and str(refused.value).endswith(".")


@pytest.mark.parametrize("asked", ["lm-eval:no-such-task", "lm-eval:no/such/file.yaml"])
def test_unknown_names(asked: str) -> None:
    with pytest.raises(UserError, match=r"has no task|does not exist"):
        load_task(asked)


def test_their_yaml_without_the_prefix(tmp_path: Path) -> None:
    path = write(tmp_path, "sst2").removeprefix("lm-eval:")
    base = Path(path).read_text()
    for text in (base, "include: other.yaml\ntask: mine\n", "process_docs: !function utils.half\n" + base):
        Path(path).write_text(text)
        with pytest.raises(UserError, match=f"--task lm-eval:{path}"):
            load_task(path)


def test_missing_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = write(tmp_path, "sst2", doc_to_choice=["no", "yes"])
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match=r"pip install 'dualview\[lm-eval\]'"):
        load_task(asked)


def test_calibration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--calibrate"):
        content_free_queries(load_task(write(tmp_path, "sst2")), model().tokenizer, ((1,), (2,)))


def test_generation_task_from_the_command_line(tmp_path: Path) -> None:
    asked = write(tmp_path, "sst2", output_type="generate_until")
    done = subprocess.run(
        [sys.executable, "-m", "dualview", "run", "--task", asked, "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "out").exists()
    assert done.stderr.count("\n") == 1 and "output_type generate_until" in done.stderr


@pytest.mark.embedded
def test_a_query_that_merges_with_the_text_before_it_is_refused(tmp_path: Path) -> None:
    asked = write(tmp_path, "sst2", fewshot_delimiter="", doc_to_text="lines of {{sentence}} is")
    task = load_task(asked)
    with pytest.raises(UserError, match="other tokens after the demonstrations"):
        build_prompts(task, model().tokenizer, sample_demos(task, 1, SHOTS), task.rows("validation"))


@pytest.mark.embedded
def test_the_description_is_shown(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, "sst2", description="Films.\n\n"))
    prompts = build_prompts(task, model().tokenizer, sample_demos(task, 1, 2), task.rows("validation"))
    shown = ShownPrompt(prompts, model().tokenizer).tokens
    assert "".join(str(token["text"]) for token in shown if token["span"] == "description") == "Films.\n\n"
    assert [token["index"] for token in shown if token["span"] != "candidate"] == list(
        range(len(prompts.prefix) + len(prompts.queries[0].ids))
    )


def test_keys_of_stored_cells_do_not_change() -> None:
    """The fields that came with running text are left out of a task's document where they have their default."""
    for task in list_tasks():
        assert (
            not {"delimiter", "description", "tokens", "scores", "first_n"} & json.loads(task.model_dump_json()).keys()
        )
