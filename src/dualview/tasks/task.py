"""A task: a template, its labels, and where its rows come from, as one YAML file."""

from __future__ import annotations

import hashlib
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from dualview.io.errors import UserError, first_problem
from dualview.io.json_files import Place, check_place, save_json
from dualview.options import Labels
from dualview.tasks import lm_eval
from dualview.tasks.rows import Row, RowShape, parse_row
from dualview.tasks.sources import RawRow, read_file, read_source

SplitName = Literal["train", "selection", "validation"]
SPLITS: tuple[SplitName, ...] = ("train", "selection", "validation")
HELD_OUT_SHARE, HELD_OUT_MOST, FEW_FIRST = 4, 512, 32
_MISSING = object()

ABSTRACT_WORDS = (
    *("Bak", "Bol", "Dag", "Dor", "Fen", "Gon", "Hob", "Kel", "Kor", "Lar", "Lod", "Mir"),
    *("Nak", "Nim", "Pel", "Ras", "Sab", "Tam", "Tib", "Tol", "Vel", "Vik", "Wen", "Zam"),
)
"""Meaningless words for labels: each is one token, with the space before it, of the Llama and Qwen vocabularies that
were checked (SmolLM2, Qwen2.5). The list is fixed: a task's words depend on its name and on this list."""


