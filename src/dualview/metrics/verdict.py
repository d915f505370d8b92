"""The verdict: does in-context learning change this model as fine-tuning does, beyond what controls give?

`metrics.levels` has the five levels and their tests. Over them:

*not testable*   ICL or FT has not learnt the task: nothing can be said of how they learn
*contradicted*   a level that counts is contradicted (predictions alone: unless the others were tested and show nothing)
*supported*      predictions, representations and labels are all supported
*partial*        some of them are, and none is contradicted
*not supported*  none is

One run is one list of demonstrations and one fine-tuning: its verdict is about those. A claim about a model and a task
needs several draws: `judge` of a list of records, `dualview run --seeds`, `dualview report STORE`. There the unit is
the draw: each level's differences value − floor, one for each draw, must be above 0 by Student's t (from seven draws,
by flipping their signs). But the draws ask the same queries of the same model: how ICL and how FT move a query
may agree by chance, and then they agree in every draw. So the tests over queries, taken together, must hold as well (a
claim about draws and queries needs both units: Clark 1973, "The language-as-fixed-effect fallacy").

All floors of a level must be exceeded, and all three levels be supported (an intersection-union test), so testing many
needs no correction: the verdict is wrong at most as often as its most telling test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np

from dualview.io.display import as_html
from dualview.io.errors import UserError
from dualview.metrics.agreement import Agreement, agreement
from dualview.metrics.arrays import library, to_numpy
from dualview.metrics.floors.controls import ControlOptions, FloorResult, MetricControls, compute_controls
from dualview.metrics.floors.tables import RecordTables
from dualview.metrics.label_contrast import FLIPPED
from dualview.metrics.levels import (
    Level,
    Outcome,
    labels_level,
    learning_level,
    predictions_level,
    similarity_level,
)
from dualview.metrics.measured import Measured, VerdictPart
from dualview.metrics.statistics import (
    DRAWS,
    Interval,
    above_zero_p,
    detectable_mean,
    draw_interval,
    found_at,
    p_clause,
    same_queries_p,
)
from dualview.records import MAIN_SETTINGS, Records, as_records

Overall = Literal["supported", "partial", "not supported", "contradicted", "not testable"]
LEVELS = ("learning", "predictions", "representations", "attention", "labels")
DECIDING = ("predictions", "representations", "labels")
DECIDED_BY = {
    "agreement": "predictions",
    "sim_aou": "representations",
    "sim_am": "attention",
    "label_contrast": "labels",
}
"""The level that a metric decides."""
TELLING = {
    "random labels": ("icl_random_labels", "ft_random_labels"),
    "another task's demonstrations": ("icl_other_task", "ft_other_task"),
    "untrained weights": ("untrained",),
}
"""Controls that only `--controls full` runs, and that similarities most often do not exceed: one of each is enough."""
ALPHA, ALPHA_OVER_DRAWS = 0.01, 0.05


@dataclass(frozen=True)
class Verdict:
    """The verdict: one word, one sentence, the levels, and each metric with its interval, floors and ceilings."""

    overall: Overall
    sentence: str
    unit: str
    """What it is about: one list of demonstrations, or so many draws of them."""
    levels: Mapping[str, Level]
    by_metric: Mapping[str, MetricControls]
    seed: int
    alpha: float

    def _repr_html_(self) -> str | None:
        """In a notebook: the sentence and the levels."""
        return as_html(self)

    def to_json(self) -> dict[str, object]:
        """The result file's `verdict`."""
        return {
            "overall": self.overall,
            "sentence": self.sentence,
            "unit": self.unit,
            "levels": {name: level.to_json() for name, level in self.levels.items()},
            "by_metric": {
                name: {
                    "value": metric.value,
                    "ci": None if metric.ci is None else metric.ci.to_json(),
                    "floor": metric.floor,
                    "ceiling": metric.ceiling,
                    "p": metric.p,
                    "position": metric.position,
                    "passed": self._passed(name),
                }
                for name, metric in self.by_metric.items()
            },
            "seed": self.seed,
            "alpha": self.alpha,
        }

    def _passed(self, metric: str) -> bool | None:
        """Whether the level that a metric decides is supported by itself, learning or not; None where it decides none,
        or cannot."""
        level = self.levels.get(DECIDED_BY.get(metric, ""))
        return None if level is None or level.by_itself == "not testable" else level.by_itself == "supported"

    def controls_json(self) -> dict[str, object]:
        """The result file's `controls`, by metric."""
        return {name: metric.to_json() for name, metric in self.by_metric.items()}


