"""The five levels of the verdict, each with an outcome of its own, for one run.

1. *Learning*, the precondition: ICL and FT each beat zero-shot and the best single answer. Without it nothing below can
   be tested.
2. *Predictions*: the same queries change in the same way (`agreement`).
3. *Representations*: raw SimAOU above every floor.
4. *Attention*: SimAM-delta above every floor. Reported, never a condition: the dual form does not imply it.
5. *Labels*: what the labels teach is the same (`label_contrast` above every floor), where flipping them changes the
   answers of both.

A p-value over queries decides only against floors made from the same records (another query's update, the mean
direction, rotations). Queries share every draw of a control, so a control decides by its draws: the value against what
another draw would give (Student, two draws or more). A control drawn once decides nothing but this: it must not be as
high as the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from dualview.metrics.agreement import Agreement
from dualview.metrics.floors.controls import ControlOptions, FloorResult, MetricControls
from dualview.metrics.label_contrast import FLIPPED
from dualview.metrics.predictions import correct
from dualview.metrics.statistics import Interval, p_clause, paired_interval, query_interval, student_p
from dualview.metrics.summary import NOT_RECORDED
from dualview.records import Records

Outcome = Literal["supported", "not supported", "contradicted", "not testable"]
NEEDED = ("shuffled_query", "mean_direction", "rotated")
"""Floors without which a similarity counts as not tested."""
BASES = {"zero-shot": "zero-shot", "one answer": "the best single answer"}
"""What learning must beat."""
TITLES = {
    "sim_aou": "raw SimAOU",
    "sim_am": "SimAM-delta",
    "label_contrast": "label contrast",
}


@dataclass(frozen=True)
class Level:
    """One level: its outcome, the number behind it, and a clause that says why."""

    outcome: Outcome
    clause: str
    value: float | None = None
    interval: Interval | None = None
    floors: Mapping[str, float] = field(default_factory=dict[str, float])
    decided_by: str | None = None
    """The floor or test that decided: of those that failed the worst, or else the closest."""
    p: float | None = None
    detectable: float | None = None
    """The smallest value that this run would have found with a probability of 80 %."""
    query_p: float | None = None
    """One-sided p over this run's queries that the value is not above the floors made from its own records."""
    below_p: float | None = None
    """The same that it is not below 0."""
    alone: Outcome | None = None
    """What the level would be by itself, where it is not testable only for want of learning: several draws together may
    show that there was learning."""

    @property
    def by_itself(self) -> Outcome:
        return self.alone or self.outcome

    def without_learning(self, learning: Level) -> Level:
        """Not testable, because nothing was learnt; the numbers stay, and so does a reason of its own."""
        return (
            self
            if self.outcome == "not testable"
            else replace(self, outcome="not testable", clause=learning.clause, alone=self.by_itself)
        )

    def mentioning(self, further: str) -> Level:
        """The same with something more in its clause."""
        return replace(self, clause=f"{self.clause} ({further})") if further else self

    @property
    def floor(self) -> float | None:
        """The highest floor."""
        return max(self.floors.values(), default=None)

    def to_json(self) -> dict[str, object]:
        return {
            **{name: getattr(self, name) for name in ("outcome", "clause", "value", "decided_by", "p", "detectable")},
            **{name: getattr(self, name) for name in ("query_p", "below_p", "alone")},
            "interval": None if self.interval is None else self.interval.to_json(),
            "floor": self.floor,
            "floors": dict(self.floors),
        }


def learning_level(records: Records, options: ControlOptions) -> Level:
    """Whether ICL and FT each beat zero-shot and the best single answer, by the paired interval over queries."""
    gains = {
        f"{name.upper()} over {over}": _gain(records, name, over, options) for name in ("icl", "ft") for over in BASES
    }
    failing = next((name for name, (_, interval, _) in gains.items() if interval is None or interval.low <= 0), None)
    values = {name: gain for name, (gain, _, _) in gains.items()}
    least = min(values, key=lambda name: values[name])
    decided = failing or least
    value, interval, _ = gains[decided]
    clause = "ICL and FT beat zero-shot and the best single answer"
    if np.unique(records.gold).size == 1:
        clause = "all queries have the same label, which a preference for it answers as well as any learning"
    elif failing:
        setting, _, over = decided.partition(" over ")
        span = "" if interval is None else f" ({interval.low:+.3f} to {interval.high:+.3f})"
        clause = f"{setting} does not reliably beat {BASES[over]}, {value:+.3f} in accuracy{span}"
    outcome: Outcome = "not supported" if failing else "supported"
    return Level(outcome, clause, value, interval, values, decided, query_p=max(p for _, _, p in gains.values()))


def _gain(records: Records, name: str, over: str, options: ControlOptions) -> tuple[float, Interval | None, float]:
    """How much more often a setting is right than zero-shot, or than the most frequent label; interval and p."""
    right = correct(records[name].log_probs, records.gold).astype(np.float64)
    if over == "zero-shot":
        base = correct(records["zsl"].log_probs, records.gold).astype(np.float64)
    else:
        labels, counts = np.unique(records.gold, return_counts=True)
        base = (records.gold == labels[counts.argmax()]).astype(np.float64)
    gain = right - base
    found = query_interval(
        gain, seed=options.seed, name=f"gain/{name}/{over}", draws=options.draws, level=options.level
    )
    return float(gain.mean()), found, student_p(gain)


