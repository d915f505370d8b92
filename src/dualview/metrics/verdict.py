"""The verdict: is this run's in-context learning like its fine-tuning, beyond what controls give?

The rule, on one run's records:

*supported*, when all of these hold
  1. ICL and FT each beat ZSL, and each beats the best single answer to all queries (the most frequent label): the
     95 % bootstrap intervals of the paired differences in accuracy lie above 0.
  2. Raw SimAOU and SimAM-delta each exceed every floor at p < .01. Against the shuffled query and the mean direction:
     an exact permutation test. Against random rotations of FT's updates: how far they carry what is left once the
     mean and the ZSL direction are both gone (exact variance, normal tail, layers taken to err together).
     Against any other floor: query by query, the similarity minus the floor's similarity of the same query, averaged
     over layers, tested by flipping the signs of whole queries.
  3. Rec2FTP exceeds chance: hypergeometric p < .01.
*contradicted*, when the 95 % interval of raw SimAOU or of SimAM-delta lies below 0 and the value also lies below 95 %
  of random rotations (2.5 % tail).
*indistinguishable* from its controls, otherwise; the sentence says which conditions failed.

Why these. All tests must pass together (an intersection-union test), so testing many floors needs no correction: the
verdict is wrong at most as often as its most telling test. One answer to all queries beats a zero-shot model that has
a rarer favourite, and two settings that give it agree wherever they are right: neither has learnt the task. A mean
direction common to all queries passes the Gaussian floor and fails the shuffled query and the mean direction. Two
settings that only shrink the zero-shot vector pass those and fail `zsl_direction`. Updates that many queries share in
part (by label, by length) are aligned with ICL's by chance, a little above or below 0 in each layer; more queries make
that error sharper, not smaller, and every test over queries calls it real. `rotated` knows its size, in both
directions, so it also guards *contradicted*. It looks at what neither the mean nor the ZSL direction explains, for
either would carry the other past a test of its own; and it takes the layers' chances for one, since layers that write
into one residual stream may share their directions. An array that was not recorded is not tested, nor is a similarity
that cannot be compared with the shuffled query, the mean direction or rotations (no two queries have maps of the same
length, say), and the sentence says so; one of the two similarities is the least. A similarity that was recorded and is
undefined everywhere fails; a control that is (a position shift, under rotary positions, changes nothing) is no floor
to exceed.

What it cannot say. Queries share one list of demonstrations and one fine-tuning run: the verdict is about that list
and that run. Repeat it over seeds before believing it. It knows the floors that were run and no others: quick controls
have neither random labels nor another task nor an untrained model, and a *supported* of theirs says so. Two settings
that only shift zero-shot's answers towards one label, rightly, fix the same errors and pass. Where one label is most
of the queries', a setting that has learnt may not beat it. And passing every floor shows similarity, not mechanism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dualview.io.errors import UserError
from dualview.metrics.controls import SIMILARITIES, ControlOptions, MetricControls, compute_controls
from dualview.metrics.predictions import correct
from dualview.metrics.statistics import DRAWS, paired_interval
from dualview.metrics.summary import NOT_RECORDED
from dualview.records import Records, as_records

Overall = Literal["supported", "indistinguishable", "contradicted"]
JUDGED = ("sim_aou", "sim_am")
NEEDED = ("shuffled_query", "mean_direction", "rotated")
"""Floors without which a similarity counts as not tested."""
TELLING = {
    "icl_random_labels": "random labels",
    "icl_other_task": "another task's demonstrations",
    "untrained": "untrained weights",
}
"""Controls that only `--controls full` runs, and that similarities most often do not exceed."""
LIMITS = "Intervals and p-values are over queries, which share one list of demonstrations and one fine-tuning run."


@dataclass(frozen=True)
class Condition:
    """One condition of *supported*: whether it holds (None: could not be tested), and a clause that says so."""

    metric: str
    passed: bool | None
    clause: str


@dataclass(frozen=True)
class Verdict:
    """The verdict, one sentence, and for each metric its value, interval, floors, ceiling and place between them."""

    overall: Overall
    sentence: str
    by_metric: Mapping[str, MetricControls]
    conditions: tuple[Condition, ...]
    seed: int
    alpha: float

    def to_json(self) -> dict[str, object]:
        """The result file's `verdict`."""
        passed = {condition.metric: condition.passed for condition in self.conditions}
        return {
            "overall": self.overall,
            "sentence": self.sentence,
            "by_metric": {
                name: {
                    "value": metric.value,
                    "ci": None if metric.ci is None else metric.ci.to_json(),
                    "floor": metric.floor,
                    "ceiling": metric.ceiling,
                    "p": metric.p,
                    "position": metric.position,
                    "passed": passed.get(name),
                }
                for name, metric in self.by_metric.items()
            },
            "conditions": [vars(condition) for condition in self.conditions],
            "seed": self.seed,
            "alpha": self.alpha,
            "limits": LIMITS,
        }

    def controls_json(self) -> dict[str, object]:
        """The result file's `controls`, by metric."""
        return {name: metric.to_json() for name, metric in self.by_metric.items()}


