"""A verb's JSON output: to a file, or with `-` to standard output."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dualview.io.atomic import must_be_writable, write_json
from dualview.io.errors import UserError, first_problem
from dualview.io.saving import save_somewhere

if TYPE_CHECKING:
    from pydantic import BaseModel

Model = TypeVar("Model", bound="BaseModel")

Place = Path | str | None
"""A file, `-` for standard output, or None for neither."""


def is_stdout(place: Place) -> bool:
    return str(place) == "-"


def check_place(place: Place) -> None:
    """Refuse a file that cannot be written, before any work is done."""
    if place is not None and not is_stdout(place):
        must_be_writable(Path(place))


def save_json(place: Place, content: Any) -> None:
    """Write `content`; to a temporary folder, with an error that names it, if the file cannot be written."""
    if is_stdout(place):
        print(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False), flush=True)
    elif place is not None:
        save_somewhere([Path(place)], lambda file: write_json(file, content))


def read_model(kind: type[Model], path: Path, what: str) -> Model:
    """The pydantic model in a JSON file; `what` names the file in the error."""
    from pydantic import ValidationError

    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The result {path} cannot be read ({error.strerror}).") from error
    except ValidationError as error:
        where, problem = first_problem(error)
        raise UserError(f"{path} is not {what}: {where or 'the whole file'}: {problem}.") from error


def read_if_valid(kind: type[Model], path: Path) -> Model | None:
    """The pydantic model in a JSON file; None where there is none, or another one."""
    from pydantic import ValidationError

    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def plain(value: Any) -> Any:
    """A value that JSON can hold: null for a number that is not finite, text for other types."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
