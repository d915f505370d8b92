"""What is measured of one run, typed as in the result file: every metric, its controls and the verdict.

`dualview run` adds where it came from (`comparison.result.Result`); `dualview metrics` recomputes exactly this from
saved records. Keys that a later version adds are kept when a file is read and written again.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dualview.io.display import as_html

LayerRow = list[float | None]
"""One number a layer; null where it is undefined."""
Named = dict[str, float | None]
CONTROL_OF = {
    "rec2ftp.value": "rec2ftp",
    "agreement.value": "agreement",
    "label_contrast.value": "label_contrast",
    "sim_aou.raw": "sim_aou",
    "sim_aou.normalised": "sim_aou_normalised",
    "sim_am.after": "sim_am_after",
    "sim_am.delta": "sim_am",
    "kendall.released.tau_token": "kendall_released",
    "kendall.dual_k.tau_token": "kendall_dual_k",
    "kendall.dual_v.tau_token": "kendall_dual_v",
    "overlap.ft.token_overlap": "token_overlap",
}
"""The name of a number's controls, by its dotted key in the result file."""
_LIMITS = {
    "accuracy": (0.0, 1.0),
    "rec2ftp": (0.0, 1.0),
    "overlap": (0.0, 1.0),
    "agreement": (-1.0, 1.0),
    "label_contrast": (-1.0, 1.0),
    "sim_aou": (-1.0, 1.0),
    "sim_am": (-1.0, 1.0),
    "kendall": (-1.0, 1.0),
    "update_norm": (0.0, math.inf),
}


def limits_of(key: str) -> tuple[float, float]:
    """The least and the largest value that a number can have, by its dotted key.

    >>> limits_of("accuracy.icl"), limits_of("sim_am.delta")
    ((0.0, 1.0), (-1.0, 1.0))
    """
    return _LIMITS.get(key.partition(".")[0], (-math.inf, math.inf))


class ResultPart(BaseModel):
    """Known keys are typed; keys added by other versions are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Undefined(ResultPart):
    """How many single values of a similarity are undefined and left out."""

    count: int
    of: int


class Accuracy(ResultPart):
    """Of each setting; controls, patches and adapters stand under their own names."""

    zsl: float
    icl: float
    ft: float
    patch: float | None = None

    @property
    def by_setting(self) -> dict[str, float]:
        return {name: value for name, value in self.model_dump().items() if value is not None}


class Rec2FTPPart(ResultPart):
    value: float | None
    n_ft: int
    n_both: int
    chance: float | None
    p: float | None
    reverse: float | None
    reason: str | None = None


class AgreementPart(ResultPart):
    value: float | None
    p: float | None
    below_p: float | None = None
    signs_p: float | None = None
    signs_below_p: float | None = None
    interval: tuple[float, float] | None = None
    detectable: float | None = None
    reason: str | None = None


class LabelContrastPart(ResultPart):
    value: float | None
    per_layer: LayerRow
    specific: float | None = None
    """Beyond what flipping changes in all queries alike; not in older results."""
    reason: str | None = None
    log_odds: AgreementPart | None = None
    """The same of the label log-odds, as `agreement` compares them."""


class SimAOUPart(ResultPart):
    raw: float | None
    normalised: float | None
    raw_per_layer: LayerRow | None
    normalised_per_layer: LayerRow | None
    noise_floor: float | None = None
    noise_floor_per_layer: LayerRow | None = None
    undefined: dict[str, Undefined | None] | None = None
    reason: dict[str, str | None] | None = None


class SimAMPart(ResultPart):
    before: float | None
    after: float | None
    delta: float | None
    before_per_layer: LayerRow | None
    after_per_layer: LayerRow | None
    delta_per_layer: LayerRow | None
    undefined: dict[str, Undefined | None] | None = None
    reason: dict[str, str | None] | None = None


class UpdateNormPart(ResultPart):
    icl: float | None
    ft: float | None
    icl_per_layer: LayerRow | None = None
    ft_per_layer: LayerRow | None = None


class DemoMassPart(ResultPart):
    """λ: the softmax mass on the demonstrations."""

    mean: float | None
    per_layer: LayerRow
    per_head: Annotated[list[LayerRow], Field(min_length=1)]
    """Of each layer, its heads'."""


class RankPart(ResultPart):
    """Agreement of two rankings of the training tokens, and of the demonstrations."""

    tau_token: float | None
    tau_demo: float | None
    recall_token: float | None
    recall_demo: float | None
    tau_token_per_layer: LayerRow


class KendallPart(ResultPart):
    """Attention to training tokens against each form of fine-tuning's side, and each at a learning rate of 0."""

    value: float | None
    tokens: int
    queries: int
    released: RankPart | None = None
    dual_k: RankPart | None = None
    dual_v: RankPart | None = None
    released_lr0: RankPart | None = None
    dual_k_lr0: RankPart | None = None
    dual_v_lr0: RankPart | None = None
    icl_reordered: RankPart | None = None


