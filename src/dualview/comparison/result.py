"""The result of one comparison, typed, as in the JSON file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field, PrivateAttr

from dualview.comparison.frame import frame_of
from dualview.io.atomic import write_json
from dualview.io.display import as_html
from dualview.io.json_files import read_model
from dualview.metrics.measured import LayerRow, Measured, ResultPart
from dualview.records import Records

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    from dualview.tasks.prompts import PromptSet

SCHEMA = "dualview.result/1"


class TaskPart(ResultPart):
    name: str
    shots: int
    """Demonstrations requested."""
    shots_used: int
    """Demonstrations that fit the context."""
    n_queries: int
    labels: list[str] | None = None


class FineTuningPart(ResultPart):
    rule: str
    lr: float
    loss: str
    params: str
    epochs: int
    steps: int
    final_loss: float | None
    losses: LayerRow | None = None
    """Of every step."""
    status: str


class QueryPart(ResultPart):
    """One query: the right candidate, and each setting's mean log-probability of every candidate.

    Null where a diverged model has none.
    """

    gold: int
    zsl: list[float | None]
    icl: list[float | None]
    ft: list[float | None]


class DrawSeeds(ResultPart):
    """The seed of every draw; those of the controls have their own names."""

    demos: int | None


class RunPart(ResultPart):
    """When, where and how long: not part of any comparison of results."""

    date: str
    host: str
    device_name: str | None = None
    seconds: dict[str, float]


class Provenance(ResultPart):
    """Everything that decides the numbers."""

    versions: dict[str, Any]
    model: str
    model_commit: str | None = None
    """On the hub; None for a model from elsewhere."""
    code_commits: dict[str, str] = Field(default_factory=dict)
    data_commits: dict[str, str] = Field(default_factory=dict)
    architecture: str
    weights_hash: str
    dtype: str
    device: str
    threads: int | None
    attention: str
    seeds: DrawSeeds
    prompts_hash: str
    options: dict[str, Any]
    """Those that differ from the defaults."""
    run: RunPart | None = None


class TrialPart(ResultPart):
    """One learning rate, or seed, on the selection rows."""

    value: float
    accuracy: float | None
    status: str


class SelectionPart(ResultPart):
    rows: int = 0
    lr: list[TrialPart] | None = None
    seed: list[TrialPart] | None = None


class NormPoint(ResultPart):
    """One rule at one learning rate: similarities against the size of the update."""

    rule: str
    lr: float
    status: str
    queries: int
    accuracy: float | None = None
    update_norm: float | None = None
    sim_aou_raw: float | None = None
    sim_aou_normalised: float | None = None
    sim_am_after: float | None = None
    sim_am_delta: float | None = None


class OrderPart(ResultPart):
    """How much answers vary over orders of the same demonstrations."""

    permutations: int
    queries: int
    icl: float | None
    ft: float | None


class TrainedControl(ResultPart):
    lr: float
    status: str


class AdapterPart(ResultPart):
    """A LoRA adapter that was compared: how many modules it changes, and by how much."""

    path: str
    modules: int
    targets: list[str]
    rank: int
    """The largest of its low-rank changes."""
    norm: float
    """‖ΔW‖ over all of its modules, without biases."""
    relative_norm: float | None
    """The same over ‖W‖ of these modules."""


class CalibratedPart(ResultPart):
    accuracy: dict[str, float | None]


@dataclass(frozen=True)
class AskedPrompts:
    """What the model was asked, and the tokenizer that can show it."""

    prompts: PromptSet
    tokenizer: Any


class Result(Measured):
    """Everything a comparison found, with what is needed to repeat it."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)

    schema_: str = Field(SCHEMA, alias="schema")
    provenance: Provenance
    task: TaskPart
    ft: FineTuningPart
    selection: SelectionPart | None = None
    calibrated: CalibratedPart | None = None
    order_sensitivity: OrderPart | None = None
    norm_curve: list[NormPoint] | None = None
    controls_skipped: dict[str, str] | None = None
    controls_trained: dict[str, TrainedControl] | None = None
    adapters: dict[str, AdapterPart] | None = None
    queries: list[QueryPart]

    _records: Records | None = PrivateAttr(default=None)
    _asked: AskedPrompts | None = PrivateAttr(default=None)

    @property
    def asked(self) -> AskedPrompts | None:
        """The prompts behind the numbers, while the run is in memory."""
        return self._asked

    @property
    def records(self) -> Records | None:
        """The tensors behind the numbers, while the run is in memory; fetched from the GPU when they are asked for."""
        if self._records is not None:
            self._records = self._records.on_host()
        return self._records

    def _repr_html_(self) -> str | None:
        """In a notebook: the verdict, the numbers and two figures."""
        return as_html(self)

    def to_frame(self) -> pandas.DataFrame:
        """One row for each number: its value, 95 % interval, highest floor, ceiling and p."""
        return frame_of(self)

    def save(self, path: Path | str) -> None:
        """Write the JSON file, whole or not at all."""
        write_json(Path(path), self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> Result:
        return read_model(cls, Path(path), "a dualview result")