def judge(
    records: object,
    *,
    learner: str = "ft",
    seed: int = 0,
    draws: int = DRAWS,
    level: float = 0.95,
    alpha: float | None = None,
) -> Verdict:
    """Judge one run from its records alone (anything `as_records` reads), or several draws from a list of them.

    learner   what is compared with in-context learning: `ft`, `patch`, `adapter` or `adapter:NAME`
    alpha     the p-value below which a test counts: .01 within a run, .05 over draws
    """
    if seed < 0 or draws < 99 or not 0 < level < 1 or not 0 < (ALPHA if alpha is None else alpha) < 1:
        raise UserError("judge takes a seed from 0, at least 99 draws, and level and alpha between 0 and 1.")
    if isinstance(records, list | tuple):
        several = cast("Sequence[object]", records)
        if not several:
            raise UserError("judge was given an empty list; give records, or a list of them.")
        judged = [judge(each, learner=learner, seed=seed, draws=draws, level=level) for each in several]
        return judged[0] if len(judged) == 1 else over_draws([each.levels for each in judged], alpha=alpha)
    given = as_records(records)
    given = given if learner == "ft" else given.judged_as_ft(learner)
    return judge_one(given, ControlOptions(seed, draws, level), ALPHA if alpha is None else alpha)


def judge_one(
    given: Records,
    options: ControlOptions,
    limit: float,
    tables: RecordTables | None = None,
    agreed: Agreement | None = None,
) -> Verdict:
    """The verdict on one run; `tables` and `agreed` are its similarities and agreement, where they are known."""
    seed, draws = options.seed, options.draws
    scores = [given[name].log_probs for name in MAIN_SETTINGS]
    if np.isnan(scores[0]).any() or np.isposinf(scores[0]).any():
        raise UserError("zero-shot scores are not finite: the model itself, or what was recorded of it, is broken.")
    agreed = agreed or agreement(given.gold, *scores, seed=seed, draws=draws)
    floors, below = {test: FloorResult(0.0, p) for test, p in agreed.tests.items()}, agreed.below
    if agreed.value is not None:
        beyond = {"zero-shot": agreement(given.gold, *scores, bends=True, seed=seed, draws=draws)}
        if given.columns is not None:
            beyond["length"] = agreement(given.gold, *scores, length=given.columns, seed=seed, draws=draws)
        for name, found in beyond.items():
            if found.nothing_left:  # what agrees is the fit's own
                floors[name], below[name] = FloorResult(0.0, 1.0), 1.0
            elif found.value is not None:
                floors[name], below[name] = FloorResult(0.0, max(found.tests.values())), max(found.below.values())
    metrics = {
        **compute_controls(given, options, tables),
        "agreement": MetricControls(
            "agreement",
            agreed.value,
            agreed.interval,
            floors,
            p=agreed.p,
            below_p=agreed.below_p,
            reason=agreed.reason,
            detectable=agreed.detectable,
        ),
    }
    levels = {
        "learning": learning_level(given, options),
        "predictions": predictions_level(agreed, floors, below, limit),
        "representations": similarity_level(metrics["sim_aou"], limit),
        "attention": similarity_level(metrics["sim_am"], limit),
        "labels": labels_level(given, metrics["label_contrast"], options, limit),
    }
    levels = {
        name: _named(
            found.mentioning(_left_out(given, name)), str(given.meta.get("learner", "FT")).replace(":", " ", 1)
        )
        for name, found in levels.items()
    }
    levels = _where_learnt(levels)
    overall = overall_of(levels)
    sentence = _sentence(overall, levels, "for this list of demonstrations", _untried(given, overall))
    return Verdict(overall, sentence, "run", levels, metrics, seed, limit)


_OF_OUTPUTS = {"representations": MAIN_SETTINGS, "labels": ("icl", "ft", *FLIPPED.values())}
"""The settings whose outputs a level compares."""