class Task(BaseModel):
    """What to ask, what may be answered, and where the rows come from.

    Sources (`train`, `selection`, `validation`) are a jsonl, csv or parquet path relative to the YAML,
    `hf:dataset@revision/config:split`, `lm-eval:NAME:split`, or `embedded:NAME:split`. A task that names no `selection`
    holds a part of its train rows out for it (see `rows`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    template: str
    """The question, with `{field}`s; as in `str.format`, `{{` and `}}` are literal braces."""
    labels: tuple[str, ...] = ()
    """The answers, in the order of the rows' integer labels; left out for a multiple-choice task."""
    choices: str | tuple[str, ...] | None = None
    """Multiple choice: the field that holds a row's list of candidates (a dotted path reaches into nested fields), or
    one field for each candidate. The label is the right one's index."""
    separator: str = "\n"
    """Text between demonstrations, or `eos` for the tokenizer's EOS id."""
    delimiter: str = " "
    """Text between a question and its answer."""
    description: str = ""
    """Text before everything else, the zero-shot question included."""
    tokens: Literal["pieces", "running"] = "pieces"
    """How prompts become tokens: piece by piece (see `prompts`), or as running text, as lm-evaluation-harness does."""
    scores: Literal["mean", "sum"] = "mean"
    """Whether an answer's score is the mean or the sum of its tokens' log-probabilities."""
    first_n: bool = False
    """Seed 1 takes the first train rows, as the sampler of lm-evaluation-harness with this name; other seeds draw."""
    train: str
    validation: str
    selection: str | None = None
    label_field: str = "label"
    """Where the label is; a row without it may have it under `label`."""
    answer_labels: str | None = None
    """Multiple choice whose label is a name ('C'): the path of the row's list of such names."""
    fields: dict[str, str] = {}
    """Renames: a field of the template may be found in a row under either name of its entry."""
    abstract_labels: tuple[str, ...] = Field(default=(), exclude=True)
    """The meaningless words of `--labels abstract`; without them, words of `ABSTRACT_WORDS` chosen by the task's name.
    Neither they nor the template below are part of a key: the task that `relabelled` returns has them in `labels`."""
    abstract_template: str | None = Field(default=None, exclude=True)
    """The template of `--labels abstract`, for a task whose own template names its classes."""
    citation: str = ""
    licence: str = ""
    notes: str = ""

    _folder: Path = PrivateAttr(default=Path())
    _data: Path | None = PrivateAttr(default=None)
    _known: dict[str, tuple[Row, ...]] = PrivateAttr(default_factory=dict[str, tuple[Row, ...]])
    _commits: dict[str, str] = PrivateAttr(default_factory=dict[str, str])

    @model_validator(mode="after")
    def _coherent(self) -> Task:
        if not self.template_fields:
            raise ValueError("template: has no {field}; name the row's field it should show")
        if (self.choices is None) != bool(self.labels):
            raise ValueError("labels: give either labels or, for multiple choice, choices")
        if self.choices is None and len(self.labels) < 2:
            raise ValueError("labels: give at least two")
        for label in self.labels:
            if not label.strip():
                raise ValueError("labels: holds a blank one; give every label a word")
            if self.labels.count(label) > 1:
                raise ValueError(f"labels: holds {label!r} twice; labels must differ")
        if isinstance(self.choices, tuple) and len(self.choices) < 2:
            raise ValueError("choices: lists fewer than two fields; name one field for each candidate")
        self._check_abstract()
        if not self.separator and self.tokens == "pieces":
            raise ValueError("separator: is empty; give some text, or eos")
        return self

    def _check_abstract(self) -> None:
        words, template = self.abstract_labels, self.abstract_template
        if (words or template is not None) and not self.labels:
            raise ValueError("abstract_labels, abstract_template: are for a task with labels, not for multiple choice")
        if words and (len(set(words)) != len(self.labels) or len(words) != len(self.labels)):
            raise ValueError(f"abstract_labels: give {len(self.labels)} different words, one for each label")
        if not all(word.strip() for word in words):
            raise ValueError("abstract_labels: holds a blank one; give every label a word")
        if template is None:
            return
        if {field for _, field in _pieces(template)} - {None} != set(self.template_fields):
            raise ValueError("abstract_template: must have the fields of template")
        if (label := _named_in(template, self.labels)) is not None:
            raise ValueError(f"abstract_template: names the label {label!r}; leave it out")

    def relabelled(self, labels: Labels) -> Task:
        """The task itself, or with `abstract` a copy with meaningless label words and a template without the classes.

        Its rows, and so its demonstrations and queries, are the same.
        """
        if labels == "natural":
            return self
        if not self.labels:
            raise UserError(
                f"Task {self.name} is multiple choice, so its answers are its rows' own and cannot be abstract; "
                "use --labels natural."
            )
        template = self.template if self.abstract_template is None else self.abstract_template
        if (label := _named_in(template, self.labels)) is not None:
            raise UserError(
                f"The template of task {self.name} names the label {label!r}, so --labels abstract needs another: add "
                "abstract_template, without the labels, to the task's YAML."
            )
        words = self.abstract_labels
        if not words:
            if len(self.labels) > len(ABSTRACT_WORDS):
                raise UserError(
                    f"Task {self.name} has {len(self.labels)} labels and only {len(ABSTRACT_WORDS)} abstract words are "
                    "known; add abstract_labels to the task's YAML."
                )
            order = shuffled(len(ABSTRACT_WORDS), f"abstract labels of {self.name}")
            words = tuple(ABSTRACT_WORDS[index] for index in order[: len(self.labels)])
        return self.model_copy(update={"labels": words, "template": template})

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the fields that came later, where they have their default: stored cells keep their keys."""
        later = {"delimiter": " ", "description": "", "tokens": "pieces", "scores": "mean", "first_n": False}
        return {key: value for key, value in handler(self).items() if later.get(key, _MISSING) != value}

    @property
    def template_fields(self) -> tuple[str, ...]:
        """The template's fields, in order of first use."""
        return tuple(dict.fromkeys(field for _, field in _pieces(self.template) if field is not None))

    def render(self, row: Row) -> str:
        """The template with the row's fields filled in, byte for byte."""
        return self.fill(row.fields)

    def fill(self, values: Mapping[str, str]) -> str:
        return "".join(text + ("" if field is None else values[field]) for text, field in _pieces(self.template))

    def candidates(self, row: Row) -> tuple[str, ...]:
        """The answers the row chooses from: its own choices, or the task's labels."""
        return self.labels if row.choices is None else row.choices

    def rows(self, split: SplitName) -> list[Row]:
        """All rows of a split, validated.

        `train` is the pool demonstrations are drawn from. Without a selection source of its own, the task holds out a
        quarter of its train rows for selection, at most 512 (none of a single row): the first ones of a shuffle seeded
        by the task's name, less those with a text that the pool has too, so the two never share a text. Where seed 1
        shows the first rows (`first_n`), the last ones are held out, and none of 32 or fewer.
        """
        if split == "validation":
            return list(self._read(cast(str, self.source("validation"))))
        pool, held_out = self._training()
        if split == "train":
            return list(pool)
        if not held_out:
            raise UserError(
                f"Task {self.name} has no selection rows: {self.source('train')} has too few different rows to hold "
                "some out; add train rows, name a selection source, or give --lr and --seed as numbers."
            )
        return list(held_out)

    def source(self, split: SplitName) -> str | None:
        """Where a split is read from: the task's own source, or its file in the `--data` folder."""
        if self._data is None:
            return {"train": self.train, "selection": self.selection, "validation": self.validation}[split]
        path = self._data / self.name / f"{split}.jsonl"
        return None if split == "selection" and not path.exists() else str(path.absolute())

    def read(self, path: Path, split: SplitName = "validation") -> list[Row]:
        """The rows of any row file, validated as this task's; of lm-evaluation-harness's tasks, its documents."""
        raws = read_file(path)
        source = self.source(split)
        if source is not None and source.startswith(lm_eval.PREFIX):
            made = lm_eval.convert_documents(source, path, (raw.values for raw in raws))
            raws = [RawRow(f"{path}, row {number}", values) for number, values in enumerate(made, start=1)]
        return [parse_row(raw, self._shape) for raw in raws]

    @property
    def _shape(self) -> RowShape:
        return RowShape(
            fields=self.template_fields,
            renames=self.fields,
            label_field=self.label_field,
            n_labels=len(self.labels),
            choices=self.choices,
            answer_labels=self.answer_labels,
        )

    def _read(self, source: str) -> tuple[Row, ...]:
        # The key holds all that decides the rows, so that a copy of the task with other settings never reads stale
        # ones.
        shape = self._shape
        key = repr((source, self._folder, shape))
        if key not in self._known:
            raw_rows = read_source(source, self._folder, self._commits)
            self._known[key] = tuple(parse_row(raw, shape) for raw in raw_rows)
        return self._known[key]

    @property
    def commits(self) -> Mapping[str, str]:
        """The hub's commit behind every `hf:` source that was read."""
        return dict(self._commits)

    def _training(self) -> tuple[Sequence[Row], Sequence[Row]]:
        """The pool of demonstrations and the selection rows."""
        rows = self._read(cast(str, self.source("train")))
        selection = self.source("selection")
        if selection is not None:
            return rows, self._read(selection)
        fewest = FEW_FIRST if self.first_n else 1  # a handful of rows in a fixed order is all for showing
        count = min(HELD_OUT_MOST, max(1, len(rows) // HELD_OUT_SHARE)) if len(rows) > fewest else 0
        order = shuffled(len(rows), f"selection of {self.name}") if not self.first_n else [*range(len(rows))][::-1]
        pool = [rows[index] for index in sorted(order[count:])]
        pool_texts = {self.render(row) for row in pool}
        return pool, [rows[index] for index in order[:count] if self.render(rows[index]) not in pool_texts]


def shuffled(count: int, key: str) -> list[int]:
    """The numbers 0 … count − 1 in an order that depends on `key` alone.

    They are sorted by raw 64-bit words of a PCG64 seeded with the key's sha256: numpy promises never to change that
    stream, which it does not promise for `Generator.permutation`.
    """
    words = np.random.PCG64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:16])).random_raw(count)
    return [int(index) for index in np.argsort(words, kind="stable")]


