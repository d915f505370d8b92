"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dualview.analyses.certificate.certificate import Certificate
from dualview.comparison.result import Result
from dualview.comparison.seeds import SeedsResult
from dualview.io.assets import AssetStatus
from dualview.io.gguf.cache import Conversion
from dualview.metrics.measured import Measured, VerdictPart
from dualview.report import tables
from dualview.report.catalogue import run_lines, run_title
from dualview.report.certificate import certificate_tables, sentence
from dualview.tasks.task import Task, TaskCheck


def result_table(result: Result) -> RenderableType:
    """The whole result: what was run, every number with its controls, the verdict and the warnings."""
    skipped = [f"control {name} was not run: {why}" for name, why in (result.controls_skipped or {}).items()]
    warnings = [Text(f"! {warning}", "yellow") for warning in (*result.warnings, *skipped)]
    return Group(_heading(result), metrics_report(result), *warnings)


def metrics_report(measured: Measured) -> Group:
    """The metrics, what the papers found on the same task, and the verdict."""
    table = tables.metrics_table(measured)
    parts: list[RenderableType] = [_rich(table), Text(f"\n{table.note}", "dim")]
    if (papers := tables.papers_table(measured)) is not None:
        parts += [Text("\npublished, other models:", "dim"), _rich(papers, style="dim")]
    if measured.verdict is not None:
        parts += _verdict(measured.verdict)
    for name, learner in measured.learners.items():
        title = name.replace(":", " ", 1)
        parts += [Text(f"\n{title} in the place of fine-tuning\n", "bold")]
        parts += [_rich(tables.metrics_table(learner, learner=title))]
        parts += [] if learner.verdict is None else _verdict(learner.verdict)
    return Group(*parts)


def seeds_table(several: SeedsResult) -> RenderableType:
    """Each number over seeds: its mean, the interval of the mean, and every seed's value."""
    table = tables.seeds_table(several)
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in several.verdicts.items())
    parts: list[RenderableType] = [_heading(several.results[0]), _rich(table), Text(f"\n{table.note}", "dim")]
    if several.verdict is not None:
        parts += _verdict(several.verdict)
    for name, verdict in several.learners.items():
        parts += [Text(f"\n{name.replace(':', ' ', 1)} in the place of fine-tuning", "bold"), *_verdict(verdict)]
    return Group(*parts, Text(f"\nverdicts of the draws, each alone: {verdicts or 'none'}", "bold"))


def _verdict(verdict: VerdictPart) -> list[RenderableType]:
    """The sentence, and the levels behind it."""
    parts: list[RenderableType] = [Text(f"\n{verdict.sentence}\n", "bold")]
    if (levels := tables.levels_table(verdict)) is not None:
        parts += [_rich(levels), Text(f"\n{levels.note}", "dim")]
    return parts


def _heading(result: Result) -> Text:
    first, tuning, *more = run_lines(result)
    return Text.assemble(
        (run_title(result), "bold"), f": {first}\n{tuning}\n", *((f"{line}\n", "dim") for line in more)
    )


def _rich(table: tables.TextTable, style: str = "") -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold", style=style)
    made.add_column("")  # the names need no heading here
    for index, text in enumerate(table.head[1:], start=1):
        made.add_column(text, justify="right" if index in table.numeric else "left")
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made


def _columns(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def certificate_report(found: Certificate) -> Group:
    """The certificate's tables and its sentence."""
    parts: list[RenderableType] = []
    for table in certificate_tables(found):
        parts += [Text(table.label, "bold"), _rich(table), Text(f"{table.note}\n", "dim")]
    return Group(*parts, Text(sentence(found), "bold"))


def task_table(tasks: Sequence[Task]) -> Table:
    table = _columns("task", "template", "labels", "rows from")
    for task in tasks:
        choices = task.choices if isinstance(task.choices, str) else ", ".join(task.choices or ())
        labels = ", ".join(task.labels) or f"the row's own ({choices})"
        table.add_row(task.name, Text(task.template), Text(labels), Text(task.train.rpartition(":")[0] or task.train))
    return table


def task_check_table(checks: Sequence[TaskCheck]) -> RenderableType:
    table = _columns("task", "split", "rows", "rows by label")
    notes: list[Text] = []
    for check in checks:
        for name, split in check.splits.items():
            table.add_row(check.task, name, str(split.rows), ", ".join(map(str, split.label_counts)))
        notes += [Text(f"! {check.task}: {warning}", "yellow") for warning in check.warnings]
    return Group(table, *notes)


def asset_table(statuses: Sequence[AssetStatus]) -> Table:
    table = _columns("asset", "from", "licence", "size", "state", "where")
    for status in statuses:
        state = status.state if status.problem is None else f"{status.state}: {status.problem}"
        size = f"{status.size / 1e6:.0f} MB"
        table.add_row(status.title, status.source, status.licence, size, state, str(status.path))
    return table


def conversion_table(conversions: Sequence[Conversion]) -> Table:
    table = _columns("converted GGUF", "dtype", "size", "where")
    for each in conversions:
        table.add_row(each.source, each.dtype, f"{each.size / 1e6:.0f} MB", str(each.path))
    return table
