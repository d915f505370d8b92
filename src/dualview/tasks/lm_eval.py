"""Multiple-choice tasks of lm-evaluation-harness, read by the harness itself (extra `lm-eval`).

A task is `lm-eval:NAME`, one of theirs, or `lm-eval:PATH.yaml`, a file in their format. Its templates and functions run
as they do in `lm_eval`, so such a file is code: name only files that you trust.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from dualview.io.errors import UserError, first_line

PREFIX = "lm-eval:"
_KEYS = ("output_type", "doc_to_text", "dataset_path", "task", "include", "group")
FUNCTION = "!function"
"""The tag of their YAML files that names a Python function."""


def is_theirs(document: Mapping[str, object]) -> bool:
    """Whether the document of a YAML is a task of the harness rather than one of dualview."""
    return any(key in document for key in _KEYS)


def describe(name: str) -> dict[str, Any]:
    """The fields of the dualview task that asks what `name`, with its prefix, asks.

    Demonstrations are drawn from their few-shot documents and queries from those they evaluate. Their validation split
    is for selection where it is neither of the two. Where their sampler is `first_n`, seed 1 shows what it shows.
    """
    task = _load(name)
    config, few = task.config, task.fewshot_cfg
    selection = task.has_test_docs() and task.has_validation_docs() and _few_split(task) != config.validation_split
    answers = config.doc_to_choice
    listed = list(answers.values()) if isinstance(answers, dict) else answers
    return {
        "name": f"lm-eval.{re.sub(r'[^A-Za-z0-9._-]+', '-', task.task_name)}",
        "template": "{text}",
        **({"labels": listed} if isinstance(listed, list) else {"choices": "choices"}),
        "separator": few.fewshot_delimiter,
        "delimiter": config.target_delimiter,
        "description": config.description or "",
        "tokens": "running",
        "scores": "sum",
        "first_n": few.sampler == "first_n",
        "train": f"{name}:demonstrations",
        "validation": f"{name}:queries",
        "selection": f"{name}:selection" if selection else None,
    }


def read_documents(source: str) -> Iterator[dict[str, Any]]:
    """The documents of `lm-eval:NAME:split` as rows: their text, their choices, and the index of the right one."""
    name, _, split = source.rpartition(":")
    task = _load(name)
    documents: dict[str, Any] = {
        "demonstrations": task.fewshot_docs,
        "queries": lambda: task.eval_docs,
        "selection": task.validation_docs,
    }
    yield from _rows(source, name, task, split, documents[split]())


def convert_documents(source: str, place: Path, documents: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Documents of a file as rows of `source`: processed and asked as the harness's own."""
    name, _, split = source.rpartition(":")
    task = _load(name)
    process = (task.fewshot_cfg if split == "demonstrations" else task.config).process_docs
    try:
        table: Any = importlib.import_module("datasets").Dataset.from_list(list(documents))
        ready = table if process is None else process(table)
    except Exception as error:  # whatever their functions raise
        raise UserError(
            f"{place} does not hold documents of {name} ({first_line(error)}); give rows with the fields of its data."
        ) from error
    yield from _rows(str(place), name, task, split, ready)


def _rows(source: str, name: str, task: Any, split: str, documents: Iterable[Any]) -> Iterator[dict[str, Any]]:
    few = task.fewshot_cfg if split == "demonstrations" else None
    for number, document in enumerate(documents, start=1):
        try:
            text = task.doc_to_text(document, few and few.doc_to_text)
            choices = list(task.doc_to_choice(document, few and few.doc_to_choice))
            target = task.doc_to_target(document, few and few.doc_to_target)
        except Exception as error:  # whatever their templates and functions raise
            raise UserError(
                f"{source}, row {number}: lm_eval cannot build the prompt ({first_line(error)}); "
                "check the row and the task's doc_to_text, doc_to_choice and doc_to_target."
            ) from error
        if not isinstance(text, str):
            raise _refused(name, "puts the choices into the question (doc_to_text is an index)")
        if isinstance(target, str) and target in choices:
            target = choices.index(target)
        if not isinstance(target, int):  # a bool is an index to the harness too
            what = "has several right answers" if isinstance(target, list) else "has an answer that is not a choice"
            raise _refused(name, f"{what} (doc_to_target of row {number})")
        yield {"text": text, "choices": choices, "label": int(target)}