def predictions_level(
    found: Agreement, floors: Mapping[str, FloorResult], below: Mapping[str, float], alpha: float
) -> Level:
    """Agreement above 0 by permutations of the queries and by their signs, also beyond what their lengths and any
    function of their zero-shot log-odds explain.

    The p-value is that of the permutations, unless only another test fails. `below` are the p-values of the same tests
    that it is not below 0.
    """
    if found.value is None:
        return Level("not testable", f"agreement is undefined: {found.reason}")
    above = {test: 1.0 if floor.p is None else floor.p for test, floor in floors.items()}
    decided = next((test for test, p in above.items() if p >= alpha), "permuted")
    outcome: Outcome = "supported" if above[decided] < alpha else "not supported"
    if max(below.values()) < alpha:
        outcome, decided = "contradicted", "permuted"
    relation = {
        "supported": "the same way",
        "contradicted": "against each other",
        "not supported": "no more than " + _EXPLAINED.get(decided, "by chance"),
    }
    p = (below if outcome == "contradicted" else above)[decided]
    clause = f"the same queries move {relation[outcome]}, agreement {found.value:.3f} ({p_clause(p)})"
    return Level(
        outcome,
        clause,
        found.value,
        found.interval,
        {test: floor.value or 0.0 for test, floor in floors.items()},
        decided,
        p,
        found.detectable,
        query_p=max(above.values()),
        below_p=max(below.values()),
    )


_EXPLAINED = {"length": "their lengths explain", "zero-shot": "their zero-shot log-odds explain"}


def similarity_level(metric: MetricControls, alpha: float) -> Level:
    """A similarity against every floor; contradicted where it is as surely below 0 as support has to be above."""
    title = TITLES[metric.metric]
    floors = {name: floor.value for name, floor in metric.floors.items() if floor.value is not None}
    if metric.reason == NOT_RECORDED:
        return Level("not testable", f"{title} was not recorded")
    if metric.value is None:
        return Level("not testable", f"{title} is {metric.reason}")
    own = [floor.p for floor in metric.floors.values() if floor.p is not None and not floor.draws]
    about = Level(
        "not testable",
        "",
        metric.value,
        metric.ci,
        floors,
        detectable=metric.detectable,
        query_p=max(own, default=None),
        below_p=metric.below_p,
    )
    below = metric.ci is not None and metric.ci.high < 0
    if below and metric.below_p is not None and metric.below_p < alpha:
        clause = f"{title} is {metric.value:.3f}: FT moves against ICL"
        return replace(about, outcome="contradicted", clause=clause, decided_by="rotated", p=metric.below_p)
    unknown = [name for name in NEEDED if name not in metric.floors or metric.floors[name].p is None]
    if unknown:
        why = ": beyond what these queries share, nothing is left of it" if unknown == ["rotated"] else ""
        return replace(about, clause=f"{title} cannot be tested against {', '.join(unknown)}{why}")
    tested = {name: floor.p for name, floor in metric.floors.items() if floor.p is not None}
    worst = max(tested, key=lambda name: tested[name])
    # A test may weigh queries otherwise than the floor does: a value at or below a floor is not above it at any p.
    as_high = [name for name, value in floors.items() if value >= metric.value]
    if tested[worst] >= alpha or as_high:
        named = worst if tested[worst] >= alpha else max(as_high, key=lambda name: floors[name])
        p = tested[worst] if named == worst and tested[worst] >= alpha else None
        by = f"{floors.get(named, float('nan')):.3f}" + ("" if p is None else f" at {p_clause(p)}")
        clause = f"{title} is {metric.value:.3f}, not above its floor {named} ({by})"
        return replace(about, outcome="not supported", clause=clause, decided_by=named, p=p)
    highest = max(floors, key=lambda name: floors[name])
    clause = f"{title} is {metric.value:.3f}, above every floor (highest {highest}, {floors[highest]:.3f})"
    return replace(about, outcome="supported", clause=clause, decided_by=worst, p=tested[worst])


def labels_level(records: Records, contrast: MetricControls, options: ControlOptions, alpha: float) -> Level:
    """The label contrast, where flipping the labels changes the answers of both settings."""
    if contrast.reason == NOT_RECORDED:
        learner = records.meta.get("learner")
        if learner is None or FLIPPED["ft"] in records.settings:
            return Level("not testable", "flipped labels were not run")
        cure = "compile it again" if learner == "patch" else "train one and put it in its folder flipped_labels"
        return Level("not testable", f"FT has no twin that learnt from flipped labels ({cure})")
    for name, flipped in FLIPPED.items():
        right = [correct(records[each].log_probs, records.gold).astype(np.float64) for each in (name, flipped)]
        found = paired_interval(*right, seed=options.seed, name=f"flipped/{name}", draws=options.draws)
        if found is None or found.low <= 0:
            lost = float((right[0] - right[1]).mean())
            clause = f"flipping the labels does not change what {name.upper()} answers ({-lost:+.3f} in accuracy)"
            return Level("not testable", clause, contrast.value)
    return similarity_level(contrast, alpha)
