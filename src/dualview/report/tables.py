"""The tables of a result: its numbers with their controls, the papers' values, the verdict's levels, and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dualview.comparison.result import Result
from dualview.comparison.seeds import SeedsResult
from dualview.io.display import TextTable
from dualview.metrics.measured import Measured, VerdictPart
from dualview.metrics.statistics import p_text
from dualview.report.catalogue import NUMBERS, Number, accuracy_interval, learner_numbers, present, shown
from dualview.report.published import published

_NARROW = ("number", "value", "95 % interval", "highest floor", "ceiling", "notes")
_WIDE = (*_NARROW[:-1], "p", "notes")


def _row(measured: Measured, number: Number, wide: bool) -> dict[str, str]:
    """One number with everything it is compared with, by the heads of its columns; each paper has a column too."""
    value, control = measured.number(number.key), measured.control_of(number.key)
    floor, ci = (None, None) if control is None else (control.highest_floor, control.ci)
    if number.key.startswith("accuracy.") and value is not None:
        ci = accuracy_interval(measured, number.key.partition(".")[2], value)  # no control has it
    p = measured.rec2ftp.p if number.key == "rec2ftp.value" else None if control is None else control.p
    taught = None if measured.label_contrast is None else measured.label_contrast.log_odds
    if number.key == "label_contrast.log_odds.value" and taught is not None:  # its own test says all
        floor, ci, p = ("permuted", 0.0), taught.interval, taught.p
    tested = "" if p is None or value is None else p_text(p)  # a test of what is undefined says nothing
    notes = _notes(measured, number.key)
    if wide:
        notes = notes or _gain(measured, number.key)
    elif number.key == "rec2ftp.value" and tested:  # without a column of p: it is needed to read the number
        notes = f"p {tested}; {notes}"
    return {
        "number": number.name,
        "value": shown(value, number.style),
        "95 % interval": span(ci, number.style),
        "highest floor": "" if floor is None else f"{floor[0]} {floor[1]:{number.style}}",
        "ceiling": "" if control is None or control.ceiling is None else f"{control.ceiling:.3f}",
        "p": tested,
        "notes": notes,
        **_published(measured, number),
    }


def span(ci: tuple[float, float] | None, style: str = ".3f") -> str:
    """An interval as text.

    >>> span((0.25, 0.5))
    '0.250 to 0.500'
    """
    return "" if ci is None else f"{ci[0]:{style}} to {ci[1]:{style}}"


def _notes(measured: Measured, key: str) -> str:
    """What a value means nothing without."""
    if key == "rec2ftp.value":
        part = measured.rec2ftp
        if part.value is None or part.p is None:
            return part.reason or ""
        return f"{part.n_both} of {part.n_ft}; reverse {shown(part.reverse)}"
    if key == "sim_aou.normalised" and measured.sim_aou.noise_floor is not None:
        return f"noise alone {measured.sim_aou.noise_floor:.3f}"
    undefined = (measured.sim_am.undefined or {}).get("delta") if key == "sim_am.delta" else None
    if undefined is not None and undefined.count:
        return f"{undefined.count / undefined.of:.0%} undefined, left out"
    return ""


def _gain(measured: Measured, key: str) -> str:
    """An accuracy's difference from zero-shot's, with the interval of the paired difference."""
    control = (measured.controls or {}).get(key.replace(".", "_")) if key.startswith("accuracy.") else None
    if control is None or control.ci is None:
        return ""
    return f"over zero-shot {shown(control.value, '+.3f')} ({span(control.ci, '+.3f')})"


def _published(measured: Measured, number: Number) -> dict[str, str]:
    found: dict[str, str] = {}
    for source, paper in published(measured.task.name if isinstance(measured, Result) else "").items():
        if number.key in paper:
            chance = paper.get("rec2ftp.chance") if number.key == "rec2ftp.value" else None
            found[source] = format(paper[number.key], number.style)
            found[source] += "" if chance is None else f" (chance {chance:.3f})"
    return found


INTERVALS = "95 % intervals: Wilson over queries for accuracies and Rec2FTP, bootstrap over queries for the others."


def metrics_table(measured: Measured, *, wide: bool = False, learner: str | None = None) -> TextTable:
    """The metrics with their controls; `wide` adds every p, the gains over zero-shot and the papers' values.

    `learner` is the title of what is judged in ft's place.
    """
    numbers = present(measured) if learner is None else learner_numbers(measured, learner)
    rows = [_row(measured, number, wide) for number in numbers]
    sources = _sources(rows) if wide else []
    head = [*(_WIDE if wide else _NARROW), *sources]
    note = INTERVALS + (" The papers' columns are of other models." if sources else "")
    return TextTable("The numbers with their controls", head, _cells(rows, head), _all_but(head, "notes"), note)


def _sources(rows: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if name not in _WIDE))


def _cells(rows: Sequence[Mapping[str, str]], head: Sequence[str]) -> list[list[str]]:
    return [[row.get(name, "") for name in head] for row in rows]


def _all_but(head: Sequence[str], *text: str) -> set[int]:
    return {i for i, name in enumerate(head) if i and name not in text}


def papers_table(measured: Measured) -> TextTable | None:
    """The papers' values on the same task, a column for each paper."""
    rows = [row for number in present(measured) if _sources([row := _row(measured, number, wide=False)])]
    if not rows:
        return None
    head = ["number", *_sources(rows)]
    return TextTable("Published values, other models", head, _cells(rows, head), _all_but(head))


def levels_table(verdict: VerdictPart) -> TextTable | None:
    """The verdict level by level; None for a result of the first edition, which has conditions instead."""
    if not verdict.levels:
        return None
    head = ("level", "outcome", "value", "highest floor", "decided by", "p", "detectable")
    rows = [
        (
            name,
            level.outcome,
            _short(level.value),
            _short(level.floor) if name != "learning" else "",
            level.decided_by or "",
            "" if level.p is None else p_text(level.p, ".3g"),
            _short(level.detectable),
        )
        for name, level in verdict.levels.items()
    ]
    return TextTable("The verdict, level by level", head, rows, {2, 3, 5, 6}, LEVELS_NOTE)


LEVELS_NOTE = (
    "Learning must hold before anything else can be tested; attention is reported and decides nothing. Detectable: the "
    "smallest value beyond its floors that would have been found with a probability of 80 %."
)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"


def seeds_table(several: SeedsResult) -> TextTable:
    """Each number over several draws of demonstrations: its mean, the interval of the mean, and every value."""
    head = ["number", "mean", "95 % interval", *(f"seed {seed}" for seed in several.seeds)]
    rows: list[list[str]] = []
    for number in NUMBERS:
        row = several.summary.get(number.key)
        if row is not None:
            values = [shown(value, number.style) for value in row.values]
            rows.append([number.name, shown(row.mean, number.style), span(row.ci, number.style), *values])
    return TextTable("Each number over seeds", head, rows, _all_but(head), OVER_SEEDS)


OVER_SEEDS = "95 % intervals: Student over draws, cut to the values a number can have."
