"""Results as tables for a terminal: what was found, what it must be held against, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dualview.assets import AssetStatus
from dualview.report.published import published
from dualview.result import Result
from dualview.tasks.task import Task, TaskCheck

# The result's key, its name for people, and how to write it.
_ROWS: tuple[tuple[str, str, str], ...] = (
    ("accuracy.zsl", "accuracy, zero-shot", ".3f"),
    ("accuracy.icl", "accuracy, in-context", ".3f"),
    ("accuracy.ft", "accuracy, fine-tuned", ".3f"),
    ("rec2ftp.value", "Rec2FTP", ".3f"),
    ("sim_aou.raw", "SimAOU raw", "+.3f"),
    ("sim_aou.normalised", "SimAOU normalised", "+.3f"),
    ("sim_am.before", "SimAM before", "+.3f"),
    ("sim_am.after", "SimAM after", "+.3f"),
    ("sim_am.delta", "SimAM delta", "+.3f"),
    ("update_norm.icl", "update norm, in-context", ".3f"),
    ("update_norm.ft", "update norm, fine-tuned", ".3f"),
)


def result_table(result: Result) -> RenderableType:
    """The whole result: what was run, every number beside its reference, and the warnings."""
    content = result.to_json()
    return Group(
        _heading(content),
        metrics_table(content, published(result.task.name)),
        *(Text(f"! {warning}", "yellow") for warning in result.warnings),
    )


def metrics_table(content: Mapping[str, Any], papers: Mapping[str, Mapping[str, float]] | None = None) -> Table:
    """Every metric of a result, or of what `dualview metrics` recomputed, with what it is to be read against."""
    papers = papers or {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_column("to be read against")
    for source in papers:
        table.add_column(source, justify="right", style="dim")
    for key, name, style in _ROWS:
        value = _at(content, key)
        row = ["null" if value is None else format(value, style), _reference(content, key)]
        row += [_plain(papers[source].get(key)) for source in papers]
        table.add_row(name, *row)
    return table


def _heading(content: Mapping[str, Any]) -> Text:
    task, ft, provenance = content["task"], content["ft"], content["provenance"]
    shots = task["shots_used"] if task["shots_used"] == task["shots"] else f"{task['shots_used']} of {task['shots']}"
    seed = provenance["seeds"]["demos"]
    drawn = "given" if seed is None else f"seed {seed}"
    rule = "" if ft["rule"] == "sgd" else f", {ft['rule']}"
    text = Text()
    text.append(f"{provenance['model']} on {task['name']}", "bold")
    text.append(f": {shots} demonstrations ({drawn}), {task['n_queries']} queries, {provenance['dtype']}\n")
    text.append(f"fine-tuning: {ft['params']} at lr {ft['lr']:g}{rule}, {ft['steps']} steps, {ft['status']}\n")
    return text


def _reference(content: Mapping[str, Any], key: str) -> str:
    """The number a value means nothing without."""
    if key == "rec2ftp.value":
        part = content["rec2ftp"]
        if part["value"] is None:
            return str(part.get("reason", ""))
        return (
            f"chance {_plain(part['chance'])}, p {part['p']:.2g}; {part['n_both']} of {part['n_ft']}; "
            f"reverse {_plain(part['reverse'])}"
        )
    if key == "sim_aou.normalised":
        return f"noise alone {_plain(_at(content, 'sim_aou.noise_floor'))}"
    if key == "sim_aou.raw":
        return "independent updates 0"
    if key == "sim_am.delta":
        return _left_out(content, "sim_am", "delta")
    return ""


def _left_out(content: Mapping[str, Any], metric: str, variant: str) -> str:
    part = _at(content, f"{metric}.undefined.{variant}")
    if not part or not part["count"]:
        return "independent updates 0"
    return f"independent updates 0 ({part['count'] / part['of']:.0%} undefined, left out)"


def _at(content: Mapping[str, Any], key: str) -> Any:
    value: Any = content
    for part in key.split("."):
        value = None if value is None else value.get(part)
    return value


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


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