def _left_out(records: Records, level: str) -> str:
    """How many queries a level compares without, because an output is not finite; empty if none."""
    stacks = [records[name].h for name in _OF_OUTPUTS.get(level, ()) if name in records.settings]
    whole = [to_numpy(library(h).isfinite(h.reshape(len(h), -1)).all(1)) for h in stacks if h is not None]
    n = len(records.gold)
    missing = n - int(np.logical_and.reduce(whole).sum()) if whole else 0
    return f"{missing} of {n} queries are not finite somewhere and left out there" if missing else ""


def _where_learnt(levels: Mapping[str, Level]) -> dict[str, Level]:
    """Without learning nothing can be said of how it is done, so nothing else is testable."""
    learning = levels["learning"]
    if learning.outcome == "supported":
        return dict(levels)
    return {name: each if name == "learning" else each.without_learning(learning) for name, each in levels.items()}


def _named(level: Level, learner: str) -> Level:
    """A level's words for another learner than fine-tuning."""

    def named(text: str) -> str:
        return re.sub(r"\bFT\b", learner, text)

    decided = None if level.decided_by is None else named(level.decided_by)
    floors = {named(floor): value for floor, value in level.floors.items()}
    return replace(level, clause=named(level.clause), decided_by=decided, floors=floors)


def over_draws(draws: Sequence[Mapping[str, Level]], *, alpha: float | None = None) -> Verdict:
    """The verdict over several draws of demonstrations, from the levels of each: the draw is the unit."""
    limit = ALPHA_OVER_DRAWS if alpha is None else alpha
    levels = {name: _over(name, [each[name] for each in draws if name in each], limit) for name in LEVELS}
    levels = _where_learnt(levels)
    overall = overall_of(levels)
    sentence = _sentence(overall, levels, f"over {len(draws)} draws of demonstrations", [])
    return Verdict(overall, sentence, f"{len(draws)} draws", levels, {}, 0, limit)


def verdict_over(results: Sequence[Measured]) -> VerdictPart | None:
    """The verdict over several results that differ in their draw; None if fewer than two of them have levels."""
    return over_verdicts([each.verdict for each in results if each.verdict is not None])


def over_verdicts(verdicts: Sequence[VerdictPart]) -> VerdictPart | None:
    """The same from the verdicts of the results."""
    levels = [_levels_of(each) for each in verdicts if each.levels]
    return VerdictPart.model_validate(over_draws(levels).to_json()) if len(levels) > 1 else None


def _levels_of(verdict: VerdictPart) -> dict[str, Level]:
    """The levels of a result file."""
    return {
        name: Level(
            cast("Outcome", part.outcome),
            part.clause,
            part.value,
            None if part.interval is None else Interval(*part.interval),
            part.floors,
            part.decided_by,
            part.p,
            part.detectable,
            part.query_p,
            part.below_p,
            cast("Outcome | None", part.alone),
        )
        for name, part in verdict.levels.items()
    }


def _over(name: str, draws: Sequence[Level], alpha: float) -> Level:
    """One level over draws: every difference value − floor above 0, and not by a chance that all draws share."""
    usable = [each for each in draws if each.by_itself != "not testable" and each.value is not None]
    # Few of many would be a choice of draws, by what can be tested in them.
    if len(usable) < max(2, len(draws) / 2):
        why = draws[0].clause if draws else "it is not in the results"
        return Level("not testable", f"{len(usable)} of {len(draws)} draws can be tested: {why}")
    values = np.array([each.value for each in usable], dtype=np.float64)
    shared = set.intersection(*(set(each.floors) for each in usable))
    gaps: dict[str, np.ndarray] = {}
    # In the levels' own order: the tests of agreement have one floor, 0, and of equals the first is named.
    for floor in (floor for floor in usable[0].floors if floor in shared):
        own = np.array([each.floors[floor] for each in usable])
        gaps[floor] = own if name == "learning" else values - own  # learning's floors are the gains themselves
    tested = {floor: _above_zero_p(gap, usable) for floor, gap in gaps.items()}
    worst = max(tested, key=lambda floor: tested[floor])
    shared_p = same_queries_p([each.query_p for each in usable if each.query_p is not None])
    if shared_p is not None and tested[worst] < alpha <= shared_p:
        worst, tested[QUERIES] = QUERIES, shared_p
    mean, interval = float(values.mean()), draw_interval([each.value for each in usable])
    floors = {floor: float(np.mean([each.floors[floor] for each in usable])) for floor in gaps}
    outcome: Outcome = "supported" if tested[worst] < alpha else "not supported"
    p = tested[worst]
    below = max(above_zero_p(-values), same_queries_p([b for each in usable if (b := each.below_p) is not None]) or 0.0)
    if name != "learning" and below < alpha / 2:
        outcome, p, worst = "contradicted", below, "zero"
    relation = {"supported": "above", "not supported": "not above", "contradicted": "below"}[outcome]
    what = "the gains in accuracy are" if name == "learning" else f"{mean:.3f} on average is"
    of_zero = name in ("learning", "predictions")
    than = "chance in these queries" if worst == QUERIES else "0" if of_zero else worst
    count = f"{len(usable)} draws" if len(usable) == len(draws) else f"{len(usable)} of {len(draws)} draws"
    clause = f"{name}: {what} {relation} {than} ({p_clause(p)}, {count})"
    return Level(outcome, clause, mean, interval, floors, worst, p, _detectable(gaps.get(worst, values), usable, alpha))


