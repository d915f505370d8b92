"""What `dualview calibrate` found: how often the verdict says yes to nothing, and how often to something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from dualview.metrics.statistics import clopper_pearson_upper
from dualview.metrics.verdict import DECIDING, Verdict

SCHEMA = "dualview.calibration/1"
LIMIT = 0.05
"""The largest rate of false support, and of false contradiction, that a certificate may have."""


@dataclass(frozen=True)
class NullFamily:
    """Cases of one kind in which ICL and FT are not similar: how many, and how many the verdict supports."""

    name: str
    meaning: str
    judged: int
    supported: int
    levels: Mapping[str, int]
    """How often each level alone is supported."""
    testable: int | None = None
    """The cases in which both learnt, so that something could be said; None in files older than the count."""
    contradicted: int | None = None
    """The cases that the verdict calls contradicted: unrelated is not opposite."""

    @classmethod
    def of(cls, name: str, meaning: str, verdicts: Sequence[Verdict]) -> NullFamily:
        levels = {
            level: sum(each.levels[level].outcome == "supported" for each in verdicts if _learnt(each))
            for level in DECIDING
        }
        supported, contradicted = (
            sum(each.overall == word for each in verdicts) for word in ("supported", "contradicted")
        )
        return cls(name, meaning, len(verdicts), supported, levels, sum(map(_learnt, verdicts)), contradicted)

    @property
    def upper(self) -> float:
        """The upper end of Clopper and Pearson's 95 % interval of the rate, of the cases that could be tested."""
        return clopper_pearson_upper(self.supported, self._cases)

    @property
    def within_limit(self) -> bool:
        """Whether no more of the cases that could be tested are supported than may be."""
        return self.supported <= LIMIT * self._cases

    @property
    def _cases(self) -> int:
        return self.judged if self.testable is None else self.testable


def _learnt(verdict: Verdict) -> bool:
    return verdict.levels["learning"].outcome == "supported"


@dataclass(frozen=True)
class Positive:
    """A case in which FT does what ICL does, by construction or by training."""

    name: str
    meaning: str
    overall: str
    sentence: str
    values: Mapping[str, float | None]
    """Of each level."""

    @classmethod
    def of(cls, name: str, meaning: str, verdict: Verdict) -> Positive:
        values = {level: part.value for level, part in verdict.levels.items()}
        return cls(name, meaning, verdict.overall, verdict.sentence, values)


@dataclass(frozen=True)
class Power:
    """How often a level is supported at a known dose of similarity."""

    level: str
    """One of the deciding levels, or `overall`."""
    dose: float
    queries: int
    draws: int
    """Lists of demonstrations judged together; 1 is a single run."""
    judged: int
    supported: int

    @property
    def power(self) -> float:
        return self.supported / self.judged


@dataclass(frozen=True)
class Certificate:
    """The verdict's error rates and its power."""

    model: str
    task: str
    seed: int
    sizes: Mapping[str, Any]
    nulls: Sequence[NullFamily]
    positives: Sequence[Positive]
    power: Sequence[Power]
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def all_nulls(self) -> NullFamily:
        """Every case without similarity, together."""
        levels = {level: sum(family.levels[level] for family in self.nulls) for level in DECIDING}
        judged, supported = (sum(getattr(family, name) for family in self.nulls) for name in ("judged", "supported"))
        counts = [[getattr(family, name) for family in self.nulls] for name in ("testable", "contradicted")]
        testable, contradicted = (None if None in each else sum(each) for each in counts)
        return NullFamily("all", "every case above", judged, supported, levels, testable, contradicted)

    @property
    def passed(self) -> bool:
        """False support at most 5 %, of all cases by its upper bound and of each family; false contradictions at most
        5 % of the cases that could be tested; and every positive supported."""
        nulls = self.all_nulls
        few = nulls.upper <= LIMIT and all(family.within_limit for family in self.nulls)
        against = nulls.contradicted is None or nulls.contradicted <= LIMIT * (nulls.testable or 0)
        return few and against and all(each.overall == "supported" for each in self.positives)

    def smallest_dose(self, level: str, queries: int, draws: int, power: float = 0.8) -> float | None:
        """The smallest dose from which on a level is found with this probability; None if no dose is."""
        points = sorted(
            (p for p in self.power if (p.level, p.queries, p.draws) == (level, queries, draws)),
            key=lambda point: -point.dose,
        )
        found = None
        for point in points:
            if point.power < power:
                break
            found = point.dose
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in ("model", "task", "seed", "passed")},
            "sizes": dict(self.sizes),
            "nulls": [{**vars(f), "levels": dict(f.levels), "upper": f.upper} for f in (*self.nulls, self.all_nulls)],
            "positives": [{**vars(p), "values": dict(p.values)} for p in self.positives],
            "power": [{**vars(p), "power": p.power} for p in self.power],
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Certificate:
        families = [part for part in given["nulls"] if part["name"] != "all"]  # which `to_json` adds
        return TypeAdapter(cls).validate_python({**given, "nulls": families})
