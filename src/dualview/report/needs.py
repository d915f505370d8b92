"""What a report reads of a result beyond what `Result` itself types, checked before anything is drawn.

A file that lacks some of it is the file's fault, and told as such in one sentence. Once it has passed, an error while
the report is made is dualview's own, and is not hidden as the file's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dualview.comparison.result import SCHEMA, Result
from dualview.io.errors import UserError

SEEDS_SCHEMA = "dualview.seeds/1"

Row = list[float | None]
Named = dict[str, float | None]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Seeds(_Part):
    demos: int | None


class _Provenance(_Part):
    model: str
    architecture: str
    weights_hash: str
    prompts_hash: str
    dtype: str
    device: str
    threads: Any
    attention: str
    versions: dict[str, Any]
    options: dict[str, Any]
    seeds: _Seeds


class _Task(_Part):
    labels: list[str] | None = None


class _FineTuning(_Part):
    losses: Row | None = None


class _PerLayer(_Part):
    quantiles: dict[str, Row]
    floors: dict[str, Row]
    ceilings: dict[str, Row]

    @model_validator(mode="after")
    def _of_one_length(self) -> _PerLayer:
        rows = [row for group in (self.quantiles, self.floors, self.ceilings) for row in group.values()]
        if len({len(row) for row in rows}) > 1:
            raise ValueError("has rows of different numbers of layers")
        return self


class _Control(_Part):
    value: float | None
    ci: tuple[float, float] | None
    floors: Named
    floors_p: Named
    ceiling: float | None
    ceilings: Named
    others: Named
    p: float | None
    per_layer: _PerLayer | None = None

    @model_validator(mode="after")
    def _tested(self) -> _Control:
        if untold := sorted(set(self.floors) - set(self.floors_p)):
            raise ValueError(f"has no p of the floor {untold[0]}")
        return self


class _Condition(_Part):
    clause: str
    passed: bool | None


class _Verdict(_Part):
    overall: str
    sentence: str
    limits: str
    conditions: list[_Condition]


class _Mass(_Part):
    mean: float | None
    per_layer: Row
    per_head: Annotated[list[Row], Field(min_length=1)]


class _NormPoint(_Part):
    rule: str
    lr: float
    status: str
    queries: int
    update_norm: float | None = None


class _Trial(_Part):
    value: float
    accuracy: float | None
    status: str


class _Selection(_Part):
    rows: int = 0
    lr: list[_Trial] | None = None
    seed: list[_Trial] | None = None


class _Order(_Part):
    permutations: int
    queries: int
    icl: float | None
    ft: float | None


class _Overlap(_Part):
    token_overlap: float | None
    overlap_cosine: float | None


class _Needs(_Part):
    provenance: _Provenance
    task: _Task
    ft: _FineTuning
    queries: Annotated[list[Any], Field(min_length=1)]
    controls: dict[str, _Control] | None = None
    controls_skipped: dict[str, str] | None = None
    verdict: _Verdict | None = None
    demo_mass: _Mass | None = None
    norm_curve: list[_NormPoint] | None = None
    kendall: dict[str, Any] | None = None
    overlap: dict[str, _Overlap] | None = None
    order_sensitivity: _Order | None = None
    selection: _Selection | None = None


def checked(result: Result, where: object) -> Result:
    """The result, if it has all that a report reads; `where` is what the sentence calls it."""
    if result.schema_ != SCHEMA:
        raise UserError(_other(where, result.schema_, SCHEMA))
    try:
        _Needs.model_validate(result.to_json())
    except ValidationError as error:
        raise UserError(f"{where} lacks what a report needs ({_first(error)}); make the run again.") from None
    return _coherent(result, where)


def _first(error: ValidationError) -> str:
    """The first thing amiss: where it is, and whether it is missing, not of its kind, or what else."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "the whole"
    said = {"missing": "is missing", "value_error": str(first["msg"]).removeprefix("Value error, ")}
    return f"{place} {said.get(first['type'], 'is not of its kind')}"


def _other(where: object, schema: str, read: str) -> str:
    return f"{where} is of schema {schema} and this dualview reads {read}; use the version that wrote it."


def _coherent(result: Result, where: object) -> Result:
    """As many scores in every setting of a query, and a right candidate among them."""
    for number, query in enumerate(result.queries):
        own = {len(query.zsl), len(query.icl), len(query.ft)}
        if len(own) != 1 or not 0 <= query.gold < min(own):
            raise UserError(
                f"{where} lacks what a report needs (queries.{number}: the settings' scores and the right candidate do "
                "not fit together); make the run again."
            )
    return result


def read_results(file: Path) -> Sequence[Result]:
    """The result of a JSON file, or those of several seeds; a mistake is one sentence that names the file."""
    content = _content(file)
    schema = str(content.get("schema", ""))
    if schema.startswith("dualview.seeds/"):
        if schema != SEEDS_SCHEMA:
            raise UserError(_other(file, schema, SEEDS_SCHEMA))
        several = content.get("results")
        if not isinstance(several, list) or not several:
            raise UserError(f"{file} holds no results; make the run again.")
        parts: list[Any] = several  # pyright: ignore[reportUnknownVariableType]
        return [_result(part, f"{file}, result {number},") for number, part in enumerate(parts)]
    return [_result(content, file)]


def holds_seeds(file: Path) -> bool:
    return str(_content(file).get("schema", "")).startswith("dualview.seeds/")


def _result(content: Any, where: object) -> Result:
    try:
        return checked(Result.model_validate(content), where)
    except ValidationError as error:
        if isinstance(content, dict) and content.get("schema") == SCHEMA:  # pyright: ignore[reportUnknownMemberType]
            raise UserError(f"{where} lacks what a report needs ({_first(error)}); make the run again.") from None
        raise UserError(f"{where} is not a dualview result: {_first(error)}; give a result's JSON file.") from None


def _content(file: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}); give a result's JSON file.") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a dualview result: it holds no object; give a result's JSON file.")
    return content  # pyright: ignore[reportUnknownVariableType]