QUERIES = "queries"
"""What decides over draws where every floor is exceeded, but no more than chance in their common queries explains."""


def _detectable(gap: np.ndarray, draws: Sequence[Level], alpha: float) -> float | None:
    """What the draws would have found, and what their queries would: the larger."""
    spreads = [each.detectable / found_at(ALPHA) for each in draws if each.detectable is not None]
    of_queries = found_at(alpha) * float(np.mean(spreads)) if spreads else 0.0
    of_draws = detectable_mean(gap, alpha)
    return None if of_draws is None else max(of_draws, of_queries)


def _above_zero_p(gap: np.ndarray, draws: Sequence[Level]) -> float:
    """p that the gap is above 0 over draws.

    Student's t asks for gaps that are alike, and identical updates may be far above a floor in one draw and less so in
    another, where the floor is higher. If every draw is supported by itself, the largest of their p-values will do:
    P(all p ≤ a) ≤ P(one p ≤ a) ≤ a, however the draws depend on one another.
    """
    over = above_zero_p(gap)
    if not (gap > 0).all() or any(each.by_itself != "supported" for each in draws):
        return over
    return min(over, max(_ALONE_P if each.p is None else each.p for each in draws))


_ALONE_P = 0.025  # of a level without a p of its own: a 95 % interval that is above 0


def overall_of(levels: Mapping[str, Level]) -> Overall:
    """The word for all levels together."""
    outcomes = [levels[name].outcome for name in DECIDING]
    if levels["learning"].outcome != "supported":
        return "not testable"
    against = [name for name in DECIDING if levels[name].outcome == "contradicted"]
    # Two readings of the same few features of a text agree or disagree by chance, in all queries alike. So predictions
    # alone are no contradiction where something else was tested and shows nothing.
    alone = against == ["predictions"] and "not supported" in outcomes and "supported" not in outcomes
    if against and not alone:
        return "contradicted"
    if all(outcome == "supported" for outcome in outcomes):
        return "supported"
    if "supported" in outcomes:
        return "partial"
    return "not testable" if all(outcome == "not testable" for outcome in outcomes) else "not supported"


_OPENING: Mapping[Overall, str] = {
    "supported": "Supported",
    "partial": "Partly supported",
    "not supported": "Not supported",
    "contradicted": "Contradicted",
    "not testable": "Not testable",
}


def _sentence(overall: Overall, levels: Mapping[str, Level], about: str, untried: list[str]) -> str:
    if levels["learning"].outcome != "supported":
        clauses = [levels["learning"].clause]
    else:
        order = ("contradicted", "supported", "not supported", "not testable")
        named = sorted((levels[name] for name in DECIDING), key=lambda each: order.index(each.outcome))
        clauses = [each.clause for each in named if overall != "contradicted" or each.outcome == "contradicted"]
    return f"{_OPENING[overall]} {about}: {'; '.join([*clauses, *untried])}."


def _untried(records: Records, overall: Overall) -> list[str]:
    """What a verdict of support leaves open: the telling controls that were not run."""
    if overall != "supported":
        return []
    missing = [title for title, names in TELLING.items() if not any(run.startswith(names) for run in records.controls)]
    untried = [f"not tried: {', '.join(missing)} (--controls full)"] if missing else []
    if any(records[name].off_span is None for name in ("icl", "ft")):
        untried.append("not tried: heads that both settings shrink (without off_span in the records)")
    return untried
