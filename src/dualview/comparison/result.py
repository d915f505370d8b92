"""The result of one comparison, typed, as it stands in the JSON file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from dualview.io.atomic import write_json
from dualview.io.display import as_html
from dualview.io.errors import UserError
from dualview.records import Records

if TYPE_CHECKING:
    from dualview.tasks.prompts import PromptSet

SCHEMA = "dualview.result/1"


class _Part(BaseModel):
    """Known keys are typed; keys added beside them (counts, reasons) are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)


class TaskPart(_Part):
    name: str
    shots: int
    """Demonstrations asked for."""
    shots_used: int
    """Demonstrations that fit the context."""
    n_queries: int


class Accuracy(_Part):
    zsl: float
    icl: float
    ft: float


class Rec2FTPPart(_Part):
    value: float | None
    n_ft: int
    n_both: int
    chance: float | None
    p: float | None
    reverse: float | None


class SimAOUPart(_Part):
    raw: float | None
    normalised: float | None
    raw_per_layer: list[float | None] | None
    normalised_per_layer: list[float | None] | None


class SimAMPart(_Part):
    before: float | None
    after: float | None
    delta: float | None
    before_per_layer: list[float | None] | None
    after_per_layer: list[float | None] | None
    delta_per_layer: list[float | None] | None


class UpdateNorm(_Part):
    icl: float | None
    ft: float | None


class FineTuningPart(_Part):
    rule: str
    lr: float
    loss: str
    params: str
    epochs: int
    steps: int
    final_loss: float | None
    status: str


class QueryPart(_Part):
    """One query: the right candidate, and each setting's mean log-probability of every candidate.

    Null where a diverged model has none.
    """

    gold: int
    zsl: list[float | None]
    icl: list[float | None]
    ft: list[float | None]


@dataclass(frozen=True)
class AskedPrompts:
    """What the model was asked, and the tokenizer that can show it."""

    prompts: PromptSet
    tokenizer: Any


class Result(BaseModel):
    """Everything a comparison found, with what is needed to repeat it."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)

    schema_: str = Field(SCHEMA, alias="schema")
    provenance: dict[str, Any]
    task: TaskPart
    accuracy: Accuracy
    rec2ftp: Rec2FTPPart
    sim_aou: SimAOUPart
    sim_am: SimAMPart
    update_norm: UpdateNorm
    ft: FineTuningPart
    warnings: list[str]
    queries: list[QueryPart]

    _records: Records | None = PrivateAttr(default=None)
    _asked: AskedPrompts | None = PrivateAttr(default=None)

    @property
    def asked(self) -> AskedPrompts | None:
        """The prompts behind the numbers, while the run is in memory."""
        return self._asked

    @property
    def records(self) -> Records | None:
        """The tensors behind the numbers, while the run is in memory."""
        return self._records

    def _repr_html_(self) -> str | None:
        """In a notebook: the verdict, the numbers and two figures."""
        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    def save(self, path: Path) -> None:
        """Write the JSON file, whole or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Result:
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"The result {path} cannot be read ({error.strerror}).") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the whole file"
            raise UserError(f"{path} is not a dualview result: {where}: {first['msg']}.") from error
