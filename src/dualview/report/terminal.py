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
from dualview.io.display import TextTable
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
    parts = _with_note(table)
    if (papers := tables.papers_table(measured)) is not None:
        parts += [Text("\npublished, other models:", "dim"), papers.rich(style="dim", named=False)]
    if measured.verdict is not None:
        parts += _verdict(measured.verdict)
    for name, learner in measured.learners.items():
        title = name.replace(":", " ", 1)
        parts += [Text(f"\n{title} in the place of fine-tuning\n", "bold")]
        parts += [tables.metrics_table(learner, learner=title).rich(named=False)]
        parts += [] if learner.verdict is None else _verdict(learner.verdict)
    return Group(*parts)


def seeds_table(several: SeedsResult) -> RenderableType:
    """Each number over seeds: its mean, the interval of the mean, and every seed's value."""
    table = tables.seeds_table(several)
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in several.verdicts.items())
    parts: list[RenderableType] = [
        _heading(several.results[0]),
        table.rich(named=False),
        Text(f"\n{table.note}", "dim"),
    ]
    if several.verdict is not None:
        parts += _verdict(several.verdict)
    for name, verdict in several.learners.items():
        parts += [Text(f"\n{name.replace(':', ' ', 1)} in the place of fine-tuning", "bold"), *_verdict(verdict)]
    return Group(*parts, Text(f"\nverdicts of the draws, each alone: {verdicts or 'none'}", "bold"))


def _verdict(verdict: VerdictPart) -> list[RenderableType]:
    """The sentence, and the levels behind it."""
    parts: list[RenderableType] = [Text(f"\n{verdict.sentence}\n", "bold")]
    if (levels := tables.levels_table(verdict)) is not None:
        parts += _with_note(levels)
    return parts


def _with_note(table: TextTable) -> list[RenderableType]:
    return [table.rich(named=False), Text(f"\n{table.note}", "dim")]


def _heading(result: Result) -> Text:
    first, tuning, *more = run_lines(result)
    return Text.assemble(
        (run_title(result), "bold"), f": {first}\n{tuning}\n", *((f"{line}\n", "dim") for line in more)
    )


def certificate_report(found: Certificate) -> Group:
    """The certificate's tables and its sentence."""
    parts: list[RenderableType] = []
    for table in certificate_tables(found):
        parts += [Text(table.label, "bold"), table.rich(named=False), Text(f"{table.note}\n", "dim")]
    return Group(*parts, Text(sentence(found), "bold"))


def task_table(tasks: Sequence[Task]) -> Table:
    rows: list[list[str]] = []
    for task in tasks:
        choices = task.choices if isinstance(task.choices, str) else ", ".join(task.choices or ())
        labels = ", ".join(task.labels) or f"the row's own ({choices})"
        rows.append([task.name, task.template, labels, task.train.rpartition(":")[0] or task.train])
    return TextTable("Tasks", ("task", "template", "labels", "rows from"), rows).rich()


def task_check_table(checks: Sequence[TaskCheck]) -> RenderableType:
    rows = [
        [check.task, name, str(split.rows), ", ".join(map(str, split.label_counts))]
        for check in checks
        for name, split in check.splits.items()
    ]
    notes = [Text(f"! {check.task}: {warning}", "yellow") for check in checks for warning in check.warnings]
    return Group(TextTable("Rows", ("task", "split", "rows", "rows by label"), rows).rich(), *notes)


def asset_table(statuses: Sequence[AssetStatus]) -> Table:
    rows: list[list[str]] = []
    for status in statuses:
        state = status.state if status.problem is None else f"{status.state}: {status.problem}"
        size = f"{status.size / 1e6:.0f} MB"
        rows.append([status.title, status.source, status.licence, size, state, str(status.path)])
    return TextTable("Assets", ("asset", "from", "licence", "size", "state", "where"), rows).rich()


def conversion_table(conversions: Sequence[Conversion]) -> Table:
    rows = [[each.source, each.dtype, f"{each.size / 1e6:.0f} MB", str(each.path)] for each in conversions]
    return TextTable("Conversions", ("converted GGUF", "dtype", "size", "where"), rows).rich()
