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
from dualview.seeds import SeedsResult
from dualview.tasks.task import Task, TaskCheck

# The result's key, its name for people, how to write it, and which of the controls speaks of it.
_ROWS: tuple[tuple[str, str, str, str | None], ...] = (
    ("accuracy.zsl", "accuracy, zero-shot", ".3f", None),
    ("accuracy.icl", "accuracy, in-context", ".3f", None),
    ("accuracy.ft", "accuracy, fine-tuned", ".3f", None),
    ("rec2ftp.value", "Rec2FTP", ".3f", "rec2ftp"),
    ("sim_aou.raw", "SimAOU raw", "+.3f", "sim_aou"),
    ("sim_aou.normalised", "SimAOU normalised", "+.3f", "sim_aou_normalised"),
    ("sim_am.before", "SimAM before", "+.3f", None),
    ("sim_am.after", "SimAM after", "+.3f", "sim_am_after"),
    ("sim_am.delta", "SimAM delta", "+.3f", "sim_am"),
    ("kendall.dual_v.tau_token", "Kendall, dual form of W_V", "+.3f", None),
    ("kendall.released.tau_token", "Kendall, as released", "+.3f", None),
    ("overlap.ft.token_overlap", "top-10 tokens shared, ICL and FT", ".3f", None),
    ("update_norm.icl", "update norm, in-context", ".3f", None),
    ("update_norm.ft", "update norm, fine-tuned", ".3f", None),
)


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
    for key, name, style, _ in _ROWS:
        values = [papers[source].get(key) for source in papers]
        if any(value is not None for value in values):
            table.add_row(name, *("" if value is None else format(value, style) for value in values))
    return table


def metrics_table(content: Mapping[str, Any]) -> Table:
    """Every metric of a result, or of what `dualview metrics` recomputed, with what it is to be read against."""
    controls = content.get("controls") or {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in ("value", "95 % interval", "highest floor", "ceiling"):
        table.add_column(column, justify="right")
    table.add_column("beside it")
    for key, name, style, control in _ROWS:
        value = _at(content, key)
        if value is None and key.split(".")[0] not in content:
            continue
        bounds = _bounds(controls.get(control) if control else None)
        shown = "null" if value is None else format(value, style if abs(value) < 1e6 else ".3g")
        table.add_row(name, shown, *bounds, _beside(content, key))
    return table


def _bounds(control: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """The interval, the highest floor with its name, and the ceiling, as the verdict saw them."""
    if control is None:
        return "", "", ""
    ci = control["ci"]
    interval = "" if ci is None else f"{ci[0]:+.3f} to {ci[1]:+.3f}"
    floors = {name: value for name, value in control["floors"].items() if value is not None}
    highest = max(floors, key=lambda name: floors[name], default=None)
    floor = "" if highest is None else f"{highest} {floors[highest]:+.3f}"
    return interval, floor, _plain(control["ceiling"])


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
    if provenance["model"] == "embedded":
        text.append("embedded: SmolLM2-135M-Instruct, rounded to 4 bits and instruction-tuned\n", "dim")
    return text


def _beside(content: Mapping[str, Any], key: str) -> str:
    """The number a value means nothing without."""
    if key == "rec2ftp.value":
        part = content["rec2ftp"]
        if part["value"] is None:
            return str(part.get("reason", ""))
        return f"p {part['p']:.2g}; {part['n_both']} of {part['n_ft']}; reverse {_plain(part['reverse'])}"
    if key == "sim_aou.normalised":
        return f"noise alone {_plain(_at(content, 'sim_aou.noise_floor'))}"
    if key == "sim_am.delta":
        undefined = _at(content, "sim_am.undefined.delta")
        few = undefined["count"] / undefined["of"] if undefined else 0.0
        return f"{few:.0%} undefined, left out" if few else ""
    if key.startswith("kendall."):
        return f"at lr 0 {_plain(_at(content, key.replace('.tau', '_lr0.tau')))}"
    if key == "overlap.ft.token_overlap":
        return f"ICL reordered {_plain(_at(content, 'overlap.icl_reordered.token_overlap'))}"
    return ""


def _at(content: Mapping[str, Any], key: str) -> Any:
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def seeds_table(several: SeedsResult) -> RenderableType:
    """Each number over seeds: its mean, the interval of the mean, and every seed's value."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in ("mean", "95 % interval", *(f"seed {seed}" for seed in several.seeds)):
        table.add_column(column, justify="right")
    for key, name, style, _ in _ROWS:
        row = several.summary.get(key)
        if row is not None:
            interval = "" if row.ci is None else f"{row.ci[0]:+.3f} to {row.ci[1]:+.3f}"
            numbers = ["null" if value is None else format(value, style) for value in (row.mean, *row.values)]
            table.add_row(name, numbers[0], interval, *numbers[1:])
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