def _pieces(template: str) -> list[tuple[str, str | None]]:
    """The template as (literal text, field after it) pairs; a field is a bare name."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"template: {error}; write a literal brace twice") from None
    for _, field, spec, conversion in parsed:
        if field is not None and (not field or spec or conversion or any(mark in field for mark in ".[]")):
            raise ValueError(f"template: {{{field}}} is not a plain field; write {{name}}")
    return [(text, field) for text, field, _, _ in parsed]


def _named_in(template: str, labels: Sequence[str]) -> str | None:
    """The first label that the template's own text holds as a word."""
    text = " ".join(piece for piece, _ in _pieces(template))
    return next((one for one in labels if re.search(rf"(?<!\w){re.escape(one)}(?!\w)", text, re.IGNORECASE)), None)


def load_task(name_or_path: str | Path, data: Path | None = None, labels: Labels = "natural") -> Task:
    """A task of the library by name, one of your own by its YAML's path, or `lm-eval:NAME` of lm-evaluation-harness.

    With `data`, its rows come from `<data>/<task>/train.jsonl` and `validation.jsonl` (and `selection.jsonl`, if there
    is one) instead of the sources it names. `labels` as in `Task.relabelled`.
    """
    library = _library()
    if str(name_or_path).startswith(lm_eval.PREFIX):
        task = _validated(lm_eval.describe(str(name_or_path)), str(name_or_path))
    elif str(name_or_path) in library:
        task = _parse(library[str(name_or_path)], f"{name_or_path}.yaml")
    else:
        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml"):
            raise UserError(
                f"Task {str(name_or_path)!r} is not in the library ({', '.join(library)}); "
                "name one of those, the path of a .yaml file, or lm-eval:NAME."
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"Task file {path} cannot be read ({error}); check the path.") from error
        task = _parse(text, str(path))
        task._folder = path.parent  # pyright: ignore[reportPrivateUsage]
    if data is not None:
        folder = Path(data) / task.name
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not a folder; --data needs {task.name}/train.jsonl and validation.jsonl in it."
            )
        task._data = Path(data)  # pyright: ignore[reportPrivateUsage]
    return task.relabelled(labels)