def judge(records: object, *, seed: int = 0, draws: int = DRAWS, level: float = 0.95, alpha: float = 0.01) -> Verdict:
    """Judge one run from its records alone (anything `as_records` reads); the rule is this module's docstring."""
    if seed < 0 or draws < 99 or not 0 < level < 1 or not 0 < alpha < 1:
        raise UserError("judge takes a seed from 0, at least 99 draws, and level and alpha between 0 and 1.")
    given, options = as_records(records), ControlOptions(seed, draws, level)
    metrics = compute_controls(given, options)
    conditions = (
        *(_beats_zsl(given, metrics[f"accuracy_{name}"], options) for name in ("icl", "ft")),
        *(_above_floors(metrics[name], alpha) for name in JUDGED),
        _above_chance(metrics["rec2ftp"], alpha),
    )
    against = [_against(metrics[name], level) for name in JUDGED if _below_zero(metrics[name], level)]
    tested = any(condition.passed is not None for condition in conditions if condition.metric in JUDGED)
    failed = [condition.clause for condition in conditions if condition.passed is False]
    untested = [condition.clause for condition in conditions if condition.passed is None]
    if against:
        overall, clauses = "contradicted", against
    elif failed or not tested:
        overall, clauses = "indistinguishable", failed + untested
    else:
        overall, clauses = "supported", [c.clause for c in conditions if c.passed] + untested + _untried(given)
    return Verdict(overall, f"{_OPENING[overall]}: {'; '.join(clauses)}.", metrics, conditions, seed, alpha)


_OPENING: Mapping[Overall, str] = {
    "supported": "Supported",
    "indistinguishable": "Indistinguishable from its controls",
    "contradicted": "Contradicted",
}


def _untried(records: Records) -> list[str]:
    """What a verdict of support leaves open: the telling controls that were not run."""
    missing = [title for name, title in TELLING.items() if name not in records.controls]
    return [f"not tried: {', '.join(missing)} (--controls full)"] if missing else []


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def _beats_zsl(records: Records, metric: MetricControls, options: ControlOptions) -> Condition:
    name = metric.metric.removeprefix("accuracy_")
    above = metric.ci is not None and metric.ci.low > 0
    passed = above and _beats_one_answer(records, name, options)
    interval = "" if metric.ci is None else f" ({metric.ci.low:+.3f} to {metric.ci.high:+.3f})"
    verb = "beats" if above else "does not reliably beat"
    but = ", but does not reliably beat one answer to all queries" if above and not passed else ""
    clause = f"{name.upper()} {verb} zero-shot, {metric.value or 0.0:+.3f} in accuracy{interval}{but}"
    return Condition(metric.metric, passed, clause)


def _beats_one_answer(records: Records, name: str, options: ControlOptions) -> bool:
    """Whether a setting is right more often than the most frequent label; True if there is but one label."""
    labels, counts = np.unique(records.gold, return_counts=True)
    if labels.size == 1:
        return True
    right = correct(records[name].log_probs, records.gold).astype(np.float64)
    constant = (records.gold == labels[counts.argmax()]).astype(np.float64)
    found = paired_interval(
        right, constant, seed=options.seed, name=f"one_answer_{name}", draws=options.draws, level=options.level
    )
    return found is not None and found.low > 0


def _above_floors(metric: MetricControls, alpha: float) -> Condition:
    title = SIMILARITIES[metric.metric].title
    if metric.reason == NOT_RECORDED:
        return Condition(metric.metric, None, f"{title} was not recorded, so not tested")
    if metric.value is None:
        return Condition(metric.metric, False, f"{title} is undefined for every query")
    short = {name: floor for name, floor in metric.floors.items() if floor.p is not None and floor.p >= alpha}
    unknown = [name for name in NEEDED if name not in metric.floors or metric.floors[name].p is None]
    if not short and unknown:
        return Condition(metric.metric, None, f"{title} could not be tested against {', '.join(unknown)}")
    if not short:
        floor = _number(metric.floor)
        return Condition(metric.metric, True, f"{title} is {metric.value:.3f}, above every floor (highest {floor})")
    named = ", ".join(f"{name} {_number(floor.value)} at p = {floor.p:.3g}" for name, floor in short.items())
    return Condition(metric.metric, False, f"{title} is {metric.value:.3f}, not above its floor {named}")


def _above_chance(metric: MetricControls, alpha: float) -> Condition:
    if metric.value is None or metric.p is None:
        return Condition("rec2ftp", False, f"Rec2FTP is undefined, since {metric.reason}")
    passed = metric.p < alpha
    relation = "above" if passed else "not above"
    chance = _number(metric.floors["chance"].value)
    return Condition(
        "rec2ftp", passed, f"Rec2FTP is {metric.value:.3f}, {relation} chance {chance} (p = {metric.p:.3g})"
    )


def _below_zero(metric: MetricControls, level: float) -> bool:
    below = metric.ci is not None and metric.ci.high < 0
    return below and metric.below_p is not None and metric.below_p < (1 - level) / 2


def _against(metric: MetricControls, level: float) -> str:
    interval = "" if metric.ci is None else f", {level:.0%} interval {metric.ci.low:.3f} to {metric.ci.high:.3f}"
    title = SIMILARITIES[metric.metric].title
    return f"FT's change is against ICL's direction, {title} {_number(metric.value)}{interval}"
