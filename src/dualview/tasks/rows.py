"""One row of a task, checked; an error names the file, the line and the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from dualview.io.errors import UserError
from dualview.tasks.sources import RawRow


@dataclass(frozen=True)
class Row:
    """A validated row: the template's fields as text, the gold label's index, and its own candidates if it has any."""

    fields: Mapping[str, str]
    label: int
    choices: tuple[str, ...] | None = None
    where: str = field(default="", compare=False)
    """The file and line it was read from, for error messages; empty for a typed row."""


@dataclass(frozen=True)
class RowShape:
    """What a task requires of its rows; `Task` explains each field."""

    fields: tuple[str, ...]
    renames: Mapping[str, str]
    label_field: str
    n_labels: int
    choices: str | tuple[str, ...] | None
    answer_labels: str | None

    def names(self, field: str) -> tuple[str, ...]:
        """Where a field may be found: under its own name first, then under the other name of its `fields` entry."""
        aliases = [self.renames.get(field), *(old for old, new in self.renames.items() if new == field)]
        return (field, *(name for name in aliases if name is not None))


_MISSING = object()
"""Marks a field that a row does not have; None is a value that a row can have."""


def parse_row(raw: RawRow, shape: RowShape) -> Row:
    """A row with what the task requires, or a UserError that names file, line and field."""
    fields = {field: _text(raw, shape, field) for field in shape.fields}
    choices = None if shape.choices is None else _choices(raw, shape, shape.choices)
    label = _label(raw, shape, shape.n_labels if choices is None else len(choices))
    return Row(fields, label, choices, raw.where)


def _text(raw: RawRow, shape: RowShape, field: str) -> str:
    value = _find(raw, shape.names(field))
    if value is _MISSING:
        raise _problem(raw, field, "is missing", f"the template needs it; the row has {_listing(raw.values)}")
    return _as_text(raw, field, value)


def _as_text(raw: RawRow, field: str, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise _problem(raw, field, f"is {_shown(value)}, not text", "make it a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _problem(raw, field, "holds half a surrogate pair", "write the whole character") from None
    return value


def _choices(raw: RawRow, shape: RowShape, wanted: str | tuple[str, ...]) -> tuple[str, ...]:
    """The row's candidates, from one list field, a list inside a field, or one field a candidate.

    A row with a plain list under the first name (or under `choices`) is used as it is, so that one task file serves
    both the hub's nested rows and flat row files.
    """
    if isinstance(wanted, str):
        field = wanted
        found = _find(raw, (*shape.names(wanted), "choices"))
    else:
        parts = {name: _find(raw, shape.names(name)) for name in wanted}
        field = next((name for name, value in parts.items() if value is _MISSING), wanted[0])
        found = list(parts.values()) if _MISSING not in parts.values() else _find(raw, ("choices",))
    if found is _MISSING:
        raise _problem(raw, field, "is missing", f"it holds the choices; the row has {_listing(raw.values)}")
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise _problem(raw, field, f"is {_shown(found)}, not a list", "give the choices as a list of strings")
    items = cast(Sequence[object], found)
    texts = tuple(_as_text(raw, f"{field}[{index}]", item) for index, item in enumerate(items))
    if len(texts) < 2:
        raise _problem(raw, field, f"holds {len(texts)} choice(s)", "give at least two")
    for index, text in enumerate(texts):
        if not text.strip():
            raise _problem(raw, f"{field}[{index}]", "is blank", "give every choice some text")
    return texts


def _label(raw: RawRow, shape: RowShape, count: int) -> int:
    field = shape.label_field
    value = _find(raw, (*shape.names(field), "label"))
    if value is _MISSING:
        raise _problem(raw, field, "is missing", f"it holds the label; the row has {_listing(raw.values)}")
    if isinstance(value, str) and shape.answer_labels is not None:
        value = _answer_index(raw, shape, shape.answer_labels, value)
    elif isinstance(value, str) and raw.textual and value.strip().lstrip("-").isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _problem(raw, field, f"is {_shown(value)}, not an integer", f"give a label from 0 to {count - 1}")
    if not 0 <= value < count:
        raise _problem(raw, field, f"is {value}, out of range", f"give a label from 0 to {count - 1}")
    return value


def _answer_index(raw: RawRow, shape: RowShape, path: str, answer: str) -> int:
    """The position of an answer's name ('C', or '3') in the row's own list of names."""
    names = _find(raw, (path,))
    if isinstance(names, str) or not isinstance(names, Sequence) or answer not in names:
        raise _problem(
            raw, shape.label_field, f"is {answer!r}, which is not in {path!r}", "name one of the row's own choices"
        )
    return list(cast(Sequence[object], names)).index(answer)


def _find(raw: RawRow, names: Sequence[str]) -> object:
    """The first of `names` the row has; a dotted name looks inside nested fields and stops at a list."""
    for name in names:
        value = raw.values[name] if name in raw.values else _descend(raw.values, name.split("."))
        if value is not _MISSING:
            return value
    return _MISSING


def _descend(value: object, path: Sequence[str]) -> object:
    if not path or isinstance(value, list):
        return cast(object, value)
    if isinstance(value, Mapping) and path[0] in value:
        return _descend(cast(Mapping[str, object], value)[path[0]], path[1:])
    return _MISSING


def _problem(raw: RawRow, field: str, what: str, remedy: str) -> UserError:
    return UserError(f"{raw.where}: field {field!r} {what}; {remedy}.")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _listing(values: Mapping[str, object]) -> str:
    return ", ".join(repr(name) for name in values) or "no fields at all"