class OverlapPart(ResultPart):
    """The ten likeliest next tokens of a setting and of ICL."""

    token_overlap: float | None
    overlap_cosine: float | None


class LayerBounds(ResultPart):
    """Layer by layer: the spread over queries, and each floor and ceiling."""

    quantiles: dict[str, LayerRow]
    floors: dict[str, LayerRow]
    ceilings: dict[str, LayerRow]

    @model_validator(mode="after")
    def _of_one_length(self) -> LayerBounds:
        rows = [row for group in (self.quantiles, self.floors, self.ceilings) for row in group.values()]
        if len({len(row) for row in rows}) > 1:
            raise ValueError("has rows of different numbers of layers")
        return self


class ControlPart(ResultPart):
    """What one metric is read against: its interval, floors with their p-values, ceilings, and other settings."""

    value: float | None
    ci: tuple[float, float] | None
    ci_kind: str | None = None
    """How the 95 % interval is computed: bootstrap over queries, or Wilson."""
    floors: Named
    floors_p: Named
    floors_draws: dict[str, list[float]] = Field(default_factory=dict)
    detectable: float | None = None
    ceiling: float | None
    ceilings: Named
    others: Named
    position: float | None = None
    p: float | None
    below_p: float | None = None
    reason: str | None = None
    p_per_layer: dict[str, LayerRow] | None = None
    per_layer: LayerBounds | None = None

    @model_validator(mode="after")
    def _tested(self) -> ControlPart:
        if untested := sorted(set(self.floors) - set(self.floors_p)):
            raise ValueError(f"has no p of the floor {untested[0]}")
        return self

    @property
    def highest_floor(self) -> tuple[str, float] | None:
        """The floor that decides, with its name."""
        known = {name: value for name, value in self.floors.items() if value is not None}
        name = max(known, key=lambda name: known[name], default=None)
        return None if name is None else (name, known[name])


class ConditionPart(ResultPart):
    metric: str = ""
    clause: str
    passed: bool | None


class JudgedMetric(ResultPart):
    """One metric as the verdict saw it."""

    value: float | None
    ci: tuple[float, float] | None
    floor: float | None
    ceiling: float | None
    p: float | None
    position: float | None = None
    passed: bool | None = None


class LevelPart(ResultPart):
    """One level of the verdict."""

    outcome: str
    clause: str
    value: float | None
    interval: tuple[float, float] | None
    floor: float | None
    floors: dict[str, float] = Field(default_factory=dict)
    decided_by: str | None
    p: float | None
    detectable: float | None
    query_p: float | None = None
    below_p: float | None = None
    """Over the queries of the run alone; not in older results."""
    alone: str | None = None
    """The outcome by itself, where the level is not testable only for want of learning; not in older results."""


class VerdictPart(ResultPart):
    """The verdict. Results of the first edition have `conditions` and no levels."""

    overall: str
    sentence: str
    unit: str | None = None
    levels: dict[str, LevelPart] = Field(default_factory=dict)
    by_metric: dict[str, JudgedMetric] = Field(default_factory=dict)
    conditions: list[ConditionPart] = Field(default_factory=list)
    limits: str = ""

    def _repr_html_(self) -> str | None:
        """In a notebook: the sentence and the levels."""
        return as_html(self)


class Measured(ResultPart):
    """Every metric of one run, with its controls and the verdict where controls were run."""

    accuracy: Accuracy
    accuracy_ci: dict[str, tuple[float, float]] | None = None
    """Wilson's 95 % interval of every accuracy; not in results of the first edition."""
    rec2ftp: Rec2FTPPart
    sim_aou: SimAOUPart
    sim_am: SimAMPart
    update_norm: UpdateNormPart
    demo_mass: DemoMassPart | None = None
    agreement: AgreementPart | None = None
    label_contrast: LabelContrastPart | None = None
    kendall: KendallPart | None = None
    overlap: dict[str, OverlapPart] | None = None
    controls: dict[str, ControlPart] | None = None
    verdict: VerdictPart | None = None
    learners: dict[str, Measured] = Field(default_factory=dict[str, "Measured"])
    """A patch and adapters, by setting: everything that is measured of ft, with the learner in the place of `ft`."""
    warnings: list[str]

    def _repr_html_(self) -> str | None:
        """In a notebook: the verdict and the numbers."""
        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        """As the result file has it: the keys that were given, no others."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def number(self, key: str) -> float | None:
        """A number by its dotted key in the file, such as `sim_aou.raw`; None where there is none."""
        value: Any = self
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        return value

    def control_of(self, key: str) -> ControlPart | None:
        """The controls of a number, by its dotted key."""
        return (self.controls or {}).get(CONTROL_OF.get(key, ""))