def _load(name: str) -> Any:
    """The harness's own task object, its data read; what dualview cannot ask is refused."""
    path = Path(name.removeprefix(PREFIX)).expanduser()
    return _loaded(name, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=8)
def _loaded(name: str, _changed: int) -> Any:
    try:
        tasks: Any = importlib.import_module("lm_eval.tasks")
        yaml: Any = importlib.import_module("lm_eval.tasks._yaml_loader")
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"{name} needs lm-evaluation-harness ({error}); install it with: pip install 'dualview[lm-eval]'."
        ) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    asked = name.removeprefix(PREFIX)
    local = Path(asked).suffix in (".yaml", ".yml")
    if local and not Path(asked).expanduser().is_file():
        raise UserError(f"Task file {asked} does not exist; check the path.")
    try:
        manager: Any = tasks.TaskManager(include_defaults=not local)
        entry = manager.task_index.get(asked)
        path = asked if local else entry and entry.yaml_path
        document = yaml.load_yaml(path, resolve_func=False) if path else {}
        if document:
            _must_be_single(name, document)
            task = manager.load(asked)["tasks"].popitem()[1]
        elif entry is None:
            raise UserError(f"lm-evaluation-harness has no task {asked!r}; `lm_eval ls tasks` lists those it has.")
        else:
            raise _refused(name, "is a tag of several tasks")
    except UserError:
        raise
    except Exception as error:  # whatever a YAML, its functions or the data set's loader raise
        raise UserError(f"lm_eval cannot load {asked} ({first_line(error)}); check its YAML and its data.") from error
    _must_be_askable(name, task)
    return task


def _must_be_single(name: str, document: Mapping[str, Any]) -> None:
    """Refused from the YAML alone, before any data is read."""
    if "group" in document or isinstance(document.get("task"), list):
        raise _refused(name, "is a group of several tasks")
    if "task" not in document:
        raise UserError(f"{name} has no `task:`; give the task a name.")
    if "class" in document:
        raise _refused(name, "is a Python class")
    kind = document.get("output_type", "generate_until")
    if kind != "multiple_choice":
        raise _refused(name, f"has output_type {kind}")
    for key in ("doc_to_image", "doc_to_audio", "use_prompt", "gen_prefix"):
        if document.get(key) is not None:
            raise _refused(name, f"uses {key}")
    if document.get("doc_to_choice") is None:
        raise _refused(name, "has no doc_to_choice")


def _must_be_askable(name: str, task: Any) -> None:
    config, few = task.config, task.fewshot_cfg
    listed = isinstance(config.doc_to_choice, list | dict) and few.doc_to_choice not in (None, config.doc_to_choice)
    if few.target_delimiter != config.target_delimiter or few.gen_prefix is not None or listed:
        raise _refused(name, "asks its demonstrations in another way than its queries (fewshot_config)")
    if "{" in (config.description or ""):
        raise _refused(name, "has a description that changes from document to document")
    if few.samples is None and _few_split(task) == (config.test_split or config.validation_split):
        raise _refused(name, "has no split for demonstrations besides the one it evaluates")


def _few_split(task: Any) -> str | None:
    """The split that demonstrations are drawn from, by the harness's rule; None for samples in the YAML."""
    config, few = task.config, task.fewshot_cfg
    if few.split is not None or few.samples is not None:
        return few.split
    return config.training_split or config.validation_split or config.test_split


def _refused(name: str, why: str) -> UserError:
    return UserError(f"{name} {why}; dualview asks single multiple-choice questions with one right answer.")
