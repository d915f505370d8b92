"""Results as tables for a terminal: what was found, what it must be held against, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dualview.comparison.result import Result
from dualview.comparison.seeds import SeedsResult
from dualview.io.assets import AssetStatus
from dualview.io.gguf_cache import Conversion
from dualview.report.catalogue import EMBEDDED, NUMBERS, at, beside, bounds, how_tuned, limits, present, shown, what_ran
from dualview.report.published import published
from dualview.tasks.task import Task, TaskCheck


def result_table(result: Result) -> RenderableType:
    """The whole result: what was run, every number beside its floor and ceiling, the verdict and the warnings."""
    content = result.to_json()
    parts: list[RenderableType] = [_heading(content), metrics_report(content, published(result.task.name))]
    skipped = content.get("controls_skipped") or {}
    parts += [Text(f"! {warning}", "yellow") for warning in result.warnings]
    parts += [Text(f"! control {name} was not run: {why}", "yellow") for name, why in skipped.items()]
    return Group(*parts)


def metrics_report(content: Mapping[str, Any], papers: Mapping[str, Mapping[str, float]] | None = None) -> Group:
    """The metrics, what the papers found on the same task, and the verdict."""
    parts: list[RenderableType] = [metrics_table(content)]
    if papers:
        parts += [Text("\npublished, other models:", "dim"), papers_table(papers)]
    if "verdict" in content:
        verdict = content["verdict"]
        parts += [Text(f"\n{verdict['sentence']}", "bold"), Text(str(verdict["limits"]), "dim")]
    return Group(*parts)


def papers_table(papers: Mapping[str, Mapping[str, float]]) -> Table:
    """What each paper reports on the task, a column each."""
    table = Table(box=None, pad_edge=False, style="dim")
    table.add_column("")
    for source in papers:
        table.add_column(source, justify="right")
    for number in NUMBERS:
        values = [papers[source].get(number.key) for source in papers]
        if any(value is not None for value in values):
            table.add_row(number.name, *("" if value is None else format(value, number.style) for value in values))
    return table


def metrics_table(content: Mapping[str, Any]) -> Table:
    """Every metric of a result, or of what `dualview metrics` recomputed, with what it is to be read against."""
    controls = content.get("controls") or {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in ("value", "95 % interval", "highest floor", "ceiling"):
        table.add_column(column, justify="right")
    table.add_column("beside it")
    for number in present(content):
        held = bounds(controls.get(number.control) if number.control else None)
        value = shown(at(content, number.key), number.style)
        table.add_row(number.name, value, held.interval, held.floor, held.ceiling, beside(content, number.key))
    return table


def _heading(content: Mapping[str, Any]) -> Text:
    text = Text()
    text.append(f"{content['provenance']['model']} on {content['task']['name']}", "bold")
    text.append(f": {what_ran(content)}\nfine-tuning: {how_tuned(content)}\n")
    if content["provenance"]["model"] == "embedded":
        text.append(f"{EMBEDDED}\n", "dim")
    return text


def seeds_table(several: SeedsResult) -> RenderableType:
    """Each number over seeds: its mean, the interval of the mean, and every seed's value."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in ("mean", "95 % interval", *(f"seed {seed}" for seed in several.seeds)):
        table.add_column(column, justify="right")
    for number in NUMBERS:
        row = several.summary.get(number.key)
        if row is not None:
            cut = limits(number.key).cut
            interval = "" if row.ci is None else f"{cut(row.ci[0]):+.3f} to {cut(row.ci[1]):+.3f}"
            values = [shown(value, number.style) for value in (row.mean, *row.values)]
            table.add_row(number.name, values[0], interval, *values[1:])
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in several.verdicts.items())
    return Group(_heading(several.results[0].to_json()), table, Text(f"\nverdicts: {verdicts or 'none'}", "bold"))


def task_table(tasks: Sequence[Task]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("task", "template", "labels", "rows from"):
        table.add_column(column, overflow="fold")
    for task in tasks:
        choices = task.choices if isinstance(task.choices, str) else ", ".join(task.choices or ())
        labels = ", ".join(task.labels) or f"the row's own ({choices})"
        table.add_row(task.name, Text(task.template), Text(labels), Text(task.train.rpartition(":")[0] or task.train))
    return table


def task_check_table(checks: Sequence[TaskCheck]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("task", "split", "rows", "rows by label"):
        table.add_column(column)
    notes: list[Text] = []
    for check in checks:
        for name, split in check.splits.items():
            table.add_row(check.task, name, str(split.rows), ", ".join(map(str, split.label_counts)))
        notes += [Text(f"! {check.task}: {warning}", "yellow") for warning in check.warnings]
    return Group(table, *notes)


def asset_table(statuses: Sequence[AssetStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("asset", "from", "licence", "size", "state", "where"):
        table.add_column(column, overflow="fold")
    for status in statuses:
        state = status.state if status.problem is None else f"{status.state}: {status.problem}"
        table.add_row(
            status.title, status.source, status.licence, f"{status.size / 1e6:.0f} MB", state, str(status.path)
        )
    return table


def conversion_table(conversions: Sequence[Conversion]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("converted GGUF", "dtype", "size", "where"):
        table.add_column(column, overflow="fold")
    for each in conversions:
        table.add_row(each.source, each.dtype, f"{each.size / 1e6:.0f} MB", str(each.path))
    return table
