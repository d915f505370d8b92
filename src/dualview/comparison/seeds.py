"""The same comparison over several draws of demonstrations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dualview.comparison.result import Result
from dualview.io.atomic import write_json
from dualview.io.display import as_html
from dualview.io.errors import UserError
from dualview.io.progress import Progress, Silent
from dualview.metrics.measured import VerdictPart, limits_of
from dualview.metrics.statistics import draw_interval
from dualview.metrics.verdict import verdict_over
from dualview.options import RunOptions, seeds_in

if TYPE_CHECKING:
    from dualview.models.language_model import LanguageModel

SCHEMA = "dualview.seeds/1"


class OverSeeds(BaseModel):
    """One number of the result: its mean over seeds, the interval of that mean, and each seed's value."""

    model_config = ConfigDict(frozen=True)

    mean: float | None
    ci: tuple[float, float] | None
    ci_kind: str | None = None
    """Always Student over draws: of the seeds' values."""
    values: list[float | None]


class SeedsResult(BaseModel):
    """Several runs that differ in their demonstrations alone."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    schema_: str = Field(SCHEMA, alias="schema")
    seeds: list[int]
    summary: dict[str, OverSeeds]
    verdicts: dict[str, int]
    """How often each verdict was reached."""
    verdict: VerdictPart | None = None
    """Over the draws, where there are two or more with controls."""
    learners: dict[str, VerdictPart] = Field(default_factory=dict)
    """The same of a patch and of adapters."""
    results: list[Result]

    def _repr_html_(self) -> str | None:
        """In a notebook: each number over seeds, and two figures."""
        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    def save(self, path: Path | str) -> None:
        write_json(Path(path), self.to_json())


def parse_seeds(text: str) -> list[int]:
    """`1:5` (both ends counted), `1,3,7`, or a mix of both.

    >>> parse_seeds("1:3,9")
    [1, 2, 3, 9]
    """
    seeds = seeds_in(text)
    if not seeds:
        raise UserError(f"--seeds takes numbers such as 1:5 or 1,3,7, not {text!r}.")
    if len(set(seeds)) < 2 or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds needs at least two different seeds, each once; {text!r} does not give them.")
    return list(seeds)


def compare_seeds(
    options: RunOptions,
    seeds: Sequence[int],
    *,
    lm: LanguageModel | None = None,
    progress: Progress | None = None,
    on_result: Callable[[int, Result], object] | None = None,
) -> SeedsResult:
    """Run the comparison once for each seed, on the same queries, and put the numbers together.

    `on_result` is called with each seed and its result as soon as it is computed, to keep it.
    """
    from dualview.comparison.prepare import prepare  # here, so that reading results does not wait for torch
    from dualview.comparison.run import run  # here, so that reading results does not wait for torch

    if options.demos is not None:
        raise UserError("--seeds draws demonstrations, so it does not go with --demos.")
    progress = progress or Silent()
    results: list[Result] = []
    for seed in seeds:
        # Loaded once: only the demonstrations differ between seeds.
        lm = lm or prepare(replace(options, seed=seed), progress=progress).lm
        result = run(replace(options, seed=seed), lm=lm, progress=progress)
        if on_result is not None:
            on_result(seed, result)
        results.append(result)
    summary = {key: _over(results, key) for key in NUMBERS}
    verdicts = Counter(result.verdict.overall for result in results if result.verdict is not None)
    found: dict[str, Any] = {"seeds": list(seeds), "summary": summary, "verdicts": dict(verdicts), "results": results}
    over = {name: verdict_over([result.learners[name] for result in results]) for name in results[0].learners}
    found["learners"] = {name: verdict for name, verdict in over.items() if verdict is not None}
    return SeedsResult.model_validate({**found, "verdict": verdict_over(results)})


NUMBERS = (
    *(f"accuracy.{name}" for name in ("zsl", "icl", "ft")),
    *(f"sim_aou.{name}" for name in ("raw", "normalised")),
    *(f"sim_am.{name}" for name in ("before", "after", "delta")),
    *(f"update_norm.{name}" for name in ("icl", "ft")),
    "rec2ftp.value",
    "agreement.value",
    "label_contrast.value",
)
"""What is summarised over seeds."""


def _over(results: Sequence[Result], key: str) -> OverSeeds:
    values = [result.number(key) for result in results]
    defined = [value for value in values if value is not None]
    interval = draw_interval(values, limits_of(key))
    return OverSeeds(
        mean=float(np.mean(defined)) if defined else None,
        ci=None if interval is None else (interval.low, interval.high),
        ci_kind=None if interval is None else interval.kind,
        values=values,
    )
