"""What the page asks, checked: the demonstrations as typed, the query, and how to fine-tune.

The same document is the state in the page's address, the body of its requests and the head of its downloads. Every
bound here keeps one request from taking the machine for long; the number of tokens is checked once there is a
tokenizer to count them (`experiment`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from dualview.io.errors import UserError
from dualview.tasks.task import Task

MOST_DEMOS = 64
MOST_LABELS = 16
MOST_CHARACTERS = 4000
MOST_TOKENS = 2048
MOST_EPOCHS = 5
LARGEST_RATE = 1.0
LIMITS = {
    "demos": MOST_DEMOS,
    "labels": MOST_LABELS,
    "characters": MOST_CHARACTERS,
    "tokens": MOST_TOKENS,
    "epochs": MOST_EPOCHS,
    "lr": LARGEST_RATE,
}

# Text that can stand on a command line: no NUL. (Half surrogate pairs are no JSON to pydantic.)
Text = Annotated[str, StringConstraints(max_length=MOST_CHARACTERS, pattern=r"^[^\x00]*$")]
Label = Annotated[str, StringConstraints(max_length=100, pattern=r"^[^\x00]*$")]
Name = Annotated[str, StringConstraints(max_length=300)]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Named(_Checked):
    """A model by its name."""

    model: Name


class TypedRow(_Checked):
    """A row as typed: the template's fields, the label's index, and for multiple choice the row's own answers."""

    fields: dict[Label, Text]
    label: Annotated[int, Field(ge=0)] | None = None
    """None for a query with an unknown answer."""
    choices: Annotated[list[Label], Field(max_length=MOST_LABELS)] | None = None

    def to_json(self) -> dict[str, Any]:
        """As a line of a row file; a query without a label is given 0, which nothing shown depends on."""
        own = {} if self.choices is None else {"choices": self.choices}
        return {**self.fields, **own, "label": self.label or 0}


class Draw(_Checked):
    """Demonstrations drawn from a task of the library."""

    task: Name
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    shots: Annotated[int, Field(ge=1, le=MOST_DEMOS)] = 8


class DrawQuery(Draw):
    """The same, and which of the task's queries to show with them."""

    query: Annotated[int, Field(ge=0, lt=1000)] = 0


class State(_Checked):
    """Everything that decides what the page shows."""

    model: Name
    template: Text
    labels: Annotated[list[Label], Field(max_length=MOST_LABELS)] = []
    """Left empty for multiple choice, where every row has its own choices."""
    separator: Annotated[Text, Field(min_length=1)] = "\n"
    demos: Annotated[list[TypedRow], Field(min_length=1, max_length=MOST_DEMOS)]
    query: TypedRow
    lr: Annotated[float, Field(ge=0, le=LARGEST_RATE, allow_inf_nan=False)] = 0.01
    epochs: Annotated[int, Field(ge=1, le=MOST_EPOCHS)] = 1
    ft_loss: Literal["all", "label"] = "all"
    drawn: Draw | None = None
    """Where the demonstrations were drawn from, if from a task; they may have been changed since."""

    @model_validator(mode="after")
    def _coherent(self) -> State:
        task = self.task("typed")
        fields = set(task.template_fields)
        if fields & {"label", "choices"}:
            raise ValueError("the template may not name a field label or choices; choose another name")
        for number, row in enumerate((*self.demos, self.query)):
            who = "the query" if row is self.query else f"demonstration {number}"
            if set(row.fields) != fields:
                raise ValueError(f"{who} must have the template's fields, {', '.join(sorted(fields))}, and no others")
            answers = self.labels or row.choices or []
            if row.label is None and row is not self.query:
                raise ValueError(f"{who} has no label; choose one")
            if row.label is not None and row.label >= len(answers):
                raise ValueError(f"{who} has label {row.label}, but there are {len(answers)} answers, counted from 0")
            if self.labels and row.choices is not None:
                raise ValueError(f"{who} has its own choices as well as the task's labels; give one or the other")
        return self

    def document(self, name: str) -> dict[str, Any]:
        """The typed task as in its YAML file; its rows are files in the same folder."""
        answers = {"labels": list(self.labels)} if self.labels else {"choices": "choices"}
        head = {"name": name, "template": self.template, **answers, "separator": self.separator}
        return {**head, "train": "demos.jsonl", "validation": "query.jsonl"}

    def task(self, name: str) -> Task:
        return Task.model_validate(self.document(name))


Model = TypeVar("Model", bound=_Checked)

_PROBLEMS = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "string_too_long": "has more than {max_length} characters; shorten it",
    "string_pattern_mismatch": "holds a NUL character; take it out",
    "too_long": "has more than {max_length} entries; take some out",
    "too_short": "needs at least {min_length}; add one",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "extra_forbidden": "is not known here; leave it out",
}


def read(kind: type[Model], body: bytes) -> Model:
    """What a request's body holds, or the first thing wrong with it in one sentence."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise UserError("The request is not JSON; send an object.") from error
        own = str(first["msg"]).removeprefix("Value error, ").rstrip(".") if first["type"] == "value_error" else None
        problem = own or _PROBLEMS.get(first["type"], "has the wrong type").format(**first.get("ctx", {}))
        place = _place(first["loc"])
        raise UserError(f"{place}: {problem}." if place else f"{problem[0].upper()}{problem[1:]}.") from error


def _place(loc: tuple[int | str, ...]) -> str:
    """Where a mistake is, as the page counts: from 0."""
    if len(loc) > 1 and loc[0] == "demos" and isinstance(loc[1], int):
        return ", ".join([f"demonstration {loc[1]}", *map(str, loc[2:])])
    return ".".join(str(part) for part in loc)