def list_tasks() -> list[Task]:
    """Every task of the library, by name."""
    return [_parse(text, f"{name}.yaml") for name, text in _library().items()]


def _library() -> dict[str, str]:
    folder = resources.files("dualview.tasks") / "library"
    files = [entry for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return {entry.name[:-5]: entry.read_text(encoding="utf-8") for entry in sorted(files, key=lambda entry: entry.name)}


def _parse(text: str, where: str) -> Task:
    theirs = f"Task file {where} is in lm-evaluation-harness's format; name it as --task lm-eval:{where}."
    try:
        document: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # or too long a number, or nested too deeply
        reason = " ".join(str(error).split())
        if lm_eval.FUNCTION in reason:
            raise UserError(theirs) from error
        raise UserError(f"Task file {where} is not valid YAML ({reason}); correct it.") from error
    if not isinstance(document, dict):
        raise UserError(f"Task file {where} is not a mapping; write name, template, labels, train and validation.")
    if lm_eval.is_theirs(cast(dict[str, object], document)):
        raise UserError(theirs)
    return _validated(document, where)


def _validated(document: object, where: str) -> Task:
    try:
        return Task.model_validate(document)
    except ValidationError as error:
        raise UserError(f"Task file {where}: {_first_problem(error)}.") from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    place, message = first_problem(error)
    if problem["type"] == "string_type" and isinstance(problem["input"], bool | int | float):
        message = f"is {problem['input']!r} to YAML; put it in quotes"
    elif problem["type"] == "missing":
        message = "is missing; every task needs it"
    elif problem["type"] == "extra_forbidden":
        message = "is not a task's key; check its spelling"
    elif place:
        message = message[0].lower() + message[1:]
    return f"{place}: {message}" if place else message


@dataclass(frozen=True)
class SplitCheck:
    """How many rows a split has, and how many of each label (for multiple choice: of each right answer's position)."""

    rows: int
    label_counts: tuple[int, ...]


@dataclass(frozen=True)
class TaskCheck:
    """What reading every row of a task found."""

    task: str
    splits: Mapping[str, SplitCheck]
    warnings: tuple[str, ...]


def check_task(task: Task) -> TaskCheck:
    """Read and validate every row of every split; the first error is a UserError, lesser problems are warnings."""
    rows = {split: task.rows(split) for split in SPLITS}
    splits: dict[str, SplitCheck] = {}
    warnings: list[str] = []
    for split, members in rows.items():
        counts = Counter(row.label for row in members)
        width = len(task.labels) or max(counts) + 1
        splits[split] = SplitCheck(len(members), tuple(counts[label] for label in range(width)))
        if task.labels and 0 in splits[split].label_counts:
            absent = [task.labels[label] for label in range(width) if counts[label] == 0]
            warnings.append(f"{split} has no row labelled {', '.join(absent)}")
    asked = {task.render(row) for row in rows["validation"]}
    for split in ("train", "selection"):
        shared = sum(task.render(row) in asked for row in rows[split])
        if shared:
            warnings.append(f"{shared} {split} row(s) have a text that validation has too")
    return TaskCheck(task.name, splits, tuple(warnings))


def tasks(
    names: Sequence[str | Path] | None = None, data: Path | None = None, *, json: Place = None
) -> list[Task] | list[TaskCheck]:
    """`dualview tasks`: every task of the library, or a check of those that are named (read all rows, count labels)."""
    check_place(json)
    found = [check_task(load_task(name, data)) for name in names] if names else list_tasks()
    save_json(json, [each.model_dump(mode="json") if isinstance(each, Task) else asdict(each) for each in found])
    return found
